"""Measure the copy of buffers in the call of `save`.

Forward may change buffers before the optimizer's step, so the call copies them.
"""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpointing.child import in_child
from checkpointing.sizes import Sizes
from common.machine import Quiet
from common.table import Row

WARM_UP = 2
BUFFERS = 16
WIDTH = 512
MIB = 1024**2


def rows(folder: Path, quiet: Quiet, sizes: Sizes, rounds: int) -> Iterator[Row]:
    """Measure the bytes that the call copies and the call's time, with and without buffers.

    There is no peer: stock `async_save` copies the whole state in its call.
    """
    quiet.wait()
    pairs = sizes.buffer_pairs * rounds
    found = in_child(
        measure,
        folder / "case",
        launcher=sizes.launcher,
        folder=str(folder),
        buffers_mib=sizes.buffers_mib,
        pairs=pairs,
    )
    with_ms, without_ms, copy_ms = (
        1000 * statistics.median(found[name]) for name in ("with_s", "without_s", "copy_s")
    )
    yield Row(measure="buffers that the call copies", ours=sizes.buffers_mib, unit="MiB")
    yield Row(measure="call with these buffers", ours=with_ms, unit="ms")
    yield Row(measure="call without buffers", ours=without_ms, unit="ms")
    yield Row(
        measure="difference (limit: memcpy)", ours=with_ms - without_ms, limit=copy_ms, unit="ms"
    )


def measure(*, folder: str, buffers_mib: int, pairs: int) -> dict[str, Any]:
    """Return the seconds of each call with and without buffers, and of a plain one-thread copy."""
    import torch

    import holdfast

    torch.set_num_threads(1)

    def job(name: str, size_mib: int) -> tuple[holdfast.Checkpointer, dict[str, Any]]:
        model = torch.nn.Linear(WIDTH, WIDTH)
        for number in range(BUFFERS if size_mib else 0):
            model.register_buffer(f"queue_{number}", torch.rand(size_mib * MIB // 4 // BUFFERS))
        state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
        return holdfast.Checkpointer(Path(folder) / name), state

    jobs = {"with_s": job("with", buffers_mib), "without_s": job("without", 0)}
    source, target = torch.rand(buffers_mib * MIB // 4), torch.zeros(buffers_mib * MIB // 4)
    found: dict[str, list[float]] = {"copy_s": [], "with_s": [], "without_s": []}
    for step in range(1, WARM_UP + pairs + 1):
        for name, (checkpointer, state) in jobs.items():
            state["model"](torch.ones(1, WIDTH)).sum().backward()
            state["optimizer"].step()
            began_s = time.perf_counter()
            handle = checkpointer.save(step, state)
            found[name].append(time.perf_counter() - began_s)
            handle.result()
        began_s = time.perf_counter()
        target.copy_(source)
        found["copy_s"].append(time.perf_counter() - began_s)
    for checkpointer, _state in jobs.values():
        checkpointer.close()
    return {name: times_s[WARM_UP:] for name, times_s in found.items()}
