"""Saving: every rank writes its part, the disk is checked and hashed, then the folder gets its name."""

import errno
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from holdfast.checkpoint import dcp
from holdfast.checkpoint.catalog import scan
from holdfast.checkpoint.contents import Contents, collect
from holdfast.checkpoint.folders import Staging, step_path
from holdfast.checkpoint.manifest import Manifest, ManifestError, check_sizes, describe_file, write_manifest
from holdfast.checkpoint.metadata import check_against_files, read_metadata
from holdfast.checkpoint.ranks import Ranks
from holdfast.checkpoint.tree import Skeleton, merge_skeletons
from holdfast.core.errors import BadUse, HoldfastError, SaveFailed


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A durable checkpoint."""

    path: Path
    size_bytes: int


def save_checkpoint(
    ranks: Ranks,
    folder: Path,
    step: int,
    state: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
    per_rank: Mapping[str, Any] | None,
    *,
    now_s: float,
    damaged: Collection[Path],
) -> Saved:
    """Save one step durably. Collective; on failure nothing of it is left and nothing else has changed.

    Args:
        ranks: those that take part.
        folder: the folder of all checkpoints.
        step: steps completed.
        state: see `Checkpointer.save`.
        per_rank: likewise.
        now_s: the time to stamp on it, seconds since the Unix epoch.
        damaged: checkpoints known to be damaged.

    Raises:
        BadUse: the state cannot be saved; nothing was written.
        SaveFailed: it is not durable.
    """
    contents, structure, needed_bytes = _agree(ranks, step, state, per_rank)
    staging: Staging | None = None

    def begin() -> Path:
        nonlocal staging
        staging = Staging(folder, step)
        return staging.path

    def finish() -> Path:
        assert staging is not None, "rank 0 began"
        _check_readable(staging.path, manifest)
        write_manifest(staging.path, manifest)
        return staging.commit(final_is_damaged=step_path(folder, step) in damaged)

    try:
        path = ranks.first(begin)
        ranks.together(lambda: _write(contents, structure, path, distributed=ranks.distributed))
        names = ranks.first(lambda: sorted(file.name for file in path.iterdir()))
        shares = ranks.together(lambda: [describe_file(path, name) for name in names[ranks.rank :: ranks.world_size]])
        manifest = Manifest(
            step=step,
            world_size=ranks.world_size,
            created_at_s=now_s,
            torch=str(torch.__version__),
            files=tuple(sorted((entry for share in shares for entry in share), key=lambda entry: entry.path)),
        )
        final = ranks.first(finish)
    except BaseException as error:
        if staging is not None:
            staging.abandon()
        if not isinstance(error, Exception):
            raise
        failure = error
        # Each step above fails on all ranks alike, so that all of them come here.
        raise SaveFailed(ranks.first(lambda: _explain(folder, step, needed_bytes, failure))) from error
    return Saved(path=final, size_bytes=manifest.size_bytes)


def _agree(
    ranks: Ranks,
    step: int,
    state: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
    per_rank: Mapping[str, Any] | None,
) -> tuple[Contents, Skeleton | None, int]:
    """What this rank writes, the skeleton of the shared state on rank 0, and the bytes that all need."""
    contents: Contents | None = None

    def take_stock() -> tuple[int, str, tuple[int, int]]:
        nonlocal contents
        contents = collect(ranks.rank, state, per_rank)
        shape = xxhash.xxh3_128(repr(contents.flat_shared.skeleton).encode()).hexdigest()
        return step, shape, contents.size_bytes()

    steps, shapes, sizes = zip(*ranks.together(take_stock), strict=True)
    assert contents is not None, "this rank has taken stock"
    if len(set(steps)) > 1:
        raise BadUse(f"Ranks disagree about the step to save: {list(steps)}. Call save at the same step on all.")
    skeletons = [contents.flat_shared.skeleton]
    if len(set(shapes)) > 1:  # skeletons are large, so they travel only where they differ
        own = contents.flat_shared.skeleton
        skeletons = ranks.together(lambda: own)
    structure = merge_skeletons(skeletons)
    needed_bytes = max(alike for alike, _alone in sizes) + sum(alone for _alike, alone in sizes)
    return contents, structure if ranks.rank == 0 else None, needed_bytes


def _write(contents: Contents, structure: Skeleton | None, path: Path, *, distributed: bool) -> None:
    metadata = dcp.write(contents.for_dcp(structure), path, distributed=distributed)
    for name in sorted(contents.names() - metadata.state_dict_metadata.keys()):
        raise ManifestError(f"DCP left out {name!r}")
    # Whether `weights_only` takes a plain value depends on the version of PyTorch: better known now than later.
    dcp.read(path, metadata, dict.fromkeys(contents.plain_names()))


def _check_readable(path: Path, manifest: Manifest) -> None:
    """What was written reads back as a restore would read it, and is all there."""
    check_sizes(path, manifest.files)
    check_against_files(read_metadata(path), {entry.path: entry.size_bytes for entry in manifest.files})


def _explain(folder: Path, step: int, needed_bytes: int, error: Exception) -> str:
    """Why a save failed, what is left, and what to do; called once its remains are gone."""
    try:
        good = next((info for info in scan(folder) if info.state == "written"), None)
        free_bytes = shutil.disk_usage(folder).free
    except (OSError, HoldfastError) as gone:
        return f"Step {step} was not saved: {error}; {gone} Mount or make the folder again."
    code = error.errno if isinstance(error, OSError) else None
    if code in (errno.ENOSPC, errno.EDQUOT) or free_bytes < needed_bytes:
        reason = f"{folder} is full: about {needed_bytes:,} bytes are needed and {free_bytes:,} are free"
        advice = "Free space there, keep fewer checkpoints, or give Checkpointer another folder."
    elif code in (errno.EACCES, errno.EPERM, errno.EROFS):
        reason = f"{folder} cannot be written ({error})"
        advice = "Make it writable, or give Checkpointer another folder."
    else:
        reason = f"{error} (in {folder})"
        advice = "Look at that folder's storage and save again."
    last = "There is no earlier checkpoint." if good is None else f"The last good step is {good.step} ({good.path})."
    return f"Step {step} was not saved: {reason}. {last} {advice}"
