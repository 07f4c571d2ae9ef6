# make setup | test | demo | selftest | chaos | bench | check     (PYTHON=python3.12 picks another interpreter)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BUILD := $(shell command -v nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)
UV := VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip

# Compiled modules are kept: else every process that a test starts would compile vLLM's again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup test demo selftest chaos bench check clean

setup: $(VENV)/.ready-$(BUILD)

# The CPU build of torch has a version of its own. Where pip does not find it at once, uv knows the
# index that PyTorch publishes it on. uv also drops vLLM's requirements that are CUDA-only (pyproject.toml).
$(VENV)/.ready-$(BUILD): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if v in ((3, 11), (3, 12)) else f"minirl needs Python 3.11 or 3.12, $(PYTHON) is {v[0]}.{v[1]}; say: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
ifeq ($(BUILD),cpu)
	$(BIN)/python -m pip install --quiet "torch==2.13.0+cpu" || $(UV) install --quiet --torch-backend cpu torch==2.13.0
endif
	$(UV) install --quiet --editable ".[$(BUILD),dev]"
	@touch $@

# Three processes, since each waits much, a file in one of them; one where they would share a GPU.
test: setup
	$(BIN)/python -m pytest $(if $(filter cpu,$(BUILD)),-n 3 --dist loadfile --no-loadscope-reorder)

demo: setup
	$(BIN)/python -m examples.calculator.demo

selftest: setup
	$(BIN)/python -m minirl.selftest

# Kills the demo's training fifty times; not part of `make test`.
chaos: setup
	$(BIN)/python -m benchmarks.chaos

# For idle machines; writes benchmarks/RESULTS.md.
bench: setup
	$(BIN)/python -m benchmarks

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info
