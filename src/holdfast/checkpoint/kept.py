"""What the ranks before this one left in the memory of this node, as the files of their checkpoint.

Only the checkpoint that a manifest on disk describes is taken, and each byte is compared with the digests that this
manifest vouches for: memory is trusted no more than a disk. Files of ranks of other nodes are read from the disk, where
they are part of the same save. Nothing here needs torch.
"""

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

from holdfast.checkpoint.arena import PAGE_BYTES
from holdfast.checkpoint.checksums import BLOCK_BYTES, DIGEST_BYTES, checksum_of_digests, digests_of
from holdfast.checkpoint.commit import METADATA_NAME
from holdfast.checkpoint.keeping import address, is_of_this_user, unpack_notes
from holdfast.checkpoint.layout import Layout
from holdfast.checkpoint.manifest import FileEntry, Manifest, ManifestError
from holdfast.checkpoint.messages import receive, send
from holdfast.checkpoint.reading import VerifiedFiles

_WRITING_S: Final = 10.0
"""How long a predecessor may still take to make its last save durable; without it an older one is restored."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """One rank's part of a save: `fd`, which is closed with it, is the arena; `digests` of its files one by one."""

    fd: int
    step: int
    save: str
    layout: Layout
    digests: bytes

    def close(self) -> None:
        """Let go of the memory."""
        os.close(self.fd)


def ask(folder: Path, rank: int) -> Kept | None:
    """What the rank before left; None where it left nothing. Waits, for a while, where its last save is being written.

    `folder`: of the checkpoints.
    """
    with contextlib.ExitStack() as held:
        line = held.enter_context(_request(folder, rank, "snapshot"))
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
                layout, digests = unpack_notes(file.read())
            return Kept(fd=os.dup(arena), step=told["step"], save=told["save"], layout=layout, digests=digests)
        except (OSError, ValueError, LookupError, TypeError):  # it died meanwhile, or is of another version
            return None


def end(folder: Path, rank: int, *, wait: bool = True) -> None:
    """Have what the rank before left given back to the node, if it left anything, and `wait` until it is."""
    with _request(folder, rank, "end") as line:
        if line is not None and wait:
            with contextlib.suppress(OSError):
                receive(line)  # nothing is said: the connection ends once the memory is free


@contextlib.contextmanager
def _request(folder: Path, rank: int, want: str) -> Iterator[socket.socket | None]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.settimeout(_WRITING_S)
        is_there = False
        with contextlib.suppress(OSError):  # nobody is
            line.connect(address(folder, rank))
            if is_of_this_user(line):
                send(line, {"want": want})
                is_there = True
        yield line if is_there else None


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)


class Predecessors:
    """The ranks that saved into a folder before these, and died; with what they left on this node."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        """Ask the one that had the number of this rank."""
        self._folder = folder
        self._rank = rank
        self._world_size = world_size
        self._own = ask(folder, rank)
        self._others: list[Kept] = []

    @property
    def kept(self) -> tuple[int, str] | None:
        """Step and name of the save that this rank could take from memory."""
        own = self._own
        fits = own is not None and (own.layout.rank, own.layout.world_size) == (self._rank, self._world_size)
        return (own.step, own.save) if own is not None and fits else None

    def open(self, path: Path, manifest: Manifest) -> tuple[bytes, "KeptFiles"]:
        """The content of `.metadata`, and the files, of the checkpoint at `path`.

        Raises:
            ManifestError: what is kept is not that checkpoint.
            OSError: its metadata is on another node, and cannot be read from the disk.
        """
        if self._own is None or self.kept != (manifest.step, manifest.save):
            raise ManifestError(f"it is not what rank {self._rank} has in memory")
        if not self._others:
            for rank in range(self._world_size):
                if rank != self._rank and (kept := ask(self._folder, rank)) is not None:
                    self._others.append(kept)
        same = [self._own, *(kept for kept in self._others if (kept.step, kept.save) == self.kept)]
        first = next((kept.layout for kept in same if kept.layout.rank == 0), None)
        metadata = first.metadata if first is not None else (path / METADATA_NAME).read_bytes()
        if _checksum(metadata) not in {entry.checksum for entry in manifest.files if entry.path == METADATA_NAME}:
            raise ManifestError(f"{METADATA_NAME} does not match its checksum")
        return metadata, KeptFiles(path, manifest.files, same)

    def end(self) -> None:
        """Have all that they left given back; of ranks that there are no more, too."""
        last = self._own.layout.world_size if self._own is not None else 0
        for rank in range(self._rank, max(last, self._rank + 1), self._world_size):
            end(self._folder, rank, wait=self._own is not None)  # else it may still be writing

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for kept in (self._own, *self._others):
            if kept is not None:
                kept.close()


def _checksum(content: bytes) -> str:
    return checksum_of_digests(digests_of(memoryview(content)))


class KeptFiles(VerifiedFiles):
    """The files of one checkpoint, from memory where a rank of this node left them there."""

    tier: Literal["memory", "disk"] = "memory"

    def __init__(self, folder: Path, files: Iterable[FileEntry], kept: Iterable[Kept]) -> None:
        super().__init__(folder, files)
        self._places: dict[str, tuple[Kept, int, bytes]] = {}
        for each in kept:
            at = 0
            for shard in each.layout.shards:
                length = DIGEST_BYTES * -(-shard.size_bytes // BLOCK_BYTES)
                self._places[shard.name] = each, PAGE_BYTES + shard.offset, each.digests[at : at + length]
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
