"""Measure on one GPU with a state of 6 to 36 GB and a save every ten steps; peer: torch.save."""

import shutil
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from checkpointing import lost, raw
from checkpointing.savers import ATTESTED, DCP_PINNED, NVRX, OURS, TORCH_SAVE
from checkpointing.sizes import Sizes, Training
from common.jobs import say
from common.machine import Quiet
from common.table import Must, Row

WIDTH, INNER, VOCABULARY = 2048, 5632, 32_000
BYTES_A_NUMBER = 12
"""Weights in fp32 and AdamW's moments; with gradients, 16."""
MIN_BYTES = 6e9
LAYER_BYTES = BYTES_A_NUMBER * (4 * WIDTH**2 + 3 * WIDTH * INNER)
EMBEDDING_BYTES = BYTES_A_NUMBER * 2 * WIDTH * VOCABULARY
PAIRS, SHORT_PAIRS, CALLS = 2, 4, 4
PEERS = (TORCH_SAVE, DCP_PINNED, NVRX)
SAMPLE_BYTES = 1024**3


def rows(folder: Path, quiet: Quiet, sizes: Sizes, rounds: int) -> Iterator[Row]:
    """Yield the rows, or one row with the reason for none."""
    if not torch.cuda.is_available():
        yield Row(measure="skipped: there is no CUDA device", unit="")
        return
    size = replace(
        sizes.lost,
        shape={**sizes.lost.shape, "device": "cuda"},
        savers=(OURS, ATTESTED, *PEERS),
        launcher=(sys.executable,),  # CUDA does not work in a fork
    )
    if size.forward_backward_s is not None:
        room_bytes = min(sizes.gpu_bytes, _room_bytes(folder))
        if room_bytes < MIN_BYTES:
            yield Row(
                measure=f"skipped: there is room for a state of {room_bytes / 1e9:.1f} GB only",
                unit="",
            )
            return
        size = _large(size, room_bytes, folder)
    found = lost.find(folder, quiet, size, rounds)
    yield Row(measure="state", ours=found.median(OURS, "state_bytes") / 1e9, unit="GB")
    yield Row(measure="a step without a save", ours=found.median(OURS, "plain_step_s"), unit="s")
    fence_ms = lost.percentile_99(found.times[OURS]["fence_s"]) * 1000
    yield Row(
        measure="fence, 99th percentile", ours=fence_ms, limit=0, unit="ms", must=Must("<=", 10)
    )
    yield lost.call_row(found)
    for saver, limit in ((OURS, Must("<=", 0.5)), (ATTESTED, None)):
        name = "throughput lost" if saver == OURS else "throughput lost, attested"
        theirs = _share(found, TORCH_SAVE, size.steps)
        share = _share(found, saver, size.steps)
        yield Row(measure=name, ours=100 * share, peer=100 * theirs, limit=0, unit="%", must=limit)
    stall_s = {name: _stall_s(found, name) for name in (OURS, TORCH_SAVE)}
    ratio = stall_s[TORCH_SAVE] / stall_s[OURS]
    yield Row(
        measure="stall: torch.save ÷ ours", ours=ratio, peer=1, unit="ratio", must=Must(">=", 1000)
    )
    yield from lost.each(found, lost.TIMES)


def _share(found: lost.Found, saver: str, steps: int) -> float:
    """Return the cost of one save as a share of the time of `steps` steps."""
    return found.median(saver, "lost_s") / (steps * found.median(saver, "plain_step_s"))


def _room_bytes(folder: Path) -> float:
    """Return the largest state that fits.

    The GPU must hold 16/12 of the state and the activations, the machine 3 copies, the disk 4.
    """
    return min(
        torch.cuda.get_device_properties(0).total_memory / 1.8,
        psutil.virtual_memory().available / 3,
        shutil.disk_usage(folder).free / 4,
    )


def _large(size: Training, room_bytes: float, folder: Path) -> Training:
    """Return a size whose steps are so long that a disk of half the speed keeps up with saves."""
    layers = int((room_bytes - EMBEDDING_BYTES) // LAYER_BYTES)
    source = raw.noise(SAMPLE_BYTES)
    disk_bytes_s = SAMPLE_BYTES / raw.write_direct(folder / "sample", source)
    step_s = 2 * room_bytes / disk_bytes_s / size.steps
    say(f"gpu: {layers} layers, {step_s:.2f} s of forward and backward")
    return replace(
        size,
        shape={
            **size.shape,
            "layers": layers,
            "width": WIDTH,
            "inner": INNER,
            "vocabulary": VOCABULARY,
        },
        amount=1024,
        forward_backward_s=step_s,
        pairs=PAIRS,
        short_pairs=SHORT_PAIRS,
        calls=CALLS,
    )


def _stall_s(found: lost.Found, saver: str) -> float:
    """Return the time of call and fence together."""
    times = found.times[saver]
    return statistics.median(map(sum, zip(times["call_s"], times["fence_s"], strict=True)))
