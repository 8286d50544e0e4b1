"""Following a log over its rotations."""

import random
from contextlib import closing

import pytest

from holdfast.cli.logs import Tail
from holdfast.core.rotating_log import RotatingLog


@pytest.mark.parametrize("seed", range(5))
def test_every_line_is_shown_once_and_in_order_over_rotations(tmp_path, capfdbinary, seed):
    source = random.Random(seed)
    log = RotatingLog(tmp_path / "rank-0.log", max_bytes=4000)
    written = 0
    with closing(Tail(tmp_path / "rank-0.log")) as tail:
        for _ in range(200):
            for _ in range(source.randrange(20)):  # less than is kept between two looks
                log.write(b"line %06d\n" % written)
                written += 1
            tail.show()
    log.close()
    assert log.dropped_bytes > 0
    assert capfdbinary.readouterr().out == b"".join(b"line %06d\n" % number for number in range(written))


def test_a_log_that_outran_the_reader_is_shown_from_the_oldest_part_on(tmp_path, capfdbinary):
    log = RotatingLog(tmp_path / "rank-0.log", max_bytes=400)
    with closing(Tail(tmp_path / "rank-0.log")) as tail:
        log.write(b"first\n")
        tail.show()
        for number in range(500):
            log.write(b"line %03d\n" % number)
        tail.show()
    log.close()
    shown = capfdbinary.readouterr().out
    assert shown.startswith(b"first\nline ")
    assert shown.endswith(b"line 499\n")
