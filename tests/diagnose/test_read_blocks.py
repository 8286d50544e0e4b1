"""Test blocks of whole lines: numbered, bounded, and up to the size at the start of reading."""

import gzip
import io
import os
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.diagnose import diagnose
from holdfast.diagnose.logs.files import BLOCK_BYTES, LINE_LIMIT_BYTES, Reading, read_blocks

KEY_ERROR = b"Traceback (most recent call last):\n  File \"/job/t.py\", line 8, in f\n    g()\nKeyError: 'a'\n"


def text_of(path):
    return b"".join(block for block, _ in read_blocks(path))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([b"a", b"\n", b"\r", b"\r\n", b"b" * 70, b"\xff\x00"]), max_size=60)
)
def test_short_lines_come_out_as_they_went_in(tmp_path_factory, pieces):
    log = tmp_path_factory.mktemp("log") / "x.log"
    log.write_bytes(b"".join((*pieces, b"\n")) * 40)
    number = 1
    for block, first in read_blocks(log):
        assert first == number
        number += block.count(b"\n")
    assert text_of(log) == log.read_bytes()


def test_lines_are_numbered_across_blocks(tmp_path):
    log = tmp_path / "x.log"
    log.write_bytes(b"step 1 ordinary\n" * 200_000 + KEY_ERROR)
    assert log.stat().st_size > 2 * BLOCK_BYTES
    assert diagnose(log).root_line.line == 200_004


def test_bytes_are_counted(tmp_path):
    log = tmp_path / "x.log"
    log.write_bytes(b"a\n" * 1000 + b"b")
    reading = Reading()
    assert sum(len(block) for block, _ in read_blocks(log, reading)) == reading.bytes_in == 2001


def test_what_is_written_while_it_is_read_is_left(tmp_path):
    log = tmp_path / "x.log"
    log.write_bytes(b"step 1 ordinary\n" * 200_000)
    size_bytes = log.stat().st_size
    read = 0
    for block, _ in read_blocks(log):
        read += len(block)
        with log.open("ab") as file:
            file.write(b"more\n" * 300_000)
    assert read == size_bytes


def test_a_file_that_shrinks_while_it_is_read_ends(tmp_path):
    log = tmp_path / "x.log"
    log.write_bytes(b"step 1 ordinary\n" * 200_000)
    blocks = read_blocks(log)
    next(blocks)
    os.truncate(log, 10)
    assert sum(len(block) for block, _ in blocks) < 2 * BLOCK_BYTES


def test_of_a_long_line_its_beginning_is_kept(tmp_path):
    log = tmp_path / "x.log"
    log.write_bytes(b"first\n" + b"y" * (3 * BLOCK_BYTES) + b"\n" + KEY_ERROR)
    lines = text_of(log).split(b"\n")
    assert lines[0] == b"first"
    assert LINE_LIMIT_BYTES <= len(lines[1]) <= BLOCK_BYTES
    assert b"\n".join(lines[2:]) == KEY_ERROR
    assert diagnose(log).root_line.line == 6


def test_an_error_at_the_beginning_of_a_long_line_is_seen(tmp_path):
    log = tmp_path / "x.log"
    log.write_bytes(KEY_ERROR[:-1] + b" " + b"y" * (3 * BLOCK_BYTES) + b"\n")
    assert diagnose(log).reason == "KeyError"


def test_a_line_of_100_mb_takes_little_memory(tmp_path, measured):
    log = tmp_path / "x.log"
    with log.open("wb") as file:
        for _ in range(100):
            file.write(b"error " * (1_000_000 // 6))
        file.write(b"\n" + KEY_ERROR)
    reason, _, grown_mib = measured(log)
    assert reason == "KeyError"
    assert grown_mib < 60


def test_redrawn_bars_of_many_mb_take_little_memory(tmp_path, measured):
    log = tmp_path / "x.log"
    bar = b" 12%|#2        | 118/1000 [00:03<00:20,  4.1it/s, loss=2.1]\r"
    with log.open("wb") as file:
        for _ in range(20):
            file.write(bar * (1_000_000 // len(bar)))
        file.write(b"\n" + KEY_ERROR)
    reason, _, grown_mib = measured(log)
    assert reason == "KeyError"
    assert grown_mib < 60


class _Input:
    def __init__(self, data):
        self.buffer = io.BytesIO(data)


def test_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", _Input(b"step 1 loss 2\n" + KEY_ERROR))
    found = diagnose("-")
    assert (found.reason, found.root_line.file, found.root_line.line) == ("KeyError", "-", 5)


def test_standard_input_beside_a_file(monkeypatch, tmp_path):
    (tmp_path / "rank-1.log").write_bytes(KEY_ERROR)
    monkeypatch.setattr(sys, "stdin", _Input(b"step 1 loss 2\n" * 9))
    assert diagnose(["-", tmp_path]).reason == "KeyError"


def test_standard_input_without_a_word(monkeypatch):
    monkeypatch.setattr(sys, "stdin", _Input(b""))
    assert diagnose("-").reason == "Unknown"


@pytest.mark.parametrize("size", [10, 2 * BLOCK_BYTES])
@pytest.mark.parametrize("name", ["pipe", "./pipe", "sub/../pipe"])
def test_a_named_pipe_is_read_to_its_end(tmp_path, monkeypatch, size, name):
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(b"z\n" * (size // 2) + KEY_ERROR))
    writer.daemon = True
    writer.start()
    found = diagnose(name)
    assert (found.reason, found.root_line.line) == ("KeyError", size // 2 + 4)


def test_what_is_packed_on_a_pipe_or_standard_input_is_unpacked(tmp_path, monkeypatch):
    packed = gzip.compress(b"step 1 loss 2\n" + KEY_ERROR)
    monkeypatch.setattr(sys, "stdin", _Input(packed))
    assert diagnose("-").root_line.line == 5
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    threading.Thread(target=lambda: pipe.write_bytes(packed), daemon=True).start()
    assert diagnose(pipe).root_line.line == 5
