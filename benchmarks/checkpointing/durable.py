"""Measure the time until a checkpoint is durable, beside a raw write of the same bytes."""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpointing import raw
from checkpointing.child import in_child
from checkpointing.savers import Ours
from checkpointing.sizes import Sizes
from checkpointing.workloads import ManyTensors
from common.jobs import wait_until
from common.machine import Quiet
from common.table import Must, Row

TENSORS = 373
KEPT = 2
"""The checkpoints that `Ours` keeps."""
DELETING_S = 10.0


def rows(folder: Path, quiet: Quiet, sizes: Sizes, rounds: int) -> Iterator[Row]:
    """Yield medians over pairs; in every second pair the raw write comes first."""
    del rounds
    quiet.wait()
    found = in_child(
        measure,
        folder / "case",
        launcher=sizes.launcher,
        folder=str(folder),
        state_mib=sizes.state_mib,
        pairs=sizes.durable_pairs,
    )
    ours_s, raw_s = found["ours_s"], found["raw_s"]
    ratio = statistics.median(ours / limit for ours, limit in zip(ours_s, raw_s, strict=True))
    yield Row(
        measure="÷ raw write, median of pairs",
        ours=ratio,
        limit=1,
        unit="ratio",
        must=Must("<=", 1.15),
    )
    for name, pick in (("median", statistics.median), ("lowest", min), ("highest", max)):
        yield Row(measure=f"durable after, {name}", ours=pick(ours_s), limit=pick(raw_s), unit="s")


def measure(*, folder: str, state_mib: int, pairs: int) -> dict[str, Any]:
    """Return the seconds of every save and every raw write, without the first of each."""
    workload = ManyTensors(count=TENSORS, tensor_bytes=state_mib * 1024**2 // TENSORS)
    size_bytes = sum(tensor.nbytes for tensor in workload.tensors)
    source = raw.noise(size_bytes)
    place = Path(folder) / "checkpoints"
    saver = Ours(place, workload)
    times_s: dict[str, list[float]] = {"ours_s": [], "raw_s": []}

    def ours(step: int) -> float:
        began_s = time.perf_counter()
        saver.save(step)
        saver.wait()
        taken_s = time.perf_counter() - began_s
        saver.fence()
        workload.update()
        return taken_s

    def limit(_step: int) -> float:
        return raw.write_direct(Path(folder) / "raw", source)

    for step in range(pairs + 1):
        for name, way in (("raw_s", limit), ("ours_s", ours))[:: 1 if step % 2 else -1]:
            # Training goes on between two saves, and the checkpoint that the last one made
            # superfluous is deleted then.
            wait_until(lambda: len(list(place.glob("step-*"))) <= KEPT, timeout_s=DELETING_S)
            times_s[name].append(way(step))
    return {name: found[1:] for name, found in times_s.items()}
