"""Restore from disk with a cold page cache, beside a raw read and `dcp.load`."""

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from checkpointing import raw
from checkpointing.child import in_child
from checkpointing.durable import TENSORS
from checkpointing.heard import Heard
from checkpointing.savers import DcpSave, Ours
from checkpointing.sizes import Sizes
from checkpointing.workloads import ManyTensors
from common.jobs import DoesNotWork
from common.machine import Quiet
from common.table import Must, Row


def rows(folder: Path, quiet: Quiet, sizes: Sizes, rounds: int) -> Iterator[Row]:
    """Yield medians of rounds, in turn."""
    quiet.wait()
    found = in_child(
        measure,
        folder / "case",
        launcher=sizes.launcher,
        folder=str(folder),
        state_mib=sizes.state_mib,
        rounds=max(rounds, 3),
    )
    share, of_huge = (
        statistics.median(
            limit / ours for ours, limit in zip(found["ours"], found[name], strict=True)
        )
        for name in ("raw", "huge")
    )
    median_s = {name: statistics.median(times_s) for name, times_s in found.items()}
    theirs = median_s["raw"] / median_s["peer"]
    yield Row(measure="verified, of the raw rate [dcp.load]", ours=share, peer=theirs, limit=1, unit="share",
              must=Must(">=", 0.9))  # fmt: skip
    yield Row(measure="the same, of a raw read into huge pages [dcp.load]", ours=of_huge,
              peer=median_s["huge"] / median_s["peer"], limit=1, unit="share")  # fmt: skip
    yield Row(measure="restored in, median [dcp.load]", ours=median_s["ours"], peer=median_s["peer"],
              limit=median_s["huge"], unit="s")  # fmt: skip


def measure(*, folder: str, state_mib: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of every round; compare the read state with the saved one.

    Raises:
        DoesNotWork: a wrong state was read, or not from disk.
    """
    from torch.distributed.checkpoint import state_dict_loader

    import holdfast

    heard, workload = (
        Heard(),
        ManyTensors(count=TENSORS, tensor_bytes=state_mib * 1024**2 // TENSORS),
    )
    saved = [tensor.clone() for tensor in workload.tensors]
    place = Path(folder)
    _save(place, workload)

    def ours() -> None:
        with holdfast.Checkpointer(place / "ours") as ckpt:
            ckpt.restore(workload.state)
        heard.demand_tier("disk")

    def peer() -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="torch.distributed is disabled", category=UserWarning
            )
            state_dict_loader.load(
                workload.state, checkpoint_id=place / "peer" / "step-1", no_dist=True
            )

    def restored_s(way: Callable[[], None], files: Path) -> float:
        for tensor in workload.tensors:
            tensor.zero_()
        raw.drop_caches(files)
        began_s = time.perf_counter()
        way()
        taken_s = time.perf_counter() - began_s
        if not all(map(torch.equal, workload.tensors, saved)):
            raise DoesNotWork(f"something else was restored from {files.name}")
        return taken_s

    times_s: dict[str, list[float]] = {"raw": [], "huge": [], "ours": [], "peer": []}
    for _ in range(rounds):
        for name in ("raw", "huge"):
            raw.drop_caches(place / "ours")
            times_s[name].append(raw.read_direct(place / "ours", huge_pages=name == "huge")[1])
        times_s["ours"].append(restored_s(ours, place / "ours"))
        times_s["peer"].append(restored_s(peer, place / "peer"))
    return times_s


def _save(place: Path, workload: ManyTensors) -> None:
    """Save with Holdfast and with DCP."""
    ours = Ours(place / "saved", workload)
    ours.save(1)
    ours.wait()
    ours.close()
    (place / "saved").rename(
        place / "ours"
    )  # what is still in memory is of a folder of another name
    (place / "peer").mkdir()
    DcpSave(place / "peer", workload).save(1)
