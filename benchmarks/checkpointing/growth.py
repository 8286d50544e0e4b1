"""Measure memory over very many saves of a small state."""

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from checkpointing.child import in_child
from checkpointing.savers import Ours
from checkpointing.sizes import Sizes
from checkpointing.workloads import ManyTensors
from common.machine import Quiet
from common.table import Must, Row

TENSORS = 32
SAMPLES = 50
COPIES = 2
"""Copies of the state that Holdfast may hold: one being written, one for the next save."""
HELPER_MIB = 64
"""Further memory that the writing process may use."""
MIB = 1024**2


def rows(folder: Path, quiet: Quiet, sizes: Sizes, rounds: int) -> Iterator[Row]:
    """Yield the memory of the rank and its processes beyond that before the first save."""
    del rounds
    quiet.wait()
    found = in_child(
        measure,
        folder / "case",
        launcher=sizes.launcher,
        folder=str(folder),
        state_mib=sizes.small_mib,
        saves=sizes.saves,
    )
    budget_mib = COPIES * sizes.small_mib + HELPER_MIB
    added = found["added_mib"]
    tenth = len(added) // 10
    yield Row(
        measure=f"most of {sizes.saves} saves ÷ budget",
        ours=max(added) / budget_mib,
        limit=1,
        unit="ratio",
        must=Must("<=", 1.1),
    )
    yield Row(measure="most (limit: budget)", ours=max(added), limit=budget_mib, unit="MiB")
    yield Row(
        measure="last tenth ÷ second tenth",
        ours=statistics.median(added[-tenth:]) / statistics.median(added[tenth : 2 * tenth]),
        limit=1,
        unit="ratio",
        must=Must("<=", 1.05),
    )


def measure(*, folder: str, state_mib: int, saves: int) -> dict[str, Any]:
    """Return the added MiB at evenly spaced moments with a save in flight."""
    from holdfast.checkpoint import checkpointer  # noqa: F401 - code is not what grows, nor what the budget is for

    workload = ManyTensors(count=TENSORS, tensor_bytes=state_mib * MIB // TENSORS)
    before_mib = _held_mib()
    saver = Ours(Path(folder) / "checkpoints", workload)
    added_mib = []
    for step in range(1, saves + 1):
        saver.save(step)
        saver.fence()
        workload.update()
        if step % max(1, saves // SAMPLES) == 0:
            added_mib.append(_held_mib() - before_mib)
        saver.wait()
    return {"added_mib": added_mib}


def _held_mib() -> float:
    """Return RSS and shared memory of this process and its children; shared pages count once."""
    own = psutil.Process()
    pss_bytes = sum(
        process.memory_full_info().pss for process in (own, *own.children(recursive=True))
    )
    return pss_bytes / MIB
