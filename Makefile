# Needs Linux, git, make and Python 3.11 or newer; everything else goes into .venv.
#
#   make train                                          the built-in example: a tiny model learns arithmetic
#   make train ARGS="recipes/smollm2_gsm8k.yaml"        any recipe, with any --section.key value behind it
#   make train NPROC=2                                  on two processes (one per GPU where there are GPUs)
#   make test                                           the tests, in minutes (JOBS=2 of them at a time)
#   make test-all                                       and those marked slow, root or gpu

PYTHON ?= python3
VENV ?= .venv
NPROC ?= 1
JOBS ?= 2
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# A file's tests share set-up, so they stay in one process.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

.PHONY: train test test-slow test-all lint format clean

train: $(VENV)/train.stamp
	$(BIN)/torchrun --standalone --nproc-per-node $(NPROC) scripts/train.py $(ARGS)

test: $(VENV)/test.stamp
	$(PYTEST) -q -m "not slow and not vllm and not gpu and not root" $(ARGS)

# pytest answers 5 when no test bears a mark.
test-slow: $(VENV)/test.stamp
	$(PYTEST) -q -m "(slow or gpu or root) and not vllm" $(ARGS) || [ $$? -eq 5 ]

test-all: test test-slow

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/test.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache

# The stamps remember an installation until what it was made from changes.
$(VENV)/train.stamp: setup.cfg pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/test.stamp: setup.cfg pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet --constraint constraints.txt --editable ".[test,parity,peft,plot]"
	touch $@ $(VENV)/train.stamp

# A half-made environment (Debian without python3-venv) would be taken for a whole one.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
