#!/bin/sh
# Prints the first Python 3.11 or 3.12 that works and can build a virtual environment.
# A pyenv shim may exist and still fail, so each candidate is run rather than looked up.
for python in python3.12 python3.11 python3 python; do
    if "$python" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
        command -v "$python"
        exit 0
    fi
done
echo "No Python 3.11 or 3.12 with the venv module was found: install one, or name it: make PYTHON=/path/to/python3.11" >&2
exit 1
