# make demo | make test | make lint | make bench | make docs | make clean. Everything lives in .venv; nothing is installed by hand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
# On x86-64 Linux a plain `torch` may bring gigabytes of CUDA: TORCH_INDEX points pip at a CPU index where one is needed.
TORCH_INDEX ?=
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test lint bench bench-linear docs clean kernels

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check $(TORCH) $(TORCH_INDEX) "setuptools>=77" numpy
	touch $@

# The environment with the package itself in editable mode. Torch is there first, so that nothing pulls another build of it, and the
# kernels are built against it (no build isolation).
$(VENV)/.ready: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install -q --disable-pip-version-check --no-build-isolation -e ".[dev,demo,optimum,plot]"
	touch $@

kernels: $(VENV)/.ready
	HF_CPU_ACCEL_REQUIRE_EXTENSION=1 $(BIN)/python setup.py -q build_ext --inplace

demo: kernels
	$(BIN)/hf-cpu-accel demo

test: kernels
	$(BIN)/python -m pytest -q

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: kernels
	$(BIN)/python -m benchmarks.run

bench-linear: kernels
	$(BIN)/python -m benchmarks.linear

docs: $(VENV)/.ready
	$(BIN)/pip install -q --disable-pip-version-check -e ".[docs]" --no-build-isolation
	$(BIN)/mkdocs build --strict

clean:
	rm -rf build dist site src/*.egg-info src/hf_cpu_accel/_C*.so .pytest_cache .mypy_cache .ruff_cache
