"""Compare distributions from value counts with NumPy on the data, for any division of the data."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.trace.distribution import Distribution

DATA = st.lists(
    st.integers(-50, 50) | st.floats(-1e6, 1e6, allow_nan=False), min_size=1, max_size=60
)
SHARES = st.lists(st.floats(0, 1), min_size=1, max_size=8)


def of_data(data):
    return Distribution.of(data, np.ones(len(data)))


@given(DATA, SHARES)
def test_quantiles_are_numpys(data, shares):
    found = of_data(data).quantile(shares)
    assert found == pytest.approx(
        np.quantile(np.array(data, dtype=float), shares), rel=1e-9, abs=1e-6
    )


@given(DATA, st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8))
def test_the_share_at_most_a_value_is_counted(data, values):
    expected = [sum(datum <= value for datum in data) / len(data) for value in values]
    assert of_data(data).at_most(values).tolist() == pytest.approx(expected, abs=1e-12)


@given(DATA, st.data())
def test_any_cut_merges_to_the_whole(data, draw):
    part = draw.draw(st.lists(st.integers(0, 3), min_size=len(data), max_size=len(data)))
    cut = [
        of_data([datum for datum, of in zip(data, part, strict=True) if of == number])
        for number in range(4)
    ]
    merged = Distribution.of(
        np.concatenate([each.values for each in cut]),
        np.concatenate([each.weights for each in cut]),
    )
    whole = of_data(data)
    assert merged.values.tolist() == whole.values.tolist()
    assert merged.weights.tolist() == whole.weights.tolist()


@given(DATA, st.data())
def test_a_weight_is_that_many_data(data, draw):
    weights = draw.draw(st.lists(st.integers(0, 4), min_size=len(data), max_size=len(data)))
    weighted, repeated = (
        Distribution.of(data, weights),
        of_data(np.repeat(np.array(data, dtype=float), weights)),
    )
    assert weighted.values.tolist() == repeated.values.tolist()
    assert weighted.weights.tolist() == repeated.weights.tolist()


@given(DATA, st.floats(0.01, 1))
def test_what_a_share_reaches_is_the_inverted_cdf(data, share):
    assert of_data(data).reached(share) in data
    expected = np.quantile(np.array(data, dtype=float), share, method="inverted_cdf")
    # If n times the share is a whole number up to rounding, either neighbour is right.
    if abs(share * len(data) - round(share * len(data))) > 1e-9:
        assert of_data(data).reached(share) == expected


@given(DATA, st.integers(4, 40), st.booleans())
def test_every_vertex_of_a_curve_lies_on_the_cdf_and_its_ends_are_kept(data, points, log):
    distribution = of_data(data)
    x, share = distribution.curve(points, log=log)
    assert distribution.at_most(x).tolist() == pytest.approx(share.tolist(), abs=1e-12)
    assert x[0] == min(data)
    assert (x[-1], share[-1]) == (max(data), pytest.approx(1.0))
    assert len(x) <= max(points, 2)
    assert (np.diff(x) > 0).all()


@given(DATA)
def test_mean_and_total(data):
    assert of_data(data).total == len(data)
    assert of_data(data).mean == pytest.approx(
        np.mean(np.array(data, dtype=float)), rel=1e-9, abs=1e-6
    )


@given(DATA)
def test_boxes_are_matplotlibs(data):
    from matplotlib.cbook import boxplot_stats

    expected = boxplot_stats(np.array(data, dtype=float), whis=1.5)[0]
    five = [expected[name] for name in ("whislo", "q1", "med", "q3", "whishi")]
    assert of_data(data).box() == pytest.approx(five, rel=1e-9, abs=1e-6)


def test_a_share_that_a_value_reaches_exactly_is_reached_there():
    assert [of_data([1, 2, 3, 4]).reached(share) for share in (0.25, 0.5, 1.0)] == [1, 2, 4]


def test_a_missing_value_and_a_missing_weight_count_for_nothing():
    distribution = Distribution.of([1.0, np.nan, 3.0, 4.0], [2.0, 5.0, np.nan, 0.0])
    assert (distribution.values.tolist(), distribution.weights.tolist()) == ([1.0], [2.0])


def test_nothing_has_no_quantile_and_no_mean():
    nothing = Distribution.of([], [])
    assert nothing.total == 0
    assert np.isnan([nothing.mean, nothing.median, nothing.reached(0.5), *nothing.box()]).all()
    assert nothing.at_most([1.0]).tolist() == [0.0]
