# `make quickstart` runs the main job on a fresh machine, `make test` the tests; each does all of its set-up.
#
#   make quickstart                       Python >= 3.11 and a package index are all it needs
#   make quickstart TORCH_INDEX=<url>     takes torch from another wheel index first (one with CPU builds, say)
#   make quickstart ARGS="--set model.training.epochs=1"

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH_INDEX ?=
# without an NVIDIA driver the CPU build, gigabytes smaller, where the index has it
HAS_GPU := $(shell command -v nvidia-smi)
CPU_BUILD := $(if $(HAS_GPU),,$(shell sed -n 's/^torch==.*/&+cpu/p' constraints.txt))
ROOM := $(if $(HAS_GPU),12,4)
ARGS ?=

# what would fail only after minutes, said in one sentence before anything is installed
define CHECK
import os, platform, shutil, sys
cpu = "/proc/cpuinfo"
flags = open(cpu).read() if platform.machine() == "x86_64" and os.path.exists(cpu) else "avx2"
free = shutil.disk_usage(os.path.dirname(os.path.abspath("$(VENV)"))).free / 1e9
if sys.version_info < (3, 11):
    sys.exit(f"Raytriever needs Python 3.11 or later, and $(PYTHON) is {platform.python_version()}: make PYTHON=<another>")
if "avx2" not in flags:
    sys.exit("Raytriever needs a processor with AVX2, and this one has none: its libraries are built for it.")
if free < 12 and sys.platform == "linux" and not "$(TORCH_INDEX)":
    print(f"{free:.1f} GB are free: PyPI's torch for Linux needs 12, and 4 from TORCH_INDEX=<PyTorch's CPU builds>")
if free < $(ROOM):
    sys.exit(f"$(VENV) needs $(ROOM) GB of disk, and {free:.1f} GB are free: make VENV=<a folder with more>")
endef
export CHECK

.PHONY: quickstart test gpu-check lint audit install clean

quickstart: $(VENV)/installed
	$(BIN)/raytriever run quickstart $(ARGS)

# compiled once for the many interpreters that tests start
test: export PYTHONDONTWRITEBYTECODE :=
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
	@$(PYTHON) -c "$$CHECK"
	$(PYTHON) -m venv $(VENV)

# torch first: with it in place, no other package pulls another build of it
TORCH := $(BIN)/python -m pip install -q -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
$(VENV)/torch: $(BIN)/python constraints.txt
	$(if $(CPU_BUILD),$(TORCH) $(CPU_BUILD) 2>/dev/null ||) $(TORCH) torch
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
