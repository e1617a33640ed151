#!/bin/sh
# Prints a Python 3.11 or 3.12 that works and can build a virtual environment: the one .venv was built with if it is
# still there, else the first on the path. A pyenv shim may exist and still fail, so each is run, not looked up.
if [ -x .venv/bin/python ] && .venv/bin/python -IS -c '' 2>/dev/null; then
    echo .venv/bin/python
    exit 0
fi
for python in python3.12 python3.11 python3 python; do
    if "$python" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
        command -v "$python"
        exit 0
    fi
done
echo "No Python 3.11 or 3.12 with the venv module was found: install one, or name it: make PYTHON=/path/to/python3.11" >&2
exit 1
