# The commands for newcomers. `make demo` and `make test` need only Python 3.11+ with venv, make and
# git.
#
# pip's own environment variables choose where packages come from. pip installs its default build of
# the `torch` that constraints.txt names; README.md explains how to choose the CPU build or a GPU
# build.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_FLAGS ?=
PYTEST_FLAGS ?=

# Without bytecode files, every process that the tests start would compile all modules that it
# imports.
unexport PYTHONDONTWRITEBYTECODE

# Five workers for two cores, since tests wait for more than half of their time. Files come in the order of their
# folders, the longest first (tests/conftest.py): by their number of tests, the long end-to-end runs would all come last.
PARALLEL := --numprocesses $(shell echo $$(($$(nproc) * 5 / 2))) --dist loadfile --no-loadscope-reorder

.PHONY: demo test coverage test-slow test-gpu docs-test site lint collect format examples bench bench-quick picture profile-cases ci clean

demo: $(VENV)/.train
	$(BIN)/holdfast demo $(DEMO_FLAGS)

test: $(VENV)/.dev $(VENV)/.debian $(VENV)/.trackers
	$(BIN)/python -m pytest -m "not slow" $(PARALLEL) $(PYTEST_FLAGS)

coverage: $(VENV)/.dev $(VENV)/.debian $(VENV)/.trackers
	$(BIN)/python -m pytest -m "not slow" --cov --cov-report=term:skip-covered $(PYTEST_FLAGS)

test-slow: $(VENV)/.dev $(VENV)/.debian $(VENV)/.trackers
	$(BIN)/python -m pytest -m slow $(PARALLEL) $(PYTEST_FLAGS)

# These tests need at least one GPU; without a GPU they are skipped.
test-gpu:
	$(or $(GPU_PYTHON),$(BIN)/python) -m pytest tests/checkpoint/test_gpu_copy.py tests/checkpoint/test_gpu_plan.py tests/checkpoint/test_xxh3_kernel.py $(PYTEST_FLAGS)

# Executes the code blocks of the README and of the pages for newcomers. Blocks that need more than
# CI has, such as Slurm, are only checked and listed.
docs-test: $(VENV)/.dev
	$(BIN)/python .ci/docs_blocks.py

# The pages of docs/, the API, the commands and the schemas, in site/. A warning, such as a broken link, is an error.
site: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

# Compiles the tests once; otherwise each worker would compile them.
collect: $(VENV)/.dev
	$(BIN)/python -m pytest --collect-only -qq -p no:cacheprovider

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

EXAMPLES := $(addprefix example-,minimal_loop ddp integrations evaluate diagnose characterize)
QUICK := $(filter-out quick-demo_seeds,$(patsubst benchmarks/%.py,quick-%,$(wildcard benchmarks/*.py)))

examples: $(EXAMPLES)

example-%: $(VENV)/.dev
	$(BIN)/python examples/run_all.py $*

bench: $(VENV)/.dev
	for bench in benchmarks/*.py; do $(BIN)/python $$bench --json benchmarks/results/$$(basename $$bench .py).json || exit 1; done

# All benchmarks except demo_seeds: tests/e2e runs the demonstration once and checks the rows that
# demo_seeds derives.
bench-quick: $(QUICK)

quick-%: $(VENV)/.dev
	$(BIN)/python benchmarks/$*.py --quick

# The synthetic 123B job in two layouts, and an evaluation: recordings and pages.
profile-cases: $(VENV)/.dev
	$(BIN)/python -m holdfast.profile.synthetic profile-cases
	$(BIN)/holdfast profile report profile-cases/3d --compare profile-cases/zero
	$(BIN)/holdfast profile report profile-cases/evaluation

picture: $(VENV)/.dev $(VENV)/.debian
	$(BIN)/python docs/images/make_pictures.py

# The longest targets start first, so that none of them runs alone at the end.
LONGEST := quick-checkpoint quick-chaos quick-recover quick-evaluate quick-overhead example-integrations

# A failed test, page, example or quick benchmark runs once more, alone; lint, the site and the collection do not.
ci:
	$(MAKE) --jobs=2 $(VENV)/.dev $(VENV)/.debian $(VENV)/.trackers
	$(MAKE) $(VENV)/.docs
	$(BIN)/python .ci/checks.py --once lint site collect --again $(LONGEST) docs-test $(filter-out $(LONGEST),$(EXAMPLES) $(QUICK)) -- $(PARALLEL) $(PYTEST_FLAGS)

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage

# Stamp files record the installations. make installs again when one of the project's package lists
# changes.

$(VENV)/bin/pip:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Holdfast needs Python 3.11 or newer: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "python3 -m venv failed; on Debian: apt-get install python3-venv"; exit 1; }
# The pip that comes with Python 3.11 takes twice as long to find a package.
	-$(BIN)/pip install --quiet --upgrade pip

# pip spends a third of its time compiling the installed modules on one core. Instead, compile only
# the packages that every training process imports, in case Python cannot write beside its modules
# later. Python compiles all other modules when they are first imported.
PIP := $(BIN)/pip install --quiet --no-compile
INSTALL := $(PIP) --constraint constraints.txt --editable
# All versions are pinned, so two processes can install one half each without resolving
# dependencies. The next command installs this project, and the packages that the pinned packages
# need on another platform.
AHEAD := for half in 0 1; do \
	awk "!/^\#/ && NR % 2 == $$half" constraints.txt | $(PIP) --no-deps --requirement /dev/stdin & done; wait
SITE := $(VENV)/lib/python*/site-packages
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(SITE)/torch $(SITE)/sympy > /dev/null 2>&1 || true

$(VENV)/.train: pyproject.toml constraints.txt | $(VENV)/bin/pip
	$(INSTALL) '.[all]'
	@$(COMPILE)
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/pip
	@$(AHEAD)
	$(INSTALL) '.[dev]'
# torchtitan is installed without its dependencies: a datasets release too old for the other
# packages, wandb, tensorboard.
	$(PIP) --constraint constraints.txt --no-deps torchtitan
	@$(COMPILE)
	@touch $@ $(VENV)/.train

# Must not run at the same time as another installation into the same environment.
$(VENV)/.docs: pyproject.toml constraints.txt | $(VENV)/bin/pip
	$(INSTALL) '.[docs]'
	@touch $@

$(VENV)/.debian: tests/debian-packages.txt tests/install-debian-packages.sh | $(VENV)/bin/pip
	tests/install-debian-packages.sh tests/debian-packages.txt
	@touch $@

$(VENV)/.trackers: tests/trackers.txt | $(VENV)/bin/pip
	$(PIP) --no-deps --upgrade --target $(VENV)/trackers --requirement tests/trackers.txt
	@touch $@
