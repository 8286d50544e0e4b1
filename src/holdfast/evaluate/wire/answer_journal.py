"""Store each finished answer durably, once, under the key of its request.

A journal is a folder of segment files. Each process that writes appends to its own segment, so that
writers never conflict and a crash leaves at most one torn record at a segment's end, which readers
skip. A segment starts with a header that holds the journal's identity. After the header come the
records, in little endian:

    length of body (u32) | XXH3-64 of key and body (u64) | key (`KEY_BYTES`) | body

The identity of a journal of answers is made of the digest of the weights and the engine's numerics,
so that the answers of one checkpoint are never read for another.
"""

import hashlib
import mmap
import os
import secrets
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash

from holdfast.core.atomic import fsync_folder
from holdfast.core.errors import HoldfastError
from holdfast.evaluate.types.requests import KEY_BYTES

_MAGIC = b"holdfast journal 1\n"
_HEADER = struct.Struct("<I")  # length of the identity that follows the magic
_RECORD = struct.Struct(f"<IQ{KEY_BYTES}s")
_SUFFIX = ".journal"


class JournalError(HoldfastError):
    """A journal cannot be written or read."""


class Journal:
    """Store bodies, such as encoded answers, durably under keys.

    The journal has the records that were found on opening, and the records that this process
    commits. Records that other processes append later are not visible. `commit` may run in another
    thread than the other methods.

    Args:
        root: the folder of all journals.
        identity: everything that a body depends on besides its key.

    Raises:
        JournalError: the folder cannot be used.
    """

    def __init__(self, root: Path, identity: str) -> None:
        self.identity = identity
        self.folder = root / hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
        self._files: list[int] = []
        self._places: dict[bytes, int] = {}  # key to segment << 48 | offset of the record
        self._own: int | None = None  # index of the segment this process appends to
        self._own_size_bytes = 0
        self._latest: dict[bytes, bytes] = {}  # bodies of the last commit, which are read soon
        self._writing = threading.Lock()
        self._is_closed = False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(self.folder.glob(f"*{_SUFFIX}")):
                self._read_segment(path)
        except OSError as error:
            raise JournalError(
                f"The journal {self.folder} cannot be read: {error.strerror}."
            ) from error

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def get(self, key: bytes) -> bytes | None:
        """Return the body that was committed under a key; None if there is none.

        Raises:
            JournalError: the file cannot be read, or another program changed it.
        """
        if (body := self._latest.get(key)) is not None:
            return body
        place = self._places.get(key)
        if place is None:
            return None
        file, offset = self._files[place >> 48], place & (1 << 48) - 1
        try:
            length, checksum, found = _RECORD.unpack(os.pread(file, _RECORD.size, offset))
            body = os.pread(file, length, offset + _RECORD.size)
        except (OSError, struct.error) as error:
            raise JournalError(f"A record of {self.folder} cannot be read: {error}.") from error
        if found != key or _checksum(key, body) != checksum:
            raise JournalError(
                f"A record of {self.folder} changed after it was written. Remove the folder to "
                "redo it."
            )
        return body

    def commit(self, records: Iterable[tuple[bytes, bytes]]) -> None:
        """Append (key, body) records and wait until they are on disk.

        A record whose key is already in the journal is skipped.

        Raises:
            JournalError: the disk is full or failing; none of the records counts as committed, and
                a later commit may succeed.
        """
        with self._writing:
            if not self._is_closed:
                self._append({key: body for key, body in records if key not in self._places})

    def _append(self, new: dict[bytes, bytes]) -> None:
        if not new:
            return
        blob = b"".join(
            _RECORD.pack(len(body), _checksum(key, body), key) + body for key, body in new.items()
        )
        try:
            if self._own is None:
                self._open_segment()
            assert self._own is not None
            file, start = self._files[self._own], self._own_size_bytes
            _write(file, blob)
            os.fsync(file)
        except OSError as error:
            # The failed write may have left a torn record; append no further records to this
            # segment.
            self._own = None
            raise JournalError(
                f"{len(new)} finished requests cannot be kept in {self.folder}: {error.strerror}. "
                "Make room there, then run `holdfast eval resume`."
            ) from error
        offset = start
        for key, body in new.items():
            self._places[key] = self._own << 48 | offset
            offset += _RECORD.size + len(body)
        self._own_size_bytes = offset
        self._latest = new

    def close(self) -> None:
        """Close the files; later commits have no effect."""
        with self._writing:
            self._is_closed = True
            for file in self._files:
                os.close(file)
            self._files, self._places, self._latest, self._own = [], {}, {}, None

    def _open_segment(self) -> None:
        name = f"{time.time_ns():020d}-{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
        identity = self.identity.encode()
        file = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        header = _MAGIC + _HEADER.pack(len(identity)) + identity
        try:
            _write(file, header)
            fsync_folder(self.folder)
        except OSError:
            os.close(file)
            raise
        self._files.append(file)
        self._own, self._own_size_bytes = len(self._files) - 1, len(header)

    def _read_segment(self, path: Path) -> None:
        file = os.open(path, os.O_RDONLY)
        start = self._check_header(file)
        if start is None:
            # Torn before the first record, or of another journal whose digest collides.
            os.close(file)
            return
        segment = len(self._files)
        self._files.append(file)
        for key, offset in _records(file, start):
            self._places.setdefault(key, segment << 48 | offset)

    def _check_header(self, file: int) -> int | None:
        identity = self.identity.encode()
        expected = _MAGIC + _HEADER.pack(len(identity)) + identity
        return len(expected) if os.pread(file, len(expected), 0) == expected else None


def keys_of(segment: Path) -> list[bytes]:
    """Return the keys of all complete records of a journal's segment; empty for other files."""
    file = os.open(segment, os.O_RDONLY)
    try:
        head = os.pread(file, len(_MAGIC) + _HEADER.size, 0)
        if not head.startswith(_MAGIC) or len(head) < len(_MAGIC) + _HEADER.size:
            return []
        (identity_bytes,) = _HEADER.unpack_from(head, len(_MAGIC))
        return [key for key, _offset in _records(file, len(head) + identity_bytes)]
    finally:
        os.close(file)


def _records(file: int, start: int) -> Iterator[tuple[bytes, int]]:
    """Yield the key and the offset of each complete record."""
    size_bytes = os.fstat(file).st_size
    with mmap.mmap(file, size_bytes, prot=mmap.PROT_READ) as content, memoryview(content) as view:
        offset = start
        while offset + _RECORD.size <= size_bytes:
            length, checksum, key = _RECORD.unpack_from(view, offset)
            end = offset + _RECORD.size + length
            if end > size_bytes:
                break
            # A flipped bit in a body loses one record. A flipped bit in a length loses all later
            # records of the segment.
            if _checksum(key, view[offset + _RECORD.size : end]) == checksum:
                yield key, offset
            offset = end


def _checksum(key: bytes, body: bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(body, seed=int.from_bytes(key[:8], "little"))


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
