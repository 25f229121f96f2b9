# `make train` and `make test` do everything, from an empty checkout. `make venv` only prepares.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
TORCH := $(shell sed -n 's/^torch==//p' requirements.lock)

.PHONY: venv train test test-slow test-torch lint types check clean

venv: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "stretto needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	sed 's/^torch==.*/torch==$(TORCH)/' requirements.lock > $(VENV)/requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r $(VENV)/requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

train: venv
	$(BIN)/stretto train examples/gpt_text.toml

# Tests run side by side, a file on one worker: what a file makes once stays made. Files go to workers in the
# order that tests/conftest.py gives them. Those that measure time run after the others, alone: only files that
# have some are read. Every worker and every rank has one thread. Modules are compiled once, and not by every
# process that tests start.
WORKERS := --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
QUIET = $(shell grep -rlE 'mark\.(quiet|lab)' tests --include='test_*.py')
test test-slow: export OMP_NUM_THREADS = 1
test test-slow: export PYTHONDONTWRITEBYTECODE =

test: venv
	$(BIN)/python -m pytest -m "not slow and not quiet" $(WORKERS)
	$(BIN)/python -m pytest -m "not slow and quiet" $(QUIET)

test-slow: venv
	$(BIN)/python -m pytest -m "slow and not quiet" $(WORKERS)
	$(BIN)/python -m pytest -m "slow and quiet" $(QUIET)

# The same tests as `make test`, with another release of PyTorch, in an environment of its own beside .venv.
VERSION := 2.11.0
test-torch:
	$(MAKE) test VENV=.venv-torch-$(VERSION) TORCH=$(VERSION)

lint: venv
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: venv
	$(BIN)/mypy

check: lint types test

clean:
	rm -rf runs .pytest_cache .mypy_cache .ruff_cache
