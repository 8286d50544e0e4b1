"""Compare the lower bound with the best of all schedules, on tiny instances of the bound's test."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from common.machine import Quiet
from common.table import Must, Row
from holdfast.evaluate.policy.bound import lower_bound

TEST = Path(__file__).parents[2] / "tests" / "evaluate" / "policy" / "test_bound_brute_force.py"
INSTANCES = 500


def rows(folder: Path, quiet: Quiet, *, quick: bool, rounds: int, seed: int) -> Iterator[Row]:
    """Yield how often the bound is above the best schedule (never), and how near it comes."""
    del folder, quiet, rounds
    tries = _tries()
    count = 50 if quick else INSTANCES
    above, reached = 0, []
    for number in range(count):
        case = tries.instance(seed * INSTANCES + number)
        bound_s, best_s = lower_bound(tries.work_of(*case)).seconds, tries.optimum(*case)
        above += bound_s > best_s + 1e-9
        reached.append(bound_s / best_s if best_s else 1.0)
    yield Row(measure=f"tiny instances whose bound is above the best of all schedules, of {count}", ours=above, limit=0,
              unit="instances", must=Must("=", 0))  # fmt: skip
    reached.sort()
    yield Row(
        measure="the bound over the best of all schedules, median",
        ours=reached[count // 2],
        limit=1,
        unit="ratio",
    )
    yield Row(
        measure="the bound over the best of all schedules, least",
        ours=reached[0],
        limit=1,
        unit="ratio",
    )


def _tries() -> ModuleType:
    described = importlib.util.spec_from_file_location("bound_brute_force", TEST)
    assert described is not None
    assert described.loader is not None
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    return module
