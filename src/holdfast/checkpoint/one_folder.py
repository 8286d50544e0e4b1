"""Whether all ranks have one checkpoint folder: each writes its part there, and reads those of others."""

import contextlib
import secrets
from collections.abc import Sequence
from pathlib import Path

from holdfast.checkpoint.peers import own_place
from holdfast.checkpoint.ranks import Ranks
from holdfast.checkpoint.replica_notes import ranks_text
from holdfast.core.errors import BadUse


def check_shared(ranks: Ranks, folder: Path) -> None:
    """Check that each rank sees in its folder what rank 0 makes in that of its own. Collective.

    Raises:
        BadUse: some do not.
        OSError: rank 0 cannot write there.
    """
    if ranks.world_size == 1:
        return
    # One that a crash leaves goes with what other saves have left.
    name = f".step-shared.{secrets.token_hex(4)}.tmp"
    name = ranks.first(lambda: (folder / name).mkdir() or name)  # type: ignore[func-returns-value]
    try:
        found = ranks.together(lambda: (str(folder), (folder / name).is_dir()))
    finally:
        if ranks.rank == 0:
            with contextlib.suppress(OSError):
                (folder / name).rmdir()
    _refuse([path for path, _ in found], [rank for rank, (_, is_there) in enumerate(found) if not is_there])


def check_alike(ranks: Ranks, folder: Path) -> None:
    """Check, before anything is written, that ranks of one node which name the folder otherwise have the same one.

    Raises:
        BadUse: some do not.
    """

    def look() -> tuple[str, str, tuple[int, int]]:
        found = folder.stat()
        return str(folder), own_place().node, (found.st_dev, found.st_ino)

    found = ranks.together(look)
    path, node, place = found[0]
    # One folder of a network may have several numbers, where it is mounted more than once.
    others = [rank for rank, (own, at, inode) in enumerate(found) if own != path and at == node and inode != place]
    _refuse([own for own, _, _ in found], others)


def _refuse(paths: Sequence[str], others: Sequence[int]) -> None:
    if others:
        raise BadUse(
            f"The folder of {ranks_text(others)}, {paths[others[0]]}, is not that of rank 0, {paths[0]}. "
            "Give Checkpointer one folder that all ranks share."
        )
