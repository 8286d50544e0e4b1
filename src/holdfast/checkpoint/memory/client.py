"""What the ranks before these left in memory, as the files of their checkpoint.

Only the checkpoint that a manifest on disk describes is taken, and each byte is compared with the digests that this
manifest vouches for: memory is trusted no more than a disk. Files of ranks of other nodes are read from the disk, where
they are part of the same save. Nothing here needs torch.
"""

import contextlib
import os
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from holdfast.checkpoint.format.checksums import (
    BLOCK_BYTES,
    DIGEST_BYTES,
    checksum_of_digests,
    digests_of,
)
from holdfast.checkpoint.format.manifest import FileEntry, Manifest, ManifestError
from holdfast.checkpoint.format.paths import METADATA_NAME
from holdfast.checkpoint.format.rank_layout import PAGE_BYTES, Layout
from holdfast.checkpoint.format.verified_files import Tier, VerifiedFiles
from holdfast.checkpoint.ipc.durable_snapshot import unpack_notes
from holdfast.checkpoint.ipc.messages import receive, send
from holdfast.checkpoint.memory.server import SnapshotInfo, address, is_of_this_user

_WRITING_S: Final = 10.0
"""How long a predecessor may still take to make its last save durable; without it an older one is restored."""


@dataclass(frozen=True, kw_only=True)
class MemorySnapshot:
    """One rank's part of a save: `fd`, which is closed with it, is laid out as an arena; `notes` see `keeping`."""

    fd: int
    step: int
    save: str
    notes: bytes
    layout: Layout
    digests: bytes

    @classmethod
    def of(cls, fd: int, step: int, save: str, notes: bytes) -> Self:
        """Understand the notes; the descriptor is this object's from now on.

        Raises:
            ValueError, LookupError, TypeError: they are of another version.
        """
        try:
            layout, digests = unpack_notes(notes)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd=fd, step=step, save=save, notes=notes, layout=layout, digests=digests)

    def close(self) -> None:
        """Let go of the memory."""
        os.close(self.fd)


def ask(folder: Path, keeper: int, rank: int | None = None) -> MemorySnapshot | None:
    """What is kept of `rank`, if not of the keeper itself; None where it keeps nothing of it.

    Waits, for a while, where a last save is being written.

    Args:
        folder: of the checkpoints.
        keeper: the rank whose writing process is asked.
        rank: whose image.
    """
    want = {"want": "snapshot", "rank": keeper if rank is None else rank}
    with contextlib.ExitStack() as held:
        line = held.enter_context(_request(folder, keeper, want))
        if line is None:
            return None
        try:
            told, arena = receive(line) or ({}, None)
            held.callback(_close, arena)
            _, notes = receive(line) or ({}, None)
            if arena is None or notes is None:  # it ended, with nothing to keep
                return None
            with os.fdopen(notes, "rb") as file:
                file.seek(0)
                read = file.read()
            return MemorySnapshot.of(os.dup(arena), told["step"], told["save"], read)
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
        ):  # it died meanwhile, or is of another version
            return None


def ask_all(folder: Path, world_size: int) -> list[tuple[int, SnapshotInfo]]:
    """Each keeper on this node among the ranks of a job, and what it keeps; waits for all together as `ask` does."""
    found: list[tuple[int, SnapshotInfo]] = []
    with contextlib.ExitStack() as held:
        asked = []
        for keeper in range(world_size):
            line = held.enter_context(_request(folder, keeper, {"want": "list"}))
            if line is not None:
                asked.append((keeper, line))
        until_s = time.monotonic() + _WRITING_S
        for keeper, line in asked:
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                line.settimeout(max(until_s - time.monotonic(), 1e-3))
                told, _ = receive(line) or ({"images": []}, None)
                found += [(keeper, SnapshotInfo(*image)) for image in told["images"]]
    return found


def end(folder: Path, rank: int, *, wait: bool = True) -> None:
    """Have what the rank before left given back to the node, if it left anything, and `wait` until it is."""
    with _request(folder, rank, {"want": "end"}) as line:
        if line is not None and wait:
            with contextlib.suppress(OSError):
                receive(line)  # nothing is said: the connection ends once the memory is free


