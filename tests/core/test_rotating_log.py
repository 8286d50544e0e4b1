"""The bounded log: what it keeps, where it cuts, what it counts."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.rotating_log import PARTS, RotatingLog, parts_oldest_first


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
    assert len(kept) <= 2 * max_bytes, "a part may grow to twice its share for the sake of a whole line"
