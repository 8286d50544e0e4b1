"""The choice of the next left-out batches: its docstrings' claims, and its bounds at random."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.left_out import MAX_RANGES
from holdfast.recover.skipping.plan import (
    MAX_DOUBLINGS,
    MAX_IN_VAIN,
    MAX_LENGTH,
    Skip,
    Skipping,
)


def after(*broken, gained=False):
    """Return the plan after losses that broke one after the other."""
    skipping, decided = Skipping(), []
    for batches in broken:
        skip = skipping.next_skip(batches)
        skipping = skipping.after(skip, gained=gained)
        decided.append(skip and (skip.first, skip.last))
    return skipping, decided


def test_what_led_to_a_broken_loss_is_left_out():
    skipping, decided = after((120, 124))
    assert decided == [(120, 124)]
    assert skipping.left_out.ranges == ((120, 124),)


def test_a_range_becomes_twice_as_long_where_the_loss_breaks_again_up_to_a_bound():
    skipping, decided = after((120, 124), (119, 127), (118, 131), (118, 141), (118, 161))
    assert decided == [(120, 124), (119, 129), (114, 135), (103, 146), None]
    assert skipping.left_out.ranges == ((103, 146),), "what was left out stays so"


def test_a_range_reaches_at_least_to_what_broke_the_loss_this_time():
    assert after((120, 124), (128, 132))[1] == [(120, 124), (120, 132)]


def test_another_place_has_a_range_of_its_own():
    skipping, decided = after((120, 124), (300, 304), (119, 127))
    assert decided == [(120, 124), (300, 304), (119, 129)]
    assert skipping.left_out.ranges == ((119, 129), (300, 304))


def test_a_culprit_before_the_range_is_reached_though_it_never_breaks_the_loss_at_once():
    _, decided = after((120, 122), (123, 125), (126, 128), (129, 131))
    assert decided == [(120, 122), (120, 125), (117, 128), (111, 134)]
    assert after((3, 6), (2, 9), (1, 12))[1] == [(3, 6), (2, 10), (1, 15)], "1 is the first batch"


def test_a_longer_range_takes_the_place_of_those_within_it_alone():
    skips = [Skip(first=100, last=110), Skip(first=120, last=124), Skip(first=300, last=301)]
    skipping = Skipping(skips=tuple(skips)).with_skip(Skip(first=108, last=130, doublings=1))
    assert skipping.left_out.ranges == ((100, 130), (300, 301))
    assert len(skipping.skips) == 3


def test_without_batches_nothing_is_left_out():
    assert after(None)[1] == [None]


def test_a_range_is_never_longer_than_the_bound():
    assert after((1, MAX_LENGTH + 1))[1] == [None]
    half = MAX_LENGTH // 2
    assert after((1, half + 1), (1, half + 3))[1] == [(1, half + 1), None]


def test_so_many_times_in_a_row_without_a_gain_and_no_more():
    places = [(1000 * number, 1000 * number + 4) for number in range(1, MAX_IN_VAIN + 3)]
    assert after(*places)[1] == [*places[:MAX_IN_VAIN], None, None]
    assert after(*places, gained=True)[1] == places


def test_there_is_room_for_so_many_ranges():
    places = [(1000 * number, 1000 * number + 4) for number in range(1, MAX_RANGES + 3)]
    assert after(*places, gained=True)[1] == [*places[:MAX_RANGES], None, None]


@pytest.mark.parametrize(
    "data",
    [
        {},
        None,
        {"first": 1, "last": "2", "doublings": 0},
        {"first": 3, "last": 2, "doublings": 0},
        {"first": 0, "last": 2, "doublings": 0},
        {"first": True, "last": 2, "doublings": 0},
    ],
)
def test_a_malformed_record_is_refused(data):
    with pytest.raises((KeyError, TypeError, ValueError)):
        Skip.of_json(data)


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 300), st.booleans()), max_size=40))
def test_what_is_left_out_only_grows_and_stays_within_its_bounds(history):
    skipping = Skipping()
    for first, more, gained in history:
        skip = skipping.next_skip((first, first + more))
        longer = skipping.after(skip, gained=gained)
        before = {n for one in skipping.skips for n in range(one.first, one.last + 1)}
        now = {n for one in longer.skips for n in range(one.first, one.last + 1)}
        assert before <= now
        assert all(one.last - one.first < MAX_LENGTH for one in longer.skips)
        assert all(one.doublings <= MAX_DOUBLINGS for one in longer.skips)
        assert longer.in_vain <= MAX_IN_VAIN
        skipping = longer
