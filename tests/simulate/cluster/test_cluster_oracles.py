"""The replay agrees with queueing theory: M/M/c, the mean wait by Erlang C."""

import math
import statistics

import numpy as np
import pytest
from small_clusters import POLICIES, jobs, replayed

from holdfast.simulate.cluster import Jobs
from holdfast.simulate.cluster.formulas import erlang_c, mean_wait_s

T_99 = 3.25
"""Student's t, 9 degrees of freedom, 99 %, two-sided."""
REPLICATIONS, NUMBER, WARM = 10, 4000, 500


def test_erlang_c_by_hand():
    assert erlang_c(1, 0.7) == pytest.approx(0.7)
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert mean_wait_s(1, 0.5, 10.0) == pytest.approx(10.0)


@pytest.mark.parametrize(("servers", "use"), [(1, 0.4), (4, 0.6), (8, 0.7)])
def test_mean_waits_of_single_gpu_jobs_are_those_of_erlang_c(servers, use):
    run_s = 100.0
    means = []
    for replication in range(REPLICATIONS):
        arrivals, lengths = (
            np.random.Generator(np.random.Philox(key=[replication, stream])) for stream in (0, 1)
        )
        submit_s = np.cumsum(arrivals.exponential(run_s / (servers * use), NUMBER))
        given = Jobs.of(
            {
                "submit_s": submit_s,
                "run_s": lengths.exponential(run_s, NUMBER),
                "gpus": np.ones(NUMBER),
            }
        )
        outcome = replayed(given, POLICIES["first come"], nodes=servers, per=1)
        waits_s = outcome.first_start_s - given.submit_s
        means.append(waits_s[WARM:].mean())
    half = T_99 * statistics.stdev(means) / math.sqrt(REPLICATIONS)
    expected_s = mean_wait_s(servers, servers * use, run_s)
    assert abs(statistics.fmean(means) - expected_s) < half
    assert half < 0.5 * expected_s


def test_predictions_are_of_the_last_two_that_had_ended():
    given = jobs(
        [
            (0.0, 10.0, 1, "Other"),
            (5.0, 30.0, 1, "Other"),
            (20.0, 1.0, 1, "Other"),
            (40.0, 1.0, 1, "Other"),
            (50.0, 1.0, 2, "Other"),
        ],
        predicted=False,
    )
    # By 20 s one had ended; by 40 s three; nobody asked for two GPUs before: a day.
    assert given.predicted_s.tolist() == [86400.0, 86400.0, 10.0, 15.5, 86400.0]
