"""Reuse metrics from the journal only while the files that they read are unchanged.

Which files a metric reads is only known after its computation. So the journal has two kinds of
entries. The entry of a metric's first key has the names of the files that were read. These names
and the files' present contents give the next key, and so on, until an entry has the result. If a
file was edited, its new content gives a key without an entry, and the metric is computed again.
"""

import hashlib
from collections.abc import Mapping

import msgspec

from holdfast.evaluate.types.reads import ContentDigests
from holdfast.evaluate.types.requests import KEY_BYTES
from holdfast.evaluate.wire.answer_journal import Journal

_RESULT, _FILES = b"r", b"f"

Records = list[tuple[bytes, bytes]]


class KeptMetrics:
    """Find and record metrics."""

    def __init__(self) -> None:
        self._digests = ContentDigests()

    def find(self, journal: Journal, key: bytes) -> bytes | None:
        """Return the result for a metric's key and the present files; None if there is none."""
        while (body := journal.get(key)) is not None:
            if body[:1] == _RESULT:
                return body[1:]
            key = _next_key(key, {path: self._digests.of(path) for path in _files_in(body)})
        return None

    def records(
        self, journal: Journal, key: bytes, measured: bytes, read: Mapping[str, str] | None
    ) -> Records:
        """Return the records by which `find` returns `measured` while the files `read` are unchanged.

        The list is empty if the journal has the result already, or if `read` is None, since too
        many files were read.
        """
        if read is None:
            return []
        left = dict(read)
        while (body := journal.get(key)) is not None:
            if body[:1] == _RESULT:
                return []
            names = _files_in(body)
            key = _next_key(key, {p: read[p] if p in read else self._digests.of(p) for p in names})
            left = {path: digest for path, digest in left.items() if path not in names}
        if not left:
            return [(key, _RESULT + measured)]
        files = _FILES + msgspec.msgpack.encode(sorted(left))
        return [(key, files), (_next_key(key, left), _RESULT + measured)]


def _files_in(body: bytes) -> list[str]:
    return msgspec.msgpack.decode(body[1:], type=list[str])


def _next_key(key: bytes, digests: Mapping[str, str]) -> bytes:
    digest = hashlib.blake2b(key, digest_size=KEY_BYTES)
    digest.update(msgspec.msgpack.encode(sorted(digests.items())))
    return digest.digest()
