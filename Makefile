PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-all check docs bench sanitize clean

demo: $(VENV)/.demo  ## the main job on data that ships with the package
	$(BIN)/python -m lastlayer demo

test: $(VENV)/.dev  ## the tests and doctests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-all: $(VENV)/.dev  ## the longer tests, which `make test` leaves out
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m slow

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

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e ".[train,report]"
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e ".[dev]"
	touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) build docs/_build *.egg-info
