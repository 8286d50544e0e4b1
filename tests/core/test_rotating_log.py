"""Test the bounded log: its kept bytes, cuts and counts, and reading during writing."""

import random
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.rotating_log import PARTS, LogTail, RotatingLog, part_path, parts_oldest_first


def contents(path):
    return b"".join(part.read_bytes() for part in parts_oldest_first(path))


def test_keeps_everything_that_fits(tmp_path):
    log = RotatingLog(tmp_path / "log", max_bytes=4000)
    for number in range(30):
        log.write(b"line %d\n" % number)
    log.close()
    assert contents(tmp_path / "log") == b"".join(b"line %d\n" % number for number in range(30))
    assert log.dropped_bytes == 0


def test_cuts_at_line_ends_and_keeps_the_newest(tmp_path):
    log = RotatingLog(tmp_path / "log", max_bytes=400)
    lines = [b"line %03d\n" % number for number in range(500)]
    for line in lines:
        log.write(line)
    log.close()
    kept = contents(tmp_path / "log")
    assert kept.startswith(b"line ")
    assert kept == b"".join(lines)[-len(kept) :]
    assert 300 <= len(kept) <= 400
    assert log.written_bytes == log.dropped_bytes + len(kept)


def test_a_new_writer_appends(tmp_path):
    for word in (b"one\n", b"two\n"):
        log = RotatingLog(tmp_path / "log", max_bytes=400)
        log.write(word)
        log.close()
    assert contents(tmp_path / "log") == b"one\ntwo\n"


@given(st.lists(st.binary(max_size=300), max_size=40), st.integers(PARTS, 200))
def test_bounded_and_in_order_whatever_is_written(tmp_path_factory, chunks, max_bytes):
    path = tmp_path_factory.mktemp("log") / "log"
    log = RotatingLog(path, max_bytes=max_bytes)
    for chunk in chunks:
        log.write(chunk)
    log.close()
    everything, kept = b"".join(chunks), contents(path)
    assert everything.endswith(kept)
    assert len(kept) + log.dropped_bytes == len(everything)
    assert len(kept) <= 2 * max_bytes, (
        "a part may grow to twice its share for the sake of a whole line"
    )


def newest_part_of(tail):
    """Return the bytes that were not read yet, and the number of the last part read."""
    pieces = list(tail.read())
    return b"".join(data for data, _ in pieces), pieces[-1][1] if pieces else None


@pytest.mark.parametrize("seed", range(5))
def test_a_tail_reads_every_line_once_and_in_order_over_rotations(tmp_path, seed):
    source = random.Random(seed)
    log = RotatingLog(tmp_path / "rank-0.log", max_bytes=4000)
    written, found, by_part = 0, [], {}
    with closing(LogTail(tmp_path / "rank-0.log")) as tail:
        for _ in range(200):
            for _ in range(source.randrange(20)):  # less than the log keeps between two reads
                log.write(b"line %06d\n" % written)
                written += 1
            for data, part in tail.read():
                found.append(data)
                by_part[part] = by_part.get(part, b"") + data
    log.close()
    assert log.dropped_bytes > 0
    assert b"".join(found) == b"".join(b"line %06d\n" % number for number in range(written))
    newest = max(by_part)
    assert sorted(by_part) == list(range(newest + 1))
    for older in range(PARTS):
        assert by_part[newest - older] == part_path(tmp_path / "rank-0.log", older).read_bytes()


def test_a_tail_reads_the_bytes_that_were_written_just_before_a_rotation(tmp_path, monkeypatch):
    """The part is filled after the tail has read all of it, and before the tail looks for more."""
    log = RotatingLog(tmp_path / "rank-0.log", max_bytes=400)
    lines = [b"line %06d\n" % number for number in range(20)]
    with closing(LogTail(tmp_path / "rank-0.log")) as tail:
        log.write(lines[0])
        assert list(tail.read()) == [(lines[0], 0)]
        look, later = tail._following, lines[1:]

        def look_after_a_rotation():
            while later:
                log.write(later.pop(0))
            return look()

        monkeypatch.setattr(tail, "_following", look_after_a_rotation)
        read = list(tail.read())
    log.close()
    assert b"".join(data for data, _ in read) == b"".join(lines[1:])
    assert log.dropped_bytes == 0
    assert read[-1][1] > 0, "a rotation was between"


def test_a_log_that_outran_its_reader_is_read_from_the_oldest_part_on(tmp_path):
    log = RotatingLog(tmp_path / "rank-0.log", max_bytes=400)
    with closing(LogTail(tmp_path / "rank-0.log")) as tail:
        log.write(b"first\n")
        assert newest_part_of(tail) == (b"first\n", 0)
        for number in range(500):
            log.write(b"line %03d\n" % number)
        read, newest = newest_part_of(tail)
    log.close()
    assert read.startswith(b"line ")
    assert read.endswith(b"line 499\n")
    assert newest == PARTS + PARTS - 1, (
        "what was read first is told apart from every part that is still there"
    )


def test_a_tail_of_no_log_reads_nothing_until_there_is_one(tmp_path):
    with closing(LogTail(tmp_path / "rank-0.log")) as tail:
        assert list(tail.read()) == []
        (tmp_path / "rank-0.log").write_bytes(b"here\n")
        assert list(tail.read()) == [(b"here\n", 0)]
        assert list(tail.read()) == []
