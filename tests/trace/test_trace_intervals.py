"""Compare intervals and tests of counts with published tables and brute force."""

import math

import numpy as np
import pytest

from holdfast.trace.intervals import (
    false_discovery_rates,
    poisson_at_least,
    poisson_interval,
    wilson_interval,
)

# Exact 95% limits of a Poisson count: Garwood (1936), as in Ulm (1990), Am. J. Epidemiol. 131(2), Table 1.
GARWOOD_95 = {
    0: (0.0, 3.6889),
    1: (0.0253, 5.5716),
    2: (0.2422, 7.2247),
    5: (1.6235, 11.6683),
    10: (4.7954, 18.3904),
}


@pytest.mark.parametrize("events", GARWOOD_95)
def test_poisson_interval_is_that_of_the_tables(events):
    low, high = poisson_interval(events)
    assert (float(low), float(high)) == pytest.approx(GARWOOD_95[events], abs=5e-5)


def test_poisson_interval_leaves_half_of_the_doubt_on_each_side():
    low, high = poisson_interval([4], confidence=0.9)

    def at_most(k, mean):
        return sum(math.exp(-mean) * mean**i / math.factorial(i) for i in range(k + 1))

    assert 1 - at_most(3, float(low[0])) == pytest.approx(0.05)
    assert at_most(4, float(high[0])) == pytest.approx(0.05)


def test_upper_tail_is_the_sum_of_its_terms():
    brute = 1 - sum(math.exp(-1.5) * 1.5**i / math.factorial(i) for i in range(4))
    assert poisson_at_least([4, 0], 1.5) == pytest.approx([brute, 1.0])


def test_wilson_interval_is_newcombes_example():
    # Newcombe (1998), Statistics in Medicine 17, Table I: 81 of 263, method 3 (Wilson): 0.2553 to 0.3662.
    low, high = wilson_interval(81, 263)
    assert (float(low), float(high)) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    low, high = wilson_interval([0, 0], [20, 0])  # the same table: 0 of 20: 0 to 0.1611
    assert (low[0], high[0]) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert math.isnan(low[1])


def test_false_discovery_rates_are_those_of_benjamini_and_hochberg():
    # Their 1995 example of 15 p-values: 4 are rejected at 0.05.
    p = [
        0.0001,
        0.0004,
        0.0019,
        0.0095,
        0.0201,
        0.0278,
        0.0298,
        0.0344,
        0.0459,
        0.3240,
        0.4262,
        0.5719,
        0.6528,
        0.7590,
        1,
    ]
    q = false_discovery_rates(p)
    assert (q <= 0.05).sum() == 4
    shuffled = np.random.default_rng(0).permutation(len(p))
    assert false_discovery_rates(np.array(p)[shuffled]) == pytest.approx(q[shuffled])
    # Adjusted: the least over all larger ranks of p x m / rank.
    brute = [min(p[j] * len(p) / (j + 1) for j in range(i, len(p))) for i in range(len(p))]
    assert q == pytest.approx(brute)
