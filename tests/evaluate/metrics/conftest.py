"""Make one sandbox for all tests of this folder that do not harm it."""

import os
from collections.abc import Iterator

import pytest

from evaluation import hostile_trials
from evaluation.hostile_trials import LIMITS, Outside
from holdfast.core.errors import BadUse
from holdfast.evaluate.metrics.sandbox.sandbox import Sandbox


@pytest.fixture(scope="session")
def outside() -> Iterator[Outside]:
    with hostile_trials.outside() as everything:
        yield everything


@pytest.fixture(
    scope="session", params=["namespaces", pytest.param("plain", marks=pytest.mark.slow)]
)
def sandbox(request: pytest.FixtureRequest, outside: Outside) -> Iterator[Sandbox]:
    """Make a sandbox with all protection, and one with the least allowed."""
    namespaces = request.param == "namespaces"
    if not namespaces and os.geteuid() != 0:
        pytest.skip("without namespaces only root can take on another user")
    try:
        each = Sandbox(2, LIMITS, packages=False, namespaces=namespaces)
    except BadUse as error:
        pytest.skip(str(error))
    with each:
        yield each
