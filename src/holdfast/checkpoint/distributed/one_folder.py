"""Check that all ranks use the same checkpoint folder, since each writes its part there."""

import contextlib
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

from holdfast.checkpoint.distributed.collectives import Ranks
from holdfast.checkpoint.distributed.place import own_place
from holdfast.checkpoint.format.replica_digests import ranks_text
from holdfast.core.errors import BadUse


def check_shared(ranks: Ranks, folder: Path) -> None:
    """Check that every rank has the same folder as rank 0. Collective.

    Rank 0 makes a temporary subfolder, and the other ranks check whether it appears in their
    folders.

    Raises:
        BadUse: some ranks have another folder.
        OSError: rank 0 cannot write to its folder.
    """
    if ranks.world_size == 1:
        return
    # A subfolder that a crash leaves is deleted with the leftovers of other saves.
    name = f".step-shared.{secrets.token_hex(4)}.tmp"
    name = ranks.first(lambda: (folder / name).mkdir() or name)  # type: ignore[func-returns-value]
    try:
        found = ranks.together(lambda: (str(folder), (folder / name).is_dir()))
    finally:
        if ranks.rank == 0:
            with contextlib.suppress(OSError):
                (folder / name).rmdir()
    _refuse(
        [path for path, _ in found],
        [rank for rank, (_, is_there) in enumerate(found) if not is_there],
    )


class FolderPlace(NamedTuple):
    """Identify a rank's checkpoint folder: its path, the rank's node, its device and its inode."""

    path: str
    node: str
    inode: tuple[int, int]

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Return the place of a folder of this rank.

        Raises:
            OSError: the folder does not exist.
        """
        found = folder.stat()
        return cls(str(folder), own_place().node, (found.st_dev, found.st_ino))


def check_alike(places: Sequence[FolderPlace]) -> None:
    """Check that ranks on rank 0's node have the same folder as rank 0.

    Only ranks with a path other than rank 0's are checked.

    Args:
        places: the folder of each rank, by rank.

    Raises:
        BadUse: some ranks have another folder.
    """
    first = places[0]
    # Only ranks on the same node can be compared, because a network folder may have another device
    # number on each node.
    others = [
        rank
        for rank, place in enumerate(places)
        if place.path != first.path and place.node == first.node and place.inode != first.inode
    ]
    _refuse([place.path for place in places], others)


def _refuse(paths: Sequence[str], others: Sequence[int]) -> None:
    if others:
        raise BadUse(
            f"The folder of {ranks_text(others)}, {paths[others[0]]}, is not the folder of rank 0, "
            f"{paths[0]}. Give Checkpointer one folder that all ranks share."
        )
