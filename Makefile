# make run | test | check | gpu-check GPU=h200. Variables: PYTHON (3.10 or later), TORCH_INDEX (an index with the torch
# build to install, e.g. https://download.pytorch.org/whl/cpu), PIP_FLAGS, GPU_PYTHON (the interpreter with CUDA torch).
PYTHON ?= python3
TORCH_INDEX ?=
PIP_FLAGS ?=
GPU ?= h200
GPU_PYTHON ?= python3

BIN := .venv/bin
STAMP := $(shell date -u +%Y%m%dT%H%M%SZ)
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES = $(shell git ls-files '*.cu' '*.cuh' '*.h' '*.cpp')

.PHONY: run test check format gpu-check
.DELETE_ON_ERROR:

run: .venv/run.stamp
	$(BIN)/python tools/evaluate.py --gpu cpu --output runs/cpu-$(STAMP).json

test: .venv/dev.stamp
	$(BIN)/python -m pytest -m "not gpu"

check: .venv/dev.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(SOURCES)

format: .venv/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(SOURCES)
	$(BIN)/python tools/load_kernel.py --update-hashes

# The report becomes evidence only when all passed; until then, and where something fails, it lies under runs/.
gpu-check:
	$(GPU_PYTHON) tools/load_kernel.py --gpu $(GPU) --verbose
	$(GPU_PYTHON) tools/evaluate.py --gpu $(GPU) --output runs/$(GPU)-$(STAMP).json
	$(GPU_PYTHON) -m pytest -m gpu --gpu $(GPU)
	$(GPU_PYTHON) tools/evidence.py runs/$(GPU)-$(STAMP).json

# torch alone comes from TORCH_INDEX, and what it depends on from the default index.
.venv/run.stamp: constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "error: $(PYTHON) is older than 3.10 or missing; set PYTHON=" >&2; exit 2; }
	$(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv .venv
	$(if $(TORCH_INDEX),$(PIP) install $(PIP_FLAGS) -c constraints.txt --index-url $(TORCH_INDEX) --no-deps torch)
	$(PIP) install $(PIP_FLAGS) -c constraints.txt .
	@touch $@

.venv/dev.stamp: .venv/run.stamp
	$(PIP) install $(PIP_FLAGS) -c constraints.txt '.[dev]'
	@touch $@
