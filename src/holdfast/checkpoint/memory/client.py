"""Read checkpoints from snapshots that previous ranks left in this node's memory.

A snapshot is used only if it belongs to a checkpoint on disk. Memory is trusted no more than a
disk, so each block is verified against the digests in that checkpoint's manifest. The files of
ranks on other nodes are read from disk. This module needs no torch.
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
"""Seconds to wait while a former rank's last save is written; then an older step is restored."""


@dataclass(frozen=True, kw_only=True)
class MemorySnapshot:
    """Hold one rank's part of a save, as found in memory.

    Attributes:
        fd: the descriptor of the memory, laid out like an `Arena`; `close` closes it.
        step: the step of the save.
        save: the name of the save.
        notes: the layout and digests as bytes, see `DurableSnapshot.pack_notes`.
        layout: the layout of the rank's files.
        digests: the digests of all blocks, in the order of the layout's files.
    """

    fd: int
    step: int
    save: str
    notes: bytes
    layout: Layout
    digests: bytes

    @classmethod
    def of(cls, fd: int, step: int, save: str, notes: bytes) -> Self:
        """Unpack `notes`, and own the descriptor `fd` from now on.

        Raises:
            ValueError, LookupError, TypeError: another version of Holdfast wrote the notes; `fd` is
                closed.
        """
        try:
            layout, digests = unpack_notes(notes)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd=fd, step=step, save=save, notes=notes, layout=layout, digests=digests)

    def close(self) -> None:
        """Close the descriptor, so that the memory can be released."""
        os.close(self.fd)


def ask(folder: Path, keeper: int, rank: int | None = None) -> MemorySnapshot | None:
    """Request a rank's snapshot from the server in which the rank `keeper` left its snapshots.

    If the last save of that rank is still being written, this function waits for up to 10 seconds.

    Args:
        folder: the folder of the checkpoints.
        keeper: the rank whose former writing process runs the server.
        rank: the rank whose snapshot is requested; None for `keeper` itself.

    Returns:
        The snapshot, or None if the server does not have it or is not on this node.
    """
    want = {"want": "snapshot", "rank": keeper if rank is None else rank}
    with contextlib.ExitStack() as held:
        line = held.enter_context(_request(folder, keeper, want))
        if line is None:
            return None
        try:
            reply, arena = receive(line) or ({}, None)
            held.callback(_close, arena)
            _, notes = receive(line) or ({}, None)
            if arena is None or notes is None:  # the server ended, or has no such snapshot
                return None
            with os.fdopen(notes, "rb") as file:
                file.seek(0)
                read = file.read()
            return MemorySnapshot.of(os.dup(arena), reply["step"], reply["save"], read)
        # The server died meanwhile, or is of another version.
        except (OSError, ValueError, LookupError, TypeError):
            return None


def ask_all(folder: Path, world_size: int) -> list[tuple[int, SnapshotInfo]]:
    """List all snapshots that the ranks of a job left in this node's memory.

    Each rank may have a server. This function waits up to 10 seconds for all servers together.

    Returns:
        For each snapshot, the rank whose server holds it, and its description.
    """
    found: list[tuple[int, SnapshotInfo]] = []
    with contextlib.ExitStack() as held:
        requests = []
        for keeper in range(world_size):
            line = held.enter_context(_request(folder, keeper, {"want": "list"}))
            if line is not None:
                requests.append((keeper, line))
        until_s = time.monotonic() + _WRITING_S
        for keeper, line in requests:
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                line.settimeout(max(until_s - time.monotonic(), 1e-3))
                reply, _ = receive(line) or ({"images": []}, None)
                found += [(keeper, SnapshotInfo(*image)) for image in reply["images"]]
    return found


def end(folder: Path, rank: int, *, wait: bool = True) -> None:
    """Make the snapshot server of `rank` release its memory; with `wait`, wait until it is free."""
    with _request(folder, rank, {"want": "end"}) as line:
        if line is not None and wait:
            with contextlib.suppress(OSError):
                receive(line)  # the server sends nothing: it closes the connection afterwards


@contextlib.contextmanager
def _request(folder: Path, rank: int, want: dict[str, Any]) -> Iterator[socket.socket | None]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.settimeout(_WRITING_S)
        is_there = False
        with contextlib.suppress(OSError):  # there is no server on this node
            line.connect(address(folder, rank))
            if is_of_this_user(line):
                send(line, want)
                is_there = True
        if not is_there:
            line.close()  # only few of thousands of ranks have a server on this node
        yield line if is_there else None


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)


class PreviousRanks:
    """Find and read the snapshots that the ranks before a restart left in this node's memory."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        """List the snapshots of all servers on this node."""
        self._folder = folder
        self._rank = rank
        self._world_size = world_size
        self._found = ask_all(folder, world_size)
        self._taken: dict[tuple[int, str], list[MemorySnapshot]] = {}
        self._tier: Tier = "memory"

    @property
    def infos(self) -> list[SnapshotInfo]:
        """Describe this node's snapshots from jobs with the present number of ranks."""
        return [info for _, info in self._found if info.world_size == self._world_size]

    def take(self, step: int, save: str) -> list[MemorySnapshot]:
        """Return all snapshots of one save on this node; `__exit__` closes them."""
        if (step, save) not in self._taken:
            taken = self._taken[step, save] = []
            for keeper, info in self._found:
                if (info.step, info.save) == (step, save) and (
                    kept := ask(self._folder, keeper, info.rank)
                ):
                    taken.append(kept)
        return [kept for kept in self._taken[step, save] if (kept.step, kept.save) == (step, save)]

    def bring(self, kept: MemorySnapshot) -> None:
        """Add a snapshot that was received from another node; `__exit__` closes it."""
        self.take(kept.step, kept.save)
        self._taken[kept.step, kept.save].append(kept)

    def from_peers(self) -> None:
        """Record that some rank received its snapshot from another node."""
        self._tier = "peer_memory"

    def open(self, path: Path, manifest: Manifest) -> tuple[bytes, "KeptFiles"]:
        """Return the content of `.metadata`, and the checkpoint's files with those parts in memory.

        Raises:
            ManifestError: this rank's snapshot in memory is not of the checkpoint at `path`.
            OSError: rank 0's snapshot is on another node, and `.metadata` cannot be read from disk.
        """
        same = self.take(manifest.step, manifest.save)
        if self._rank not in {kept.layout.rank for kept in same}:
            raise ManifestError(
                f"rank {self._rank}'s snapshot in memory belongs to another checkpoint"
            )
        first = next((kept.layout for kept in same if kept.layout.rank == 0), None)
        metadata = first.metadata if first is not None else (path / METADATA_NAME).read_bytes()
        if _checksum(metadata) not in {
            entry.checksum for entry in manifest.files if entry.path == METADATA_NAME
        }:
            raise ManifestError(f"{METADATA_NAME} does not match its checksum")
        return metadata, KeptFiles(path, manifest.files, same, self._tier)

    def end(self) -> None:
        """Release all snapshots on this node.

        If the new job has fewer ranks than the previous one, the snapshots of the missing ranks are
        released, too.
        """
        last = max((info.world_size for _, info in self._found), default=0)
        beyond = range(self._rank, max(last, self._rank + 1), self._world_size)
        for rank in {*beyond, *(keeper for keeper, _ in self._found)}:
            # Without a snapshot, the process may still be writing: do not wait for it.
            end(self._folder, rank, wait=bool(self._found))

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
    """Read one checkpoint's files from memory snapshots on this node, and the others from disk."""

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
