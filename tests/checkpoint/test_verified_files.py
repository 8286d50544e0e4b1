"""Test reads of parts of files, with huge pages for large disk requests, and without them."""

import ctypes
import mmap
import os
import re
from pathlib import Path

import pytest

from holdfast.checkpoint.format import verified_files
from holdfast.checkpoint.format.checksums import SIDECAR_SUFFIX, checksum_of_digests, digests_of
from holdfast.checkpoint.format.manifest import FileEntry, ManifestError
from holdfast.checkpoint.format.verified_files import ByteRange, VerifiedFiles

SIZE_BYTES = 100_003
HUGE_PAGE_BYTES = 2 << 20


@pytest.fixture
def stored(tmp_path):
    """Return the content of a file of noise, and its verified reader."""
    content = os.urandom(SIZE_BYTES)
    digests = digests_of(memoryview(content))
    (tmp_path / "data").write_bytes(content)
    (tmp_path / f"data{SIDECAR_SUFFIX}").write_bytes(digests)
    entry = FileEntry(path="data", size_bytes=SIZE_BYTES, checksum=checksum_of_digests(digests))
    return content, VerifiedFiles(tmp_path, [entry])


@pytest.fixture
def refused(monkeypatch):
    """Make the kernel refuse huge pages."""
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)


@pytest.mark.parametrize("pages", ["huge", "refused"])
def test_parts_are_read_whatever_pages_there_are(stored, pages, request):
    if pages == "refused":
        request.getfixturevalue("refused")
    content, files = stored
    parts = [
        ByteRange(at, memoryview(bytearray(size)))
        for at, size in ((5, 70_000), (SIZE_BYTES - 3, 3))
    ]
    files.read("data", parts)
    assert all(
        part.target == content[part.offset : part.offset + len(part.target)] for part in parts
    )
    assert files.bytes_read == SIZE_BYTES


def test_a_changed_byte_is_not_handed_out(stored, tmp_path):
    content, files = stored
    (tmp_path / "data").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    part = ByteRange(SIZE_BYTES - 3, memoryview(bytearray(3)))
    with pytest.raises(ManifestError, match="does not match its checksum"):
        files.read("data", [part])
    assert part.target == bytes(3)


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no huge pages"
)
def test_the_memory_begins_with_a_huge_page_and_asks_for_them():
    """Small pages make small requests, and some disks limit the requests a second."""
    memory = verified_files._huge_pages(1 << 20)
    assert len(memory) == 1 << 20
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert address % HUGE_PAGE_BYTES == 0
    areas = re.findall(
        r"^(\w+)-(\w+) .*?^VmFlags:(.*?)$",
        Path("/proc/self/smaps").read_text(),
        re.DOTALL | re.MULTILINE,
    )
    (flags,) = (flags for begin, end, flags in areas if int(begin, 16) <= address < int(end, 16))
    assert "hg" in flags.split()
