# A newcomer needs two commands: `make demo` and `make test`. Each makes .venv from nothing and installs what it needs into it.
# The stamp files record which extra is installed; touching pyproject.toml makes them stale.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test test-env lint help
.DEFAULT_GOAL := help

help:
	@echo "make demo      calibrate a small real model, compare 2-bit caches, write demo-out/"
	@echo "make test      ruff, pyright and pytest"
	@echo "make test-env  only install what 'make test' needs"

demo: $(VENV)/.stamp-demo
	$(BIN)/oscar-jax demo

test: lint
	$(BIN)/python -m pytest

lint: $(VENV)/.stamp-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

test-env: $(VENV)/.stamp-test

$(VENV)/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "oscar-jax needs Python 3.11 or newer, got " + sys.version.split()[0] + ": try make PYTHON=python3.12")'
	@$(PYTHON) -m venv $(VENV) || { echo "python3 cannot make a virtual environment: install its venv module (Debian: apt install python3-venv)"; exit 1; }
	@touch $@

$(VENV)/.stamp-demo: $(VENV)/.stamp-venv pyproject.toml
	$(PIP) install -e '.[plot]'
	@touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-venv pyproject.toml
	$(PIP) install -e '.[test]'
	@touch $@
