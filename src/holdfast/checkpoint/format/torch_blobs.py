"""Check a value that `torch.save` wrote into a larger file, without loading it.

The value is a ZIP archive. Its records are stored uncompressed, each with the CRC-32 of its bytes.
A writer may leave out the CRC-32 (`torch.serialization.set_crc32_options(False)`, and `skip_data`).
The stored checksum is then 0, and the bytes cannot be checked. The format is described in PKWARE's
APPNOTE 6.3 and in torch's `caffe2/serialize/inline_container.h`. This module needs no torch.
"""

import errno
import io
import os
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass

_READ_BYTES = 1 << 20
_END = struct.Struct("<4s4H2LH")
_MORE_THAN_16_BITS = 0xFFFF
_NO_ZIP = (
    zipfile.BadZipFile,
    NotImplementedError,
    RuntimeError,
    EOFError,
    struct.error,
    ValueError,
    LookupError,
)
"""The exceptions that `zipfile` raises for bytes that are not a ZIP archive."""


class BlobError(Exception):
    """Report bytes that are damaged or not written by `torch.save`; the message describes them."""


@dataclass(frozen=True, kw_only=True)
class TorchBlob:
    """Describe a value that was checked.

    Attributes:
        data_bytes: the number of bytes of the tensors in the value.
        is_checked: whether every record has a checksum. Checksums that exist are right.
    """

    data_bytes: int
    is_checked: bool


def check_blob(
    fd: int, offset: int, size_bytes: int, progress: Callable[[int], None] = lambda _: None
) -> TorchBlob:
    """Read and check the value of `size_bytes` bytes at `offset` of an open file.

    `progress` is called with the number of bytes read.

    Raises:
        BlobError: the value is damaged, or not written by `torch.save`.
        OSError: the file cannot be read.
    """
    try:
        with zipfile.ZipFile(_Window(fd, offset, size_bytes)) as archive:
            records = archive.infolist()
            _check_form(records, size_bytes)
            _check_end(os.pread(fd, _END.size, offset + size_bytes - _END.size), len(records))
            unchecked = [
                record for record in records if not _check_record(archive, record, progress)
            ]
    except (*_NO_ZIP, _BeforeError) as error:
        raise BlobError(str(error) or type(error).__name__) from error
    data_bytes = sum(record.file_size for record in records if "/data/" in record.filename)
    return TorchBlob(data_bytes=data_bytes, is_checked=not unchecked)


def _check_form(records: list[zipfile.ZipInfo], size_bytes: int) -> None:
    roots = {record.filename.partition("/")[0] for record in records}
    if len(roots) != 1 or f"{roots.pop()}/data.pkl" not in {record.filename for record in records}:
        raise BlobError("it is a ZIP archive, but not one that torch.save wrote")
    if any(
        record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1 for record in records
    ):
        raise BlobError("a record is compressed or encrypted, which torch.save does not do")
    if sum(record.file_size for record in records) > size_bytes:
        raise BlobError("its records are larger than it is")


def _check_end(end: bytes, count: int) -> None:
    """Check that the end of the archive states as many records as its directory lists.

    Only this number shows that a record is missing from the directory.
    """
    signature, _disk, _first_disk, _here, in_all, _size_bytes, _offset, comment_bytes = _END.unpack(
        end
    )
    if signature != b"PK\5\6" or comment_bytes or in_all not in (count, _MORE_THAN_16_BITS):
        raise BlobError("its directory of records does not match its end")


def _check_record(
    archive: zipfile.ZipFile, record: zipfile.ZipInfo, progress: Callable[[int], None]
) -> bool:
    has_checksum = record.CRC != 0 or record.file_size == 0
    with archive.open(record) as opened:  # compares the record's two headers
        while has_checksum and (count := len(opened.read(_READ_BYTES))):
            progress(count)
    if not has_checksum:
        progress(record.file_size)
    return has_checksum


class _BeforeError(OSError):
    """Report a read before the start of the archive, as the OSError that `zipfile` expects."""


class _Window(io.RawIOBase):
    """Present a part of a file as a separate file."""

    def __init__(self, fd: int, offset: int, size_bytes: int) -> None:
        self._fd = fd
        self._offset = offset
        self._size_bytes = size_bytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size_bytes}[whence]
        if at < 0:
            raise _BeforeError(errno.EINVAL, "a record begins before it")
        self._at = at
        return at

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        view = view[: max(0, self._size_bytes - self._at)]
        filled = 0
        while filled < len(view) and (
            count := os.preadv(self._fd, [view[filled:]], self._offset + self._at + filled)
        ):
            filled += count
        self._at += filled
        return filled
