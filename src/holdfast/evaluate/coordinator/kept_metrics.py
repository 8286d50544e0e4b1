"""Reuse metrics from the journal only while the files that they read are unchanged.

The files that a metric reads are known only after its computation. So the journal has two kinds of
entries. The entry under a metric's first key lists the files that were read. The names of these
files and their present contents give the next key. The entry under that key is either a further
list of files, or the metric's result. If a file was edited, its new content gives a key without an
entry, and the metric is computed again.
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
    """Find the results of earlier metrics in the journal, and make the records of new results."""

    def __init__(self) -> None:
        self._digests = ContentDigests()

    def find(self, journal: Journal, key: bytes) -> bytes | None:
        """Return a metric's result if its files are unchanged; None if there is no such result."""
        while (body := journal.get(key)) is not None:
            if body[:1] == _RESULT:
                return body[1:]
            key = _next_key(key, {path: self._digests.of(path) for path in _files_in(body)})
        return None

    def records(
        self, journal: Journal, key: bytes, measured: bytes, read: Mapping[str, str] | None
    ) -> Records:
        """Return the journal records for a new result.

        With these records in the journal, `find` returns `measured` as long as the files in `read`
        (path to digest) are unchanged. The list is empty if the journal already has the result. The
        list is also empty if `read` is None, which means that not all files are known.
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
