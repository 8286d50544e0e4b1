import ctypes
import errno
import mmap
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import xxhash
from waiting import open_descriptors

from holdfast.checkpoint.format.checksums import BLOCK_BYTES, digests_of, file_digests
from holdfast.checkpoint.format.rank_layout import CHUNK_BYTES, Piece
from holdfast.checkpoint.writer import direct_io
from holdfast.checkpoint.writer.direct_io import piece_digests, write_file
from holdfast.core.rate_limit import RateLimit

SECTOR = 4096


@pytest.fixture
def memory():
    """Return a function that makes page-aligned memory of random bytes, as an arena has."""
    made = []

    def filled(size_bytes):
        padded = -(-max(size_bytes, 1) // SECTOR) * SECTOR
        mapped = mmap.mmap(-1, padded)
        for at in range(0, size_bytes, 1 << 20):
            count = min(1 << 20, size_bytes - at)
            mapped[at : at + count] = os.urandom(count)
        made.append(mapped)
        return memoryview(mapped)

    return filled


@pytest.fixture
def mounted(tmp_path):
    """Mount a small file system of a type, with options."""
    points = []

    def mount(kind, options):
        point = tmp_path / f"mounted-{len(points)}"
        point.mkdir()
        command = ["mount", "-t", kind, "-o", options, kind, point]
        if (
            os.geteuid() != 0
            or subprocess.run(command, capture_output=True, check=False).returncode
        ):
            pytest.skip("a small file system of its own needs root and the right to mount")
        points.append(point)
        return point

    yield mount
    for point in points:
        subprocess.run(["umount", point], check=True)


@pytest.mark.parametrize(
    "size_bytes",
    [
        0,
        1,
        SECTOR - 1,
        SECTOR,
        SECTOR + 1,
        BLOCK_BYTES - 1,
        BLOCK_BYTES,
        BLOCK_BYTES + 1,
        CHUNK_BYTES - 1,
        CHUNK_BYTES,
        CHUNK_BYTES + 1,
        2 * CHUNK_BYTES + SECTOR + 64,
    ],
)
def test_the_file_is_what_the_memory_is_and_its_digests_are_those_of_the_file(
    tmp_path, memory, size_bytes
):
    path, data, told = tmp_path / "file", memory(size_bytes), []
    written = write_file(path, data, size_bytes, progress=told.append)
    assert path.stat().st_size == size_bytes
    assert path.read_bytes() == bytes(data[:size_bytes])
    assert written.blocks == file_digests(path, size_bytes) == digests_of(data[:size_bytes])
    assert written.pieces == b""
    assert sum(told) == size_bytes


def test_what_was_there_is_gone(tmp_path, memory):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 3 * SECTOR)
    data = memory(100)
    write_file(path, data, 100)
    assert path.read_bytes() == bytes(data[:100])


def test_bytes_after_the_file_do_not_get_into_it(tmp_path, memory):
    """The next bytes of the image belong to another file."""
    data = memory(3 * SECTOR)
    write_file(tmp_path / "file", data[SECTOR:], 100)
    assert (tmp_path / "file").read_bytes() == bytes(data[SECTOR : SECTOR + 100])


def test_pieces_are_hashed_by_themselves_in_their_order(tmp_path, memory):
    size_bytes = 2 * CHUNK_BYTES + 5000
    data = memory(size_bytes)
    pieces = [
        Piece(64, 1),
        Piece(128, 1000),
        Piece(SECTOR, CHUNK_BYTES - SECTOR),
        Piece(CHUNK_BYTES, CHUNK_BYTES),
        Piece(2 * CHUNK_BYTES, 4000),
        Piece(2 * CHUNK_BYTES + 4032, 968),
    ]
    written = write_file(tmp_path / "file", data, size_bytes, pieces)
    expected = [
        xxhash.xxh3_64_intdigest(data[at : at + length]).to_bytes(8, "little")
        for at, length in pieces
    ]
    assert written.pieces == b"".join(expected) == piece_digests(data, pieces)


def test_what_changes_while_it_is_written_is_in_the_digests(tmp_path, memory, monkeypatch):
    """Then an attestation cannot accept the changed bytes."""
    size_bytes = 2 * CHUNK_BYTES
    data = memory(size_bytes)
    pieces = [Piece(0, CHUNK_BYTES), Piece(CHUNK_BYTES, CHUNK_BYTES)]
    before, write = piece_digests(data, pieces), os.pwrite

    def change(fd, part, at):
        count = write(fd, part, at)
        if at == CHUNK_BYTES:
            data[at + 5] ^= 4
        return count

    monkeypatch.setattr(direct_io.os, "pwrite", change)
    written = write_file(tmp_path / "file", data, size_bytes, pieces)
    assert written.pieces[:8] == before[:8]
    assert written.pieces[8:] == piece_digests(data, pieces)[8:] != before[8:]


def test_one_flipped_bit_on_the_disk_changes_the_digest_of_its_block_alone(tmp_path, memory):
    size_bytes = CHUNK_BYTES + 3 * BLOCK_BYTES
    path = tmp_path / "file"
    written = write_file(path, memory(size_bytes), size_bytes)
    at = CHUNK_BYTES + BLOCK_BYTES + 5
    with path.open("r+b") as file:
        file.seek(at)
        (value,) = file.read(1)
        file.seek(at)
        file.write(bytes([value ^ 4]))
    found = file_digests(path, size_bytes)
    differing = [
        number
        for number in range(len(found) // 8)
        if found[number * 8 :][:8] != written.blocks[number * 8 :][:8]
    ]
    assert differing == [at // BLOCK_BYTES]


def test_a_full_disk_is_an_error_before_a_byte_is_written(mounted, memory):
    folder = mounted("tmpfs", "size=1m")
    written = []
    with pytest.raises(OSError, match="No space left"):
        write_file(folder / "file", memory(2 << 20), 2 << 20, progress=written.append)
    assert written == []


def test_a_full_disk_is_an_error_where_space_cannot_be_taken_beforehand(
    mounted, memory, monkeypatch
):
    monkeypatch.setattr(direct_io, "_reserve", lambda *_: None)
    folder = mounted("tmpfs", "size=1m")
    with pytest.raises(OSError, match=r"No space left|takes nothing"):
        write_file(folder / "file", memory(2 << 20), 2 << 20)


@pytest.mark.parametrize(
    ("number", "is_told"), [(errno.EOPNOTSUPP, False), (errno.ENOSYS, False), (errno.ENOSPC, True)]
)
def test_where_no_space_can_be_taken_no_byte_is_written_for_it(
    tmp_path, memory, monkeypatch, number, is_told
):
    """The C library would write into each block instead."""
    data, written = memory(3 * CHUNK_BYTES), []
    write = os.pwrite

    def refuse(*_):
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(direct_io, "_libc", SimpleNamespace(fallocate=refuse))
    monkeypatch.setattr(
        direct_io.os,
        "pwrite",
        lambda fd, part, at: written.append(len(part)) or write(fd, part, at),
    )
    if is_told:
        with pytest.raises(OSError, match=os.strerror(number)):
            write_file(tmp_path / "file", data, len(data))
    else:
        write_file(tmp_path / "file", data, len(data))
        assert (tmp_path / "file").read_bytes() == bytes(data)
    assert written == ([] if is_told else [CHUNK_BYTES] * 3)


@pytest.mark.parametrize(("kind", "options"), [("tmpfs", "size=40m"), ("ramfs", "mode=0700")])
def test_it_works_where_there_is_no_direct_writing(mounted, memory, kind, options):
    folder = mounted(kind, options)
    if kind == "ramfs":
        with pytest.raises(OSError, match="Invalid argument"):
            os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    size_bytes = CHUNK_BYTES + 1001
    data = memory(size_bytes)
    written = write_file(folder / "file", data, size_bytes)
    assert (folder / "file").read_bytes() == bytes(data[:size_bytes])
    assert written.blocks == digests_of(data[:size_bytes])


LIMITED = """
import mmap, resource, sys
from pathlib import Path
from holdfast.checkpoint.writer.direct_io import write_file
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
data = mmap.mmap(-1, 1 << 20)
try:
    write_file(Path(sys.argv[1]), memoryview(data), 1 << 20)
except OSError as error:
    print(error.errno)
"""


@pytest.mark.parametrize("limit_bytes", [0, 5000, (1 << 20) - 1, 1 << 20])
def test_a_limit_to_the_size_of_files_is_an_error(tmp_path, limit_bytes):
    command = [sys.executable, "-c", LIMITED, tmp_path / "file", str(limit_bytes)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.strip()) == (0, "27" if limit_bytes < 1 << 20 else ""), (
        ended.stderr
    )


def test_no_descriptor_is_left_behind(tmp_path, memory, mounted):
    folder = mounted("tmpfs", "size=1m")
    before = open_descriptors()
    write_file(tmp_path / "file", memory(10), 10)
    with pytest.raises(OSError, match="No space left"):
        write_file(folder / "file", memory(2 << 20), 2 << 20)
    with pytest.raises(FileNotFoundError):
        write_file(tmp_path / "no" / "file", memory(10), 10)
    assert open_descriptors() <= before


def test_a_file_waits_for_its_turn(tmp_path, memory):
    waited_s = []
    pace = RateLimit(1000.0, lambda: sum(waited_s), waited_s.append)
    for number in range(10):  # also small files in a row
        write_file(tmp_path / f"file-{number}", memory(SECTOR), 500, pace=pace)
    assert sum(waited_s) == pytest.approx(9 * 0.5)


def test_a_file_is_written_at_a_limited_rate(tmp_path, memory):
    began_s = time.monotonic()
    written = write_file(
        tmp_path / "file",
        memory(CHUNK_BYTES + 10),
        CHUNK_BYTES + 10,
        pace=RateLimit(CHUNK_BYTES * 5),
    )
    assert time.monotonic() - began_s >= 0.2
    assert len(written.blocks) == 8 * (CHUNK_BYTES // BLOCK_BYTES + 1)
