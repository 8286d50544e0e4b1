"""A save that became durable: what it is and what it cost, and the one event that tells of it."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.checkpoint.manifest import Manifest, ManifestError, read_manifest


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A durable checkpoint, and what it cost. `fence_s`: how long updates waited; `durable_s`: from the call on."""

    step: int
    path: Path
    size_bytes: int
    call_s: float
    fence_s: float
    write_s: float
    durable_s: float
    attested: bool


def saved_event(saved: Saved, *, slowdown_s: float | None) -> dict[str, Any]:
    """The data of the `checkpoint` event, as plain JSON values.

    Args:
        saved: the save, as rank 0 saw it.
        slowdown_s: what steps lost while it was written, seconds (`lost_time`); None where that cannot be told.

    Returns:
        `step`, `path`, `tier`; `size_bytes` of all ranks; `digest`, the manifest's, which covers every byte, None where
        the checkpoint is gone already; `attested`; `call_s`, `fence_s`, `stall_s` (both together), `slowdown_s`,
        `lost_s` (all of it), `durable_s` (from the call on); `write_gb_per_s` of rank 0's own files, from when its
        writing began until all ranks' were durable, None where the process that wrote them died before it said so.
    """
    manifest: Manifest | None = None
    with contextlib.suppress(OSError, ManifestError):  # deleted already: a later one is durable too
        manifest = read_manifest(saved.path, step=saved.step)
    stall_s = saved.call_s + saved.fence_s
    return {
        "step": saved.step,
        "path": str(saved.path),
        "tier": "disk",
        "size_bytes": saved.size_bytes if manifest is None else manifest.size_bytes,
        "digest": None if manifest is None else manifest.digest,
        "attested": saved.attested,
        "call_s": saved.call_s,
        "fence_s": saved.fence_s,
        "stall_s": stall_s,
        "slowdown_s": slowdown_s,
        "lost_s": stall_s + (slowdown_s or 0.0),
        "durable_s": saved.durable_s,
        "write_gb_per_s": saved.size_bytes / saved.write_s / 1e9 if saved.write_s else None,
    }
