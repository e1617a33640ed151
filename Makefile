# make quickstart   builds .venv from the lock file for this machine, then trains the embedded default
# make test         everything not marked slow;  make soak: the rest
# make PYTHON=/path/to/python3.11 ...  and  make LOCK=cpu|cuda ...  override what is found
PYTHON ?=
LOCK ?= auto
BIN := .venv/bin

.PHONY: quickstart env test soak lint locks

quickstart: env
	$(BIN)/torchrun launch/train.py +experiment=grpo

env:
	@python="$(PYTHON)"; if [ -z "$$python" ]; then python=$$(requirements/python.sh) || exit 1; fi; \
	"$$python" -IS requirements/env.py --lock $(LOCK)

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not gpu" --numprocesses=2 --dist=loadgroup

soak: env
	$(BIN)/python -m pytest -m "slow and not gpu"

# Resolves both lock files anew from pyproject.toml; requirements/lock.py says what is left out and why.
locks: env
	$(BIN)/python requirements/lock.py
