"""List and open checkpoints, on one rank or on all ranks together.

Reads that fail with an I/O error are repeated after a pause.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import sleep as _pause
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata

from holdfast.checkpoint.catalog.catalog import CheckpointInfo, scan
from holdfast.checkpoint.distributed.collectives import Ranks
from holdfast.checkpoint.format.dcp_metadata import (
    METADATA_NAME,
    check_metadata_against_files,
    read_dcp_metadata,
    unpack_metadata,
)
from holdfast.checkpoint.format.manifest import (
    Manifest,
    ManifestError,
    UnreadError,
    check_file_contents,
    read_manifest,
)
from holdfast.checkpoint.format.verified_files import VerifiedFiles
from holdfast.checkpoint.memory.client import PreviousRanks
from holdfast.checkpoint.restore import dcp_reader
from holdfast.checkpoint.state.capture import STRUCTURE, rank_structure
from holdfast.checkpoint.state.skeletons import shared_skeleton, stored_skeleton
from holdfast.core.errors import CheckpointError

_logger = logging.getLogger("holdfast")
OPENINGS: Final = 3
"""The number of times that ranks try to open the same save of a step.

The writing process of a dead trainer may replace a step's checkpoint with another save of the same
step while the ranks open the checkpoint.
"""
_PAUSES_S: Final = (0.1, 1.0)
"""Pauses in seconds before a failed read is repeated, since a network file system may recover."""


@dataclass(frozen=True, kw_only=True)
class OpenCheckpoint:
    """Hold a checkpoint with verified metadata; each block of data is verified when it is read."""

    path: Path
    manifest: Manifest
    metadata: Metadata
    files: VerifiedFiles
    _owns: dict[int, dict[Any, Any] | None] = field(default_factory=dict)
    """The results of `own`, by rank."""

    @functools.cached_property
    def shared(self) -> dict[Any, Any]:
        """Return the skeleton of the user's `state`."""
        return shared_skeleton(self.metadata, self.read)

    @property
    def has_structure(self) -> bool:
        """Return True if Holdfast wrote the checkpoint, so its skeleton includes empty dicts."""
        return STRUCTURE in self.metadata.state_dict_metadata

    def own(self, rank: int) -> dict[Any, Any] | None:
        """Return the skeleton of the entries of rank `rank` only.

        Its keys are `user`, for the user's `per_rank`, and `rng`.

        Returns None if DCP wrote the checkpoint without Holdfast.
        """
        if rank not in self._owns:
            self._owns[rank] = stored_skeleton(rank_structure(rank), self.metadata, self.read)
        return self._owns[rank]

    def read(self, wanted: Mapping[str, torch.Tensor | None]) -> dict[str, Any]:
        """Read the tensors and plain values that `wanted` names; see `dcp_reader.read`."""
        return dcp_reader.read(self.path, self.metadata, wanted, self.files)


def open_checkpoint(
    path: Path, manifest: Manifest, memory: PreviousRanks | None = None
) -> OpenCheckpoint:
    """Open a checkpoint: read and verify its metadata and its skeleton.

    Args:
        path: the folder of the checkpoint.
        manifest: the checkpoint's manifest.
        memory: the memory snapshots to read from; None to read from disk.

    Raises:
        ManifestError: the checkpoint is damaged, inconsistent, or its metadata names a type or path
            that is not allowed. No code from the checkpoint has run.
        OSError: the checkpoint cannot be read.
    """
    files: VerifiedFiles
    if memory is not None:
        content, files = memory.open(path, manifest)
        metadata = unpack_metadata(content)
    else:
        check_file_contents(
            path, [entry for entry in manifest.files if entry.path == METADATA_NAME]
        )
        metadata, files = read_dcp_metadata(path), VerifiedFiles(path, manifest.files)
    opened = OpenCheckpoint(path=path, manifest=manifest, metadata=metadata, files=files)
    try:
        check_metadata_against_files(
            metadata, {entry.path: entry.size_bytes for entry in manifest.files}
        )
        # Read the skeleton now, while another checkpoint can still be chosen.
        opened.shared  # noqa: B018
    except (ManifestError, OSError):
        raise
    except Exception as error:  # a forged checkpoint may raise any error
        raise ManifestError(
            f"its structure is unreadable ({type(error).__name__}: {error})"
        ) from error
    return opened


class Opening(NamedTuple):
    """Hold a checkpoint that all ranks have opened, or the reason why some rank could not open it."""

    checkpoint: OpenCheckpoint | None
    """None if some rank could not open the checkpoint."""
    reason: str
    """The reason why the lowest rank that failed could not open it; "" if all ranks opened it."""
    digest: str
    """The digest in the manifest that rank 0 found, which identifies the save; "" if it found none."""


def open_together(
    ranks: Ranks, path: Path, step: int, memory: PreviousRanks | None = None
) -> Opening:
    """Open the same save of a step on all ranks. Collective."""
    opened: OpenCheckpoint | None = None
    digest = ""

    def open_it() -> None:
        nonlocal opened, digest
        manifest = read_manifest(path, step=step)
        digest = manifest.digest
        opened = open_checkpoint(path, manifest, memory)
        if manifest.world_size == ranks.world_size:
            opened.own(ranks.rank)

    def try_it() -> tuple[str, str]:
        nonlocal digest
        digest = ""
        return failing(open_it), digest

    for _ in range(OPENINGS):
        results = ranks.together(try_it)
        reason = next((reason for reason, _ in results if reason), "")
        if reason or len({digest for _, digest in results}) == 1:
            return Opening(None if reason else opened, reason, results[0][1])
    return Opening(None, "it is being saved again", results[0][1])


def look(folder: Path) -> list[CheckpointInfo]:
    """List the checkpoints in a folder; repeat this a few times if some cannot be read.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    for pause_s in (*_PAUSES_S, None):
        try:
            infos = scan(folder)
        except OSError as error:
            if pause_s is None:
                raise CheckpointError(
                    f"{folder} cannot be read ({error.strerror}). Look at the storage."
                ) from error
        else:
            if pause_s is None or not any(info.unread for info in infos):
                break
        _pause(pause_s)
    return infos


def failing(work: Callable[[], None]) -> str:
    """Run `work`, and return the reason why it failed, or an empty string if it succeeded.

    I/O errors other than a missing file are retried after a pause.

    Raises:
        CheckpointError: reading the checkpoint would run code from its files.
    """
    for pause_s in (*_PAUSES_S, None):
        try:
            work()
        except (UnreadError, OSError) as error:
            if pause_s is None or isinstance(error, FileNotFoundError):
                return str(error)
            _logger.debug("reading again: %s", error)
            _pause(pause_s)
        except ManifestError as error:
            return str(error)
        else:
            break
    return ""
