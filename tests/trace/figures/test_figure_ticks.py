import math
from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.trace.charts import Axis
from holdfast.trace.figures import ticks
from holdfast.trace.figures.ticks import plan_axis


def planned(data, *, length_pt=260, gap_pt=38, **axis):
    axis.setdefault("label", "value")
    return plan_axis(
        Axis(**axis), np.asarray(data, dtype=float), length_pt=length_pt, gap_pt=gap_pt
    )


def labels(plan):
    return [text for _, text in plan.ticks]


def test_durations_on_a_logarithmic_axis_have_the_units_people_say():
    plan = planned([0.9, 40 * 86400], label="GPU job duration (s)", scale="log")
    assert labels(plan) == ["1 s", "1 min", "1 h", "1 d"]
    assert [at for at, _ in plan.ticks] == [1, 60, 3600, 86400]
    assert plan.label == "GPU job duration"  # the ticks carry the unit


def test_a_linear_axis_of_hours_is_cut_at_hours_and_of_seconds_stays_in_seconds():
    assert labels(planned([0, 43200], label="wait (s)")) == ["0", "3 h", "6 h", "9 h", "12 h"]
    short = planned([0, 90], label="wait (s)")
    assert (labels(short)[-1], short.label) == ("80", "wait (s)")


def test_a_unit_that_is_not_seconds_stays_with_its_numbers():
    plan = planned([1, 1e5], label="GPU time (h)", scale="log")
    assert labels(plan) == ["1", "10", "100", "1,000", "10k", "100k"]
    assert plan.label == "GPU time (h)"


def test_powers_of_two_are_thinned_evenly():
    assert labels(planned(2.0 ** np.arange(12), scale="log2")) == [
        "1",
        "4",
        "16",
        "64",
        "256",
        "1,024",
    ]


def test_symlog_has_its_zero():
    plan = planned([0, 1, 86400], label="queue (s)", scale="symlog")
    assert labels(plan)[0] == "0"
    assert plan.low == 0


def test_time_is_utc_and_says_the_year_once_a_year():
    at = [
        datetime(2022, 11, 15, tzinfo=UTC).timestamp(),
        datetime(2023, 4, 2, tzinfo=UTC).timestamp(),
    ]
    plan = planned(at, scale="time")
    assert labels(plan) == ["Dec\n2022", "Jan\n2023", "Feb", "Mar", "Apr"]
    assert plan.ticks[1][0] == datetime(2023, 1, 1, tzinfo=UTC).timestamp()
    assert (plan.low, plan.high) == tuple(at)


def test_days_and_hours_of_a_short_time():
    start = datetime(2023, 5, 17, 22, tzinfo=UTC).timestamp()
    assert labels(planned([start, start + 6 * 3600], scale="time")) == [
        "17 May\n22:00", "23:00", "18 May", "01:00", "02:00", "03:00", "04:00",
    ]  # fmt: skip
    assert labels(planned([start, start + 6 * 86400], scale="time"))[0] == "18 May\n2023"


def test_what_the_axis_says_wins_unless_a_logarithm_cannot_have_it():
    assert planned([5, 6], low=0, high=1).low == 0
    assert planned([5, 6], low=0, high=1).high == 1
    logarithmic = planned([5, 600], scale="log", low=0)
    assert 0 < logarithmic.low < 5


def test_categories_stand_at_whole_numbers_and_are_made_visible():
    plan = planned([], scale="category", ticks=["a\u202eb", "x" * 100])
    assert plan.ticks[0] == (0.0, "a\\u202eb")
    assert len(plan.ticks[1][1]) == 34
    assert (plan.low, plan.high) == (-0.5, 1.5)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True, width=64), max_size=6),
    st.sampled_from(["linear", "log", "log2", "symlog"]),
    st.sampled_from(["value", "duration (s)"]),
)
def test_any_data_give_an_axis_with_ticks_in_order_and_inside(data, scale, label):
    data = [value for value in data if not math.isfinite(value) or abs(value) < 1e290]
    plan = planned(data, scale=scale, label=label)
    places = [at for at, _ in plan.ticks]
    assert plan.low < plan.high
    assert places == sorted(set(places))
    assert all(-1e-6 <= plan.place(at) <= 1 + 1e-6 for at in places)
    # One tick more than there is room for does not touch another: the room is counted in gaps.
    assert len(places) <= 260 / 38 + 2


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0"),
        (0.25, "250 ms"),
        (1, "1 s"),
        (59.99, "1 min"),
        (90, "1.5 min"),
        (3600, "1 h"),
        (86400 * 2.5, "2.5 d"),
    ],
)
def test_a_duration_in_words(seconds, said):
    assert ticks.duration(seconds) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "0"), (0.05, "0.05"), (7, "7"), (1234, "1,234"), (12_345, "12.3k"), (3_360_000, "3.36M"), (1e9, "1G"),
        (-2500, "\N{MINUS SIGN}2,500"), (1e15, "10¹⁵"), (2.5e-7, "2.5·10⁻⁷"), (float("nan"), "\N{EN DASH}"),
    ],
)  # fmt: skip
def test_a_number_in_words(value, said):
    assert ticks.number(value) == said
