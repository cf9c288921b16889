# `make quickstart` runs the main job on a fresh machine, `make test` the tests; each does all of its set-up.
#
#   make quickstart                       Python >= 3.11 and a package index are all it needs
#   make quickstart TORCH_INDEX=<url>     takes torch from another wheel index first (one with CPU builds, say)
#   make quickstart ARGS="--set model.training.epochs=1"

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH_INDEX ?=
ARGS ?=

.PHONY: quickstart test gpu-check lint audit install clean

quickstart: $(VENV)/installed
	$(BIN)/raytriever run quickstart $(ARGS)

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder $(ARGS)

# ten minutes on a machine with a GPU
gpu-check: $(VENV)/installed-dev
	$(BIN)/python -m benchmarks.gpu_check --output runs/gpu-check $(ARGS)

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright

# asks which of the pinned releases have known vulnerabilities; one that it can't tell about is a failure too
audit: $(BIN)/python
	$(BIN)/python -m pip install -q pip-audit
	$(BIN)/pip-audit --strict --no-deps --disable-pip -r constraints.txt

install: $(VENV)/installed

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Raytriever needs Python 3.11 or later")'
	$(PYTHON) -m venv $(VENV)

# torch first: with it in place, no other package pulls another build of it
$(VENV)/torch: $(BIN)/python constraints.txt
	$(BIN)/python -m pip install -q -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	touch $@

$(VENV)/installed: $(VENV)/torch pyproject.toml
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[cpu,offline]'
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[cpu,offline,dev]'
	touch $@

# not runs: it is where every recipe puts what it has computed
clean:
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache
