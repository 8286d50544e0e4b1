"""Test compressed logs: whole, in several parts, incomplete, damaged, and of excessive size."""

import gzip
import struct

import pytest
import zstandard

from holdfast.diagnose import diagnose
from holdfast.diagnose.logs.files import Reading, read_blocks

PACK = {"gz": lambda data: gzip.compress(data, mtime=0), "zst": zstandard.ZstdCompressor().compress}
KEY_ERROR = b"Traceback (most recent call last):\n  File \"/job/t.py\", line 8, in f\n    g()\nKeyError: 'a'\n"
LINES = b"".join(
    b"shard %d of %d took %d ms\n" % (i * 6101 % 9967, i * i % 9973, i * 7919 % 10007)
    for i in range(40_000)
)

every_kind = pytest.mark.parametrize("kind", list(PACK))


def read(path):
    reading = Reading()
    return b"".join(block for block, _ in read_blocks(path, reading)), reading.notes


@every_kind
@pytest.mark.parametrize("data", [b"", b"a", b"a\nb\n", LINES], ids=len)
def test_unpacked_it_is_what_went_in(tmp_path, kind, data):
    log = tmp_path / f"x.log.{kind}"
    log.write_bytes(PACK[kind](data))
    assert read(log) == (data, [])


@every_kind
def test_it_is_known_by_its_content_not_by_its_name(tmp_path, kind):
    log = tmp_path / "rank-0.log"
    log.write_bytes(PACK[kind](b"step 1 loss 2\n" + KEY_ERROR))
    found = diagnose(tmp_path)
    assert (found.reason, found.root_line.line, found.scope) == ("KeyError", 5, {"rank": 0})
    log.write_bytes(KEY_ERROR)
    log.rename(tmp_path / f"y.log.{kind}")
    assert diagnose(tmp_path).reason == "KeyError"


@every_kind
def test_parts_that_were_appended_are_one_text(tmp_path, kind):
    """Test members that log rotation or `pigz` appends, with cuts within lines."""
    data = b"step 1 loss 2\n" * 5 + KEY_ERROR
    log = tmp_path / f"x.log.{kind}"
    log.write_bytes(b"".join(PACK[kind](data[at : at + 33]) for at in range(0, len(data), 33)))
    assert read(log) == (data, [])
    assert diagnose(log).root_line.line == 9


@every_kind
def test_many_empty_parts(tmp_path, kind):
    log = tmp_path / f"x.log.{kind}"
    log.write_bytes(PACK[kind](b"") * 3000 + PACK[kind](KEY_ERROR))
    assert read(log) == (KEY_ERROR, [])


@every_kind
def test_a_line_of_an_older_part_is_cited_in_that_part(tmp_path, kind):
    (tmp_path / "rank-3.log").write_bytes(b"leaving\n")
    (tmp_path / f"rank-3.log.1.{kind}").write_bytes(PACK[kind](b"step 9 loss 2\n" + KEY_ERROR))
    (tmp_path / f"rank-3.log.2.{kind}").write_bytes(PACK[kind](b"step 8 loss 2\n" * 9))
    found = diagnose(tmp_path)
    assert (found.reason, found.scope, found.root_line.line) == ("KeyError", {"rank": 3}, 5)
    assert found.root_line.file.endswith(f"rank-3.log.1.{kind}")


@every_kind
def test_cut_short_the_rest_is_used_and_it_says_so(tmp_path, kind):
    packed = PACK[kind](KEY_ERROR + LINES)
    log = tmp_path / f"x.log.{kind}"
    log.write_bytes(packed[: len(packed) * 2 // 3])
    data, notes = read(log)
    assert len(data) > len(LINES) // 3
    assert (KEY_ERROR + LINES).startswith(data)
    assert [note for note in notes if "cut short" in note and str(log) in note]
    found = diagnose(log)
    assert found.reason == "KeyError"
    assert len(found.notes) == 1


@every_kind
def test_cut_anywhere(tmp_path, kind):
    packed = PACK[kind](KEY_ERROR) + PACK[kind](b"step 1 loss 2\n")
    log = tmp_path / "x.log"
    for end in range(6, len(packed)):
        log.write_bytes(packed[:end])
        data, notes = read(log)
        assert (KEY_ERROR + b"step 1 loss 2\n").startswith(data)
        assert len(notes) == (end != len(PACK[kind](KEY_ERROR)))


@every_kind
def test_damaged_anywhere(tmp_path, kind):
    packed = bytearray(PACK[kind](KEY_ERROR + b"step 1 loss 2\n" * 50))
    log = tmp_path / "x.log"
    for at in range(4, len(packed)):
        log.write_bytes(packed[:at] + bytes([packed[at] ^ 0x55]) + packed[at + 1 :])
        read(log)
        diagnose(log)


@every_kind
def test_what_follows_the_packed_text_is_noted_or_ignored(tmp_path, kind):
    log = tmp_path / f"x.log.{kind}"
    log.write_bytes(PACK[kind](KEY_ERROR) + b"\x00" * 512)
    assert read(log)[0] == KEY_ERROR
    log.write_bytes(PACK[kind](KEY_ERROR) + b"what is this\n")
    data, notes = read(log)
    assert data.startswith(KEY_ERROR)
    assert len(notes) == 1


def rle_frame(byte, blocks):
    """Return a zstd frame with 4 bytes per block of 128 KiB (RFC 8878, 3.1.1.2: RLE blocks)."""
    # no checksum, no size; a window of 128 KiB
    header = struct.pack("<I", 0xFD2FB528) + bytes([0x00, 0x38])
    size = 128 << 10
    heads = [
        (size << 3 | 1 << 1 | (number == blocks - 1)).to_bytes(3, "little") + byte
        for number in range(blocks)
    ]
    return header + b"".join(heads)


def test_the_frame_of_the_tests_is_one(tmp_path):
    log = tmp_path / "x.zst"
    log.write_bytes(rle_frame(b"\n", 3))
    assert read(log) == (b"\n" * (3 * 128 << 10), [])


@pytest.mark.parametrize("byte", [b"x", b"\n", b"\r", b"\x00"])
def test_a_bomb_takes_little_memory(tmp_path, measured, byte):
    log = tmp_path / "x.log.zst"
    log.write_bytes(rle_frame(byte, 64) + PACK["zst"](b"\n" + KEY_ERROR))
    reason, _, grown_mib = measured(log)
    assert reason == "KeyError"
    assert grown_mib < 100


def test_a_bomb_of_a_gigabyte_ends_soon(tmp_path, measured):
    log = tmp_path / "x.log.zst"
    log.write_bytes(PACK["zst"](KEY_ERROR) + rle_frame(b"x", 8 * 1024))  # 1 GiB in 32 KiB
    reason, _, grown_mib = measured(log, limit_s=60)
    assert reason == "KeyError"
    assert grown_mib < 100


def test_a_window_of_gigabytes_is_refused(tmp_path, measured):
    """Test a header that requests 3.75 TB of memory (RFC 8878, 3.1.1.1.2)."""
    log = tmp_path / "x.log.zst"
    log.write_bytes(struct.pack("<I", 0xFD2FB528) + bytes([0x00, 0xFF]) + b"\x01\x00\x00")
    reason, notes, grown_mib = measured(log)
    assert (reason, notes) == ("Unknown", 1)
    assert grown_mib < 60
