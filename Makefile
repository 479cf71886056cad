# Two commands set everything up by themselves on a fresh machine: `make serve` and `make test`.
# They need Python >= 3.11 (with venv), make and a network; the second time they are quick.

VENV := .venv
BIN := $(VENV)/bin
# The benchmark harness that a slow test runs: its pyzmq, rich and prometheus-client are older than ours.
AGENTX := .venv-agentx
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?=
ARGS ?=
# Whose torch `make test-gpu` uses: an environment of your own with a CUDA build (.venv has one for CPUs).
PYTHON ?= python3
# Two workers, one torch thread each: the tests are many and small.
WORKERS ?= 2
PYTEST_ARGS ?=

# Where CPU wheels of torch are kept: PyPI's torch for Linux is a CUDA build of several GB.
TORCH_INDEX := https://download.pytorch.org/whl/cpu
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: help serve test test-gpu check fmt clean
.DEFAULT_GOAL := help

help:
	@echo "make serve   serve the embedded tiny model on http://$(HOST):$(PORT)/v1  (MODEL=path PORT=8000 ARGS='...')"
	@echo "make test    everything CI runs: format, lint, types, import contracts, all CPU tests"
	@echo "make test-gpu  on a machine with a CUDA device and a CUDA build of torch: the engine and the kernels there"
	@echo "make check   the same without the slow tests"
	@echo "make fmt     format and fix what can be fixed"
	@echo "make clean   remove the environment and every build output"

serve: $(VENV)/.installed
	$(BIN)/flashstep serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

test: lint $(VENV)/.installed-dev $(AGENTX)/.installed
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

test-gpu:
	@$(PYTHON) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("$(PYTHON) has a torch that sees no CUDA device; name another: make test-gpu PYTHON=...")'
	$(PYTHON) -m pytest tests/kernels $(PYTEST_ARGS)
	$(PYTHON) -m pytest -m gpu -s tests/e2e tests/bench tests/model tests/runner tests/speculate $(PYTEST_ARGS)

check: lint $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile -m "not gpu and not gpus and not slow" $(PYTEST_ARGS)

.PHONY: lint
lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/ty check
	$(BIN)/lint-imports --no-logo

fmt: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(AGENTX) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# ---- set-up -----------------------------------------------------------------------------------------------------------

$(BIN)/python:
	@for candidate in python3.11 python3.12 python3.13 python3 python; do \
	  if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then \
	    echo "setting up $(VENV) with $$candidate"; exec "$$candidate" -m venv $(VENV); \
	  fi; \
	done; \
	echo "flashstep needs Python 3.11, 3.12 or 3.13 with the venv module, and found none on PATH." >&2; \
	echo "On Debian or Ubuntu: apt install python3 python3-venv" >&2; exit 1

# torch first and alone, so that its index can serve nothing else; an index out of reach only costs a second
$(VENV)/.torch: constraints-cpu.txt | $(BIN)/python
	@echo "installing torch for the CPU (about 200 MB, once)"
	$(PIP) install --retries 2 -c constraints-cpu.txt --extra-index-url $(TORCH_INDEX) torch
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	@echo "installing flashstep"
	$(PIP) install -c constraints-cpu.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.torch pyproject.toml
	@echo "installing flashstep and the test tools"
	$(PIP) install -c constraints-cpu.txt -e '.[dev]'
	@touch $@ $(VENV)/.installed

$(AGENTX)/.installed: Makefile | $(BIN)/python
	@echo "installing the AgentX harness beside the tests (1.1 GB, once)"
	$(BIN)/python -m venv $(AGENTX)
	$(AGENTX)/bin/python -m pip --disable-pip-version-check --quiet install agentx-harness==1.0.12
	@touch $@