@contextlib.contextmanager
def _request(folder: Path, rank: int, want: dict[str, Any]) -> Iterator[socket.socket | None]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.settimeout(_WRITING_S)
        is_there = False
        with contextlib.suppress(OSError):  # nobody is
            line.connect(address(folder, rank))
            if is_of_this_user(line):
                send(line, want)
                is_there = True
        if not is_there:
            line.close()  # of thousands that are asked, few are on this node
        yield line if is_there else None


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)


class PreviousRanks:
    """The ranks that saved into a folder before these, and died; with what they left on this node."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        """Ask all that there are on this node."""
        self._folder = folder
        self._rank = rank
        self._world_size = world_size
        self._found = ask_all(folder, world_size)
        self._taken: dict[tuple[int, str], list[MemorySnapshot]] = {}
        self._tier: Tier = "memory"

    @property
    def infos(self) -> list[SnapshotInfo]:
        """What this node has, of as many ranks as there are now."""
        return [info for _, info in self._found if info.world_size == self._world_size]

    def take(self, step: int, save: str) -> list[MemorySnapshot]:
        """All that this node has of a save; they are closed with this object."""
        if (step, save) not in self._taken:
            taken = self._taken[step, save] = []
            for keeper, info in self._found:
                if (info.step, info.save) == (step, save) and (
                    kept := ask(self._folder, keeper, info.rank)
                ):
                    taken.append(kept)
        return [kept for kept in self._taken[step, save] if (kept.step, kept.save) == (step, save)]

    def bring(self, kept: MemorySnapshot) -> None:
        """Add what another node had; it is closed with this object."""
        self.take(kept.step, kept.save)
        self._taken[kept.step, kept.save].append(kept)

    def from_peers(self) -> None:
        """Note that some rank has got its part from another node."""
        self._tier = "peer_memory"

    def open(self, path: Path, manifest: Manifest) -> tuple[bytes, "KeptFiles"]:
        """The content of `.metadata`, and the files, of the checkpoint at `path`.

        Raises:
            ManifestError: what is kept is not that checkpoint.
            OSError: its metadata is on another node, and cannot be read from the disk.
        """
        same = self.take(manifest.step, manifest.save)
        if self._rank not in {kept.layout.rank for kept in same}:
            raise ManifestError(f"it is not what rank {self._rank} has in memory")
        first = next((kept.layout for kept in same if kept.layout.rank == 0), None)
        metadata = first.metadata if first is not None else (path / METADATA_NAME).read_bytes()
        if _checksum(metadata) not in {
            entry.checksum for entry in manifest.files if entry.path == METADATA_NAME
        }:
            raise ManifestError(f"{METADATA_NAME} does not match its checksum")
        return metadata, KeptFiles(path, manifest.files, same, self._tier)

    def end(self) -> None:
        """Have all that they left given back; of ranks that there are no more, too."""
        last = max((info.world_size for _, info in self._found), default=0)
        beyond = range(self._rank, max(last, self._rank + 1), self._world_size)
        for rank in {*beyond, *(keeper for keeper, _ in self._found)}:
            end(self._folder, rank, wait=bool(self._found))  # else it may still be writing

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for taken in self._taken.values():
            for kept in taken:
                kept.close()


def _checksum(content: bytes) -> str:
    return checksum_of_digests(digests_of(memoryview(content)))


class KeptFiles(VerifiedFiles):
    """The files of one checkpoint, from memory where a rank of this node left them there."""

    def __init__(
        self,
        folder: Path,
        files: Iterable[FileEntry],
        kept: Iterable[MemorySnapshot],
        tier: Tier = "memory",
    ) -> None:
        super().__init__(folder, files)
        self.tier = tier
        self._places: dict[str, tuple[MemorySnapshot, int, bytes]] = {}
        for each in kept:
            at = 0
            for shard in each.layout.shards:
                length = DIGEST_BYTES * -(-shard.size_bytes // BLOCK_BYTES)
                self._places[shard.name] = (
                    each,
                    PAGE_BYTES + shard.offset,
                    each.digests[at : at + length],
                )
                at += length

    def _open(self, name: str) -> tuple[int, int]:
        if name not in self._places:
            return super()._open(name)
        kept, begin, _ = self._places[name]
        return os.dup(kept.fd), begin

    def _find_digests(self, entry: FileEntry) -> bytes | None:
        if entry.path not in self._places:
            return super()._find_digests(entry)
        _, _, digests = self._places[entry.path]
        if checksum_of_digests(digests) != entry.checksum:
            raise ManifestError(f"the digests of {entry.path} in memory do not match its checksum")
        return digests
