"""A save that became durable: what it is and what it cost, and the one event that tells of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.checkpoint.writer.client import WriteResult


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """A durable checkpoint, and what it cost.

    Attributes:
        step: it is of.
        path: it lies there.
        own_bytes: of this rank's files.
        written: what the writing process said of it.
        call_s: seconds in the call.
        fence_s: seconds that updates waited for its copy.
        durable_s: seconds from the call on.
        attested: whether all of it was compared with what was live.
    """

    step: int
    path: Path
    own_bytes: int
    written: WriteResult
    call_s: float
    fence_s: float
    durable_s: float
    attested: bool


def saved_event(saved: SaveReport, *, slowdown_s: float | None) -> dict[str, Any]:
    """The data of the `checkpoint` event, as plain JSON values.

    Args:
        saved: the save, as rank 0 saw it.
        slowdown_s: what steps lost while it was written, seconds (`lost_time`); None where that cannot be told.

    Returns:
        `step`, `path`, `tier`; `size_bytes` of all ranks; `digest`, the manifest's, which covers every byte;
        `attested`; `call_s`, `fence_s`, `stall_s` (both together), `slowdown_s`, `lost_s` (all of it), `durable_s`
        (from the call on); `write_gb_per_s` of rank 0's own files, until all ranks' were durable.
        Where the process that wrote it died before it said so, the size is rank 0's, and digest and rate are None.
    """
    written = saved.written
    stall_s = saved.call_s + saved.fence_s
    return {
        "step": saved.step,
        "path": str(saved.path),
        "tier": "disk",
        "size_bytes": saved.own_bytes if written.size_bytes is None else written.size_bytes,
        "digest": written.digest,
        "attested": saved.attested,
        "call_s": saved.call_s,
        "fence_s": saved.fence_s,
        "stall_s": stall_s,
        "slowdown_s": slowdown_s,
        "lost_s": stall_s + (slowdown_s or 0.0),
        "durable_s": saved.durable_s,
        "write_gb_per_s": saved.own_bytes / written.seconds / 1e9 if written.seconds else None,
    }
