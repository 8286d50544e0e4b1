"""Others' published cases, which the benchmark of the simulator prints as well."""

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="session")
def cases():
    """The module of the published cases."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("simulating.cases")
    finally:
        sys.path.remove(str(BENCHMARKS))
