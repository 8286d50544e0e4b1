"""Opening a checkpoint: what there is, and what one says of itself, read by one rank or by all together.

What cannot be read for a moment is read again.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import sleep as _pause
from typing import Any, Final

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
"""A process that outlives its trainer may put another save of a step in the place of one, while ranks open it."""
_PAUSES_S: Final = (0.1, 1.0)
"""Before something is read again that could not be read: network file systems recover."""


@dataclass(frozen=True, kw_only=True)
class OpenCheckpoint:
    """A checkpoint whose metadata is whole; of the rest each byte is checked when it is read."""

    path: Path
    manifest: Manifest
    metadata: Metadata
    files: VerifiedFiles

    @functools.cached_property
    def shared(self) -> dict[Any, Any]:
        """The skeleton of the state."""
        return shared_skeleton(self.metadata, self.read)

    @property
    def has_structure(self) -> bool:
        """Whether Holdfast wrote it, and it records empty dicts."""
        return STRUCTURE in self.metadata.state_dict_metadata

    def own(self, rank: int) -> dict[Any, Any] | None:
        """The skeleton of what belongs to `rank`: `user` and `rng`. None where DCP alone wrote it."""
        return stored_skeleton(rank_structure(rank), self.metadata, self.read)

    def read(self, wanted: Mapping[str, torch.Tensor | None]) -> dict[str, Any]:
        """See `dcp_reader.read`."""
        return dcp_reader.read(self.path, self.metadata, wanted, self.files)


def open_checkpoint(
    path: Path, manifest: Manifest, memory: PreviousRanks | None = None
) -> OpenCheckpoint:
    """Read what a checkpoint says of itself; each byte that is read is checked.

    Args:
        path: the checkpoint.
        manifest: what it says.
        memory: where it is to be taken from; None: from disk.

    Raises:
        ManifestError: it is damaged, contradicts itself, or its metadata names what it must not; nothing of it has run.
        OSError: it cannot be read.
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
        opened.shared  # noqa: B018 - read now, while another checkpoint can still be taken
    except (ManifestError, OSError):
        raise
    except Exception as error:  # whoever made it up may have made up anything
        raise ManifestError(
            f"its structure is unreadable ({type(error).__name__}: {error})"
        ) from error
    return opened


def open_together(
    ranks: Ranks, path: Path, step: int, memory: PreviousRanks | None = None
) -> tuple[OpenCheckpoint | None, str]:
    """The same save of a step, opened by all ranks, or why some cannot. Collective."""
    opened: OpenCheckpoint | None = None

    def open_it() -> None:
        nonlocal opened
        opened = open_checkpoint(path, read_manifest(path, step=step), memory)
        if opened.manifest.world_size == ranks.world_size:
            opened.own(ranks.rank)

    def try_it() -> tuple[str, str]:
        reason = failing(open_it)
        return reason, "" if reason or opened is None else opened.manifest.digest

    for _ in range(OPENINGS):
        told = ranks.together(try_it)
        reason = next((reason for reason, _ in told if reason), "")
        if reason or len({digest for _, digest in told}) == 1:
            return (None, reason) if reason else (opened, "")
    return None, "it is being saved again"


def look(folder: Path) -> list[CheckpointInfo]:
    """What there is; what cannot be read is looked at again.

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
    """Why something of a checkpoint could not be read, or nothing; what may pass is tried again.

    Raises:
        CheckpointError: it holds what must not be read.
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
