"""Test the planner alone, without a GPU."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.snapshot.gpu.copy import first_staged, in_time_bytes

sizes = st.lists(st.integers(1, 1000), max_size=30)


def test_what_reaches_the_host_in_time_is_not_staged():
    assert first_staged([10, 10, 10], in_time_bytes=30, room_bytes=1000) == 3


def test_what_is_behind_the_time_is_staged():
    assert first_staged([10, 10, 10], in_time_bytes=29, room_bytes=1000) == 2
    assert first_staged([10, 10, 10], in_time_bytes=0, room_bytes=1000) == 0


def test_what_has_no_room_is_waited_for():
    assert first_staged([10, 10, 10], in_time_bytes=0, room_bytes=20) == 1
    assert first_staged([10, 10, 10], in_time_bytes=0, room_bytes=0) == 3


@given(sizes=sizes, in_time=st.integers(-100, 20_000), room=st.integers(-100, 20_000))
def test_it_stages_no_more_than_there_is_room_for_and_nothing_for_nothing(sizes, in_time, room):
    first = first_staged(sizes, in_time_bytes=in_time, room_bytes=room)
    assert 0 <= first <= len(sizes)
    assert sum(sizes[first:]) <= max(room, 0)
    if first < len(sizes):
        assert sum(sizes[: first + 1]) > in_time, "it would have been in time"
    if sum(sizes[:first]) > max(in_time, 0):
        assert sum(sizes[first - 1 :]) > room, "there was room for one more"


def test_nothing_is_in_time_where_nothing_is_known():
    assert in_time_bytes(None, 1e9) == 0
    assert in_time_bytes(1.0, None) == 0
    assert 0 < in_time_bytes(2.0, 1e9) < 2e9, "less than all of it is counted on"
