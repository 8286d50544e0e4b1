"""Read parts of files of one checkpoint in object storage, and verify every block.

A file of more than one block has a sidecar in storage with the digests of its blocks. The reader
fetches the sidecar once, checks it against the manifest, and keeps it in memory. Reads are extended
to whole blocks, because only whole blocks can be verified.
"""

import threading
from typing import Final

from holdfast.checkpoint.format.checksums import (
    BLOCK_BYTES,
    DIGEST_BYTES,
    SIDECAR_SUFFIX,
    checksum_of_digests,
    digests_of,
    whole_checksum,
)
from holdfast.checkpoint.format.manifest import FileEntry
from holdfast.checkpoint.storage.catalog import RemoteCheckpoint
from holdfast.checkpoint.storage.object_store import PART_BYTES, Objects, in_parallel
from holdfast.core.errors import BadUse, CheckpointError, DamagedCheckpoint

_PARTS_AT_ONCE: Final = 8
_ATTEMPTS: Final = 2
"""Attempts to read a part: bytes damaged in transit are likely right at the second attempt."""


def by_blocks(entry: FileEntry) -> bool:
    """Return True if a file's checksum is made of block digests, not of the whole content."""
    return not entry.checksum.startswith(whole_checksum(""))


def sidecar_of(entry: FileEntry) -> tuple[str, int] | None:
    """Return the storage path and the size in bytes of a file's sidecar; None if it has none."""
    if not by_blocks(entry) or entry.size_bytes <= BLOCK_BYTES:
        return None
    return entry.path + SIDECAR_SUFFIX, -(-entry.size_bytes // BLOCK_BYTES) * DIGEST_BYTES


class RangeReader:
    """Read parts of the files of `checkpoint`. An instance is safe to use from several threads."""

    def __init__(self, objects: Objects, checkpoint: RemoteCheckpoint) -> None:
        self.checkpoint = checkpoint
        self._objects = objects
        files = checkpoint.manifest.files if checkpoint.manifest else ()
        self._files = {entry.path: entry for entry in files}
        self._digests: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def read(self, file: str, offset: int, length: int) -> memoryview:
        """Read and verify a part of a file; see `Remote.read_range`.

        Raises:
            FileNotFoundError: the file is no longer in storage.
        """
        entry = self._files.get(file)
        if entry is None:
            raise BadUse(
                f"{self.checkpoint.url} has no file {file!r}. It has: {', '.join(self._files)}."
            )
        if offset < 0 or length < 0 or offset + length > entry.size_bytes:
            raise BadUse(
                f"{file} of {self.checkpoint.url} has {entry.size_bytes} bytes: {length} at {offset} are "
                "not in the file. Request fewer bytes."
            )
        if not by_blocks(entry):
            raise CheckpointError(
                f"{self.checkpoint.url} was saved by an earlier version: its files can be verified only whole. "
                "Fetch it instead."
            )
        if length == 0:
            return memoryview(b"")
        first = offset // BLOCK_BYTES
        last = -(-(offset + length) // BLOCK_BYTES)
        wanted = self._digests_of(entry)[first * DIGEST_BYTES : last * DIGEST_BYTES]
        begin, end = first * BLOCK_BYTES, min(last * BLOCK_BYTES, entry.size_bytes)
        for _ in range(_ATTEMPTS):
            data = self._read(file, begin, end - begin)
            if digests_of(data) == wanted:
                return data[offset - begin : offset - begin + length]
        raise self._damaged(f"{file} does not match its checksum")

    def _digests_of(self, entry: FileEntry) -> bytes:
        with self._lock:
            known = self._digests.get(entry.path)
        if known is not None:
            return known
        sidecar = sidecar_of(entry)
        for _ in range(_ATTEMPTS):
            if sidecar is None:
                digests = digests_of(self._read(entry.path, 0, entry.size_bytes))
            else:
                digests = bytes(self._read(sidecar[0], 0, sidecar[1]))
            if checksum_of_digests(digests) == entry.checksum:
                with self._lock:
                    self._digests[entry.path] = digests
                return digests
        raise self._damaged(f"{sidecar[0] if sidecar else entry.path} does not match its checksum")

    def _read(self, file: str, offset: int, length: int) -> memoryview:
        data = memoryview(bytearray(length))

        def read(at: int) -> None:
            count = min(PART_BYTES, length - at)
            data[at : at + count] = self._objects.read_range(
                f"{self.checkpoint.name}/{file}", offset + at, count
            )

        in_parallel(read, range(0, length, PART_BYTES), threads=_PARTS_AT_ONCE)
        return data

    def _damaged(self, reason: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(f"{self.checkpoint.url} is damaged: {reason}. Take another step.")
