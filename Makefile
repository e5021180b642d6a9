PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
# What pip is given to install torch, where its default build is not wanted: a wheel, or "torch --index-url ADDRESS".
TORCH ?=
# The versions of Triton to which the kernels are held, beside the one that is installed with everything else.
TRITONS ?= 3.6.0 3.7.1
# The oldest version of torch that is promised, and the newest that was tried; each brings CUDA, 4 to 6 GB.
TORCHES ?= 2.6.0 2.15.0
KERNELS = tests/_triton tests/fuzz tests/loss/test_linear.py
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Compiled modules are kept, whatever the environment says: many tests start the command line anew.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

.PHONY: demo test test-all test-long test-triton test-torch kernels check docs bench sanitize fuzz clean

demo: $(VENV)/.demo  ## the main job on data that ships with the package
	$(BIN)/python -m lastlayer demo

test: $(VENV)/.dev  ## the tests and doctests
	$(PYTEST)

test-all: $(VENV)/.dev  ## the longer tests, which `make test` leaves out
	$(PYTEST) -m "slow and not kernels and not long"

test-long: $(VENV)/.dev  ## the longest tests, for which CI has no time
	$(PYTEST) -m long
	TRITON_INTERPRET=1 $(PYTEST) -m "kernels and slow" $(KERNELS)

test-triton: $(VENV)/.dev $(TRITONS:%=$(VENV)/triton/%)  ## the tests of the GPU kernels in Triton's interpreter, per version
	TRITON_INTERPRET=1 $(PYTEST) -m "kernels and not slow" $(KERNELS)
	for version in $(TRITONS); do \
		PYTHONPATH=$(VENV)/triton/$$version TRITON_INTERPRET=1 $(PYTEST) -m "kernels and not slow" $(KERNELS) || exit 1; \
	done

test-torch: $(TORCHES:%=$(VENV)/torch/%)  ## the tests with other versions of torch, in environments of their own
	for version in $(TORCHES); do \
		PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(VENV)/torch/$$version/bin/python -m pytest -n $(JOBS) --dist worksteal || exit 1; \
	done

kernels: $(VENV)/.dev $(VENV)/triton/3.6.0  ## the GPU kernels that come with the package; no GPU is needed
	PYTHONPATH=$(VENV)/triton/3.6.0 $(BIN)/python -m lastlayer._triton.build --jobs $(JOBS)

check: $(VENV)/.dev  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/.dev  ## the documentation, in docs/_build/html
	OMP_NUM_THREADS=1 $(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html

bench: $(VENV)/.dev  ## the benchmark table of this machine
	$(BIN)/python -m benchmarks.run

SANITIZED ?= build/sanitized

sanitize:  ## the C code under the address and undefined-behaviour sanitizers
	mkdir -p $(dir $(SANITIZED))
	$(CC) -std=gnu11 -g -O1 -Wall -Wextra -Werror -fno-math-errno -fno-trapping-math -fopenmp-simd -pthread \
		-fsanitize=address,undefined -fno-sanitize-recover=all tests/_native/sanitize.c -o $(SANITIZED) -lm
	$(SANITIZED)
	$(CC) -std=gnu11 -O0 -Wall -Wextra -Werror -fno-math-errno -fno-trapping-math -fopenmp-simd -pthread \
		-fsanitize=address,undefined -fno-sanitize-recover=all tests/_native/sanitize_fused.c -o $(SANITIZED)_fused -lm
	$(SANITIZED)_fused

MINUTES ?= 1

fuzz: $(VENV)/.dev  ## hostile rows for every projection and loss, against a reference, for MINUTES
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -W ignore -m fuzz --keep --minutes $(MINUTES)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: constraints.txt | $(BIN)/python
	$(if $(TORCH),$(INSTALL) $(TORCH))
	touch $@

$(VENV)/.demo: pyproject.toml constraints.txt $(VENV)/.torch
	$(INSTALL) -e ".[train,report]"
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt $(VENV)/.torch
	$(INSTALL) -e ".[dev]"
	touch $@ $(VENV)/.demo

$(VENV)/triton/%: | $(BIN)/python  # the interpreter of Triton 3.6 needs an older numpy
	$(INSTALL) --no-deps --target $@.part triton==$* "numpy<2.4"
	mv $@.part $@

$(VENV)/torch/%: pyproject.toml
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet --disable-pip-version-check torch==$* -e ".[test]" "setuptools>=77"
	touch $@

clean:
	rm -rf $(VENV) build docs/_build *.egg-info
