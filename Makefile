# The commands a newcomer runs. `make demo` and `make test` need Python 3.11+ with venv, make and git, nothing else.
#
# pip's own environment variables choose where packages come from. The build of torch is the one pip picks for
# `torch` of constraints.txt; README.md tells how to choose the CPU or a GPU build.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_FLAGS ?=
PYTEST_FLAGS ?=

.PHONY: demo test coverage test-slow lint format examples bench bench-quick picture ci clean

demo: $(VENV)/.train
	$(BIN)/holdfast demo $(DEMO_FLAGS)

test: $(VENV)/.dev $(VENV)/.debian
	$(BIN)/python -m pytest -m "not slow" --numprocesses auto --dist loadfile $(PYTEST_FLAGS)

coverage: $(VENV)/.dev $(VENV)/.debian
	$(BIN)/python -m pytest -m "not slow" --cov --cov-report=term:skip-covered $(PYTEST_FLAGS)

test-slow: $(VENV)/.dev $(VENV)/.debian
	$(BIN)/python -m pytest -m slow --numprocesses auto --dist loadfile $(PYTEST_FLAGS)

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

examples: $(VENV)/.dev
	$(BIN)/python examples/run_all.py

bench: $(VENV)/.dev
	for bench in benchmarks/*.py; do $(BIN)/python $$bench --json benchmarks/results/$$(basename $$bench .py).json || exit 1; done

bench-quick: $(patsubst benchmarks/%.py,quick-%,$(wildcard benchmarks/*.py))

quick-%: $(VENV)/.dev
	$(BIN)/python benchmarks/$*.py --quick

picture: $(VENV)/.dev $(VENV)/.debian
	$(BIN)/python docs/images/make_pictures.py

# What takes one core, or waits, shares the machine.
ci:
	$(MAKE) --jobs=2 $(VENV)/.dev $(VENV)/.debian
	$(MAKE) --jobs=2 --output-sync=target lint examples
	$(MAKE) test
	$(MAKE) test-slow
	$(MAKE) --jobs=2 --output-sync=target bench-quick

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage

# What is installed is remembered by stamp files, renewed when the project's own lists change.

$(VENV)/bin/pip:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Holdfast needs Python 3.11 or newer: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "python3 -m venv failed; on Debian: apt-get install python3-venv"; exit 1; }

# pip compiles what it installs on one core, which is a third of its time; files that no Python compiles do not matter.
# It has to be done: where Python may not write beside its modules, every process would compile PyTorch anew.
INSTALL := $(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib > /dev/null 2>&1 || true

$(VENV)/.train: pyproject.toml constraints.txt | $(VENV)/bin/pip
	$(INSTALL) '.[all]'
	@$(COMPILE)
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/pip
	$(INSTALL) '.[dev]'
# Without what it asks for: an older datasets than the rest of this works with, wandb, tensorboard.
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --no-deps torchtitan
	@$(COMPILE)
	@touch $@ $(VENV)/.train

$(VENV)/.debian: tests/debian-packages.txt tests/install-debian-packages.sh | $(VENV)/bin/pip
	tests/install-debian-packages.sh tests/debian-packages.txt
	@touch $@
