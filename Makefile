# `make` lists what there is. Everything runs in .venv, which is made and kept up to date as needed.

PYTHON ?= python3

VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest --numprocesses 2
KERNEL := $(shell find src/weightwire/codec -name '*.[ch]')

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help test check format lint types clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

test: lint types ## Format, lint, types and every test: what CI runs
	$(PYTEST)

check: lint types ## The same without the slow tests: before every commit
	$(PYTEST) -m "not slow"

format: $(VENV)/.tools ## Rewrite the sources in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lint: $(VENV)/.tools
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.installed
	$(BIN)/mypy

clean: ## Remove .venv and everything built
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache src/*.egg-info
	rm -f src/weightwire/codec/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# All but weightwire itself: the tools, and the trainers and the engine of the tests. Compiled at once on all cores, since
# vLLM takes three times as long to start without; a package may hold files that are not for this Python.
$(VENV)/.tools: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "weightwire needs Python 3.11 or newer: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --no-deps --no-compile -r requirements.txt
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	touch $@

# An editable install, again whenever a C source changes. The kernel is optional for users, not here: the old one
# goes first, since a build that fails would leave it for the tests to pass with.
$(VENV)/.installed: $(VENV)/.tools pyproject.toml setup.py $(KERNEL)
	rm -f src/weightwire/codec/*.so
	$(PIP) install --quiet -c requirements.txt --no-build-isolation -e '.[test,dev]'
	$(BIN)/python -c 'import weightwire.codec._kernel' || \
	  { echo 'the kernel did not build: run $(PIP) install -v --no-build-isolation -e . to see why' >&2; exit 1; }
	touch $@
