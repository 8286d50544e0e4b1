"""Test that all forms of time stamps are read, and other text has no time."""

import datetime

import pytest

from holdfast.diagnose.logs.times import BlockTimes, parse_time, time_of_line, waited_s

UTC = datetime.UTC
BEFORE_S = datetime.datetime(2024, 6, 1, 3, 0, 0, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("text", "iso"),
    [
        ("2026-11-21T01:30:19.123Z", "2026-11-21T01:30:19.123"),
        ("2026-11-21 01:30:19,123", "2026-11-21T01:30:19.123"),
        ("2026/11/21 01:30:19+02:00", "2026-11-20T23:30:19"),
        ("2026-11-21T01:30:19.123456789-0330", "2026-11-21T05:00:19.123456"),
        ("2024-05-07_16:21:13", "2024-05-07T16:21:13"),
        ("06/01/2024 03:11:47", "2024-06-01T03:11:47"),
        ("06/01/24 03:11:47", "2024-06-01T03:11:47"),
        ("06/01 03:11:47", "2024-06-01T03:11:47"),
        ("Jun  1 03:11:47", "2024-06-01T03:11:47"),
        ("Sat Jun  1 03:11:47 2024", "2024-06-01T03:11:47"),
        ("0601 03:11:47.640000", "2024-06-01T03:11:47.64"),
        ("601 03:11:47.640000123", "2024-06-01T03:11:47.64"),
        ("03:11:47", "2024-06-01T03:11:47"),
        ("1700000000.25", "2023-11-14T22:13:20.25"),
    ],
)
def test_a_time_is_read(text, iso):
    stamp = parse_time(text, BEFORE_S)
    expected = datetime.datetime.fromisoformat(iso).replace(tzinfo=UTC).timestamp()
    assert stamp is not None
    assert stamp.seconds == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    "text",
    ["", "x", "1843.308", "2024-13-45T01:02:03", "99:99", "2024-02-30 01:02:03", "Foo  1 03:11:47"],
)
def test_what_is_no_wall_clock_time_is_none(text):
    assert parse_time(text, BEFORE_S) is None


def test_a_year_and_a_day_go_on_over_their_end():
    new_year_s = datetime.datetime(2025, 1, 1, tzinfo=UTC).timestamp()
    assert parse_time("Jan  1 00:00:05", new_year_s - 60).seconds == new_year_s + 5
    assert parse_time("Dec 31 23:59:55", new_year_s + 60).seconds == new_year_s - 5
    assert parse_time("00:00:05", new_year_s - 60).seconds == new_year_s + 5


def test_a_line_states_its_time_in_its_prefix_or_as_cpp_libraries_do():
    assert time_of_line("03:11:47", "x", BEFORE_S) == parse_time("03:11:47", BEFORE_S)
    stated = time_of_line(None, "[E601 03:11:47.5 ProcessGroupNCCL.cpp:456] x", BEFORE_S)
    assert stated is not None
    assert stated.form == "short"
    assert time_of_line(None, "[E ProcessGroupNCCL.cpp:456] x") is None


def test_the_last_time_before_a_place():
    block = b"2024-06-01 03:11:47 a\n  5%| | 1/20 [00:10:02<03:00:00]\nb\n[rank1]:[W601 03:12:00.5 x.cpp:1] c\nd\n"
    times = BlockTimes(block)
    assert times.last(block.index(b"b\n"), BEFORE_S) == parse_time("2024-06-01 03:11:47")
    assert times.last(len(block), BEFORE_S) == parse_time("601 03:12:00.5", BEFORE_S)
    assert BlockTimes(b"no time\n").last(8) is None
    assert BlockTimes(b"").last(0) is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (
            "WorkNCCL(SeqNum=1, Timeout(ms)=1800000) ran for 1800035 milliseconds before timing out",
            1800,
        ),
        ("Timed out after 30 minutes", 1800),
        ("wait timeout after 600s", 600),
        ("socket timeout: 120 s", 120),
        ("Connection closed by peer", None),
    ],
)
def test_how_long_it_waited(text, seconds):
    assert waited_s(text) == seconds


def test_the_last_time_does_not_depend_on_the_places_that_were_asked_before():
    lines = [
        b"2024-06-01 03:11:%02d says\n" % at if at % 7 == 0 else b"x" * at + b"\n"
        for at in range(60)
    ]
    block = b"".join(lines * 5)
    places = [at + 1 for at in range(len(block)) if block[at : at + 1] in (b"\n", b"y")]
    in_order, back = BlockTimes(block), BlockTimes(block)
    found = [in_order.last(place) for place in places]
    assert found == [BlockTimes(block).last(place) for place in places]
    assert found == [back.last(place) for place in reversed(places)][::-1]
    assert len({one.seconds for one in found}) == 9
