"""Where jobs queue, the replay agrees with known results: Lindley's recursion, Cobham's formula."""

import csv
import heapq
import math
import statistics
from pathlib import Path

import numpy as np
import pytest
from small_clusters import POLICIES, replayed

from holdfast.simulate.cluster import Jobs, Policy
from holdfast.simulate.cluster.formulas import mean_wait_s, priority_wait_s

KALOS = Path(__file__).parents[4] / "shared/data/acme_kalos_converted"
REAL = KALOS / "kalos_completed_pretrain_other_sft.csv"
T_99 = 3.25
"""Student's t, 9 degrees of freedom, 99 %, two-sided."""
REPLICATIONS, NUMBER, WARM, RUN_S = 10, 4000, 500, 100.0


def single_gpu_jobs(submit_s, run_s, types=None):
    columns = {"submit_s": submit_s, "run_s": run_s, "gpus": np.ones(len(submit_s))}
    return Jobs.of(columns | ({} if types is None else {"type": types}))


def waits_by_recursion(submit_s, run_s, servers):
    """Return each job's wait in the order of arrival (Lindley 1952; Kiefer and Wolfowitz 1955)."""
    free_s = [0.0] * servers
    waits = []
    for at_s, length_s in zip(submit_s, run_s, strict=True):
        start_s = max(at_s, free_s[0])
        heapq.heapreplace(free_s, start_s + length_s)
        waits.append(start_s - at_s)
    return waits


@pytest.mark.parametrize(("servers", "use"), [(1, 1.5), (4, 0.95), (8, 2.0)])
def test_each_wait_of_a_full_cluster_is_that_of_the_recursion(servers, use):
    rng = np.random.Generator(np.random.Philox(key=[7, servers]))
    submit_s = np.cumsum(rng.exponential(RUN_S / (servers * use), 1000))
    given = single_gpu_jobs(submit_s, rng.exponential(RUN_S, 1000))
    outcome = replayed(given, POLICIES["first come"], nodes=servers, per=1)
    expected = waits_by_recursion(given.submit_s, given.run_s, servers)
    assert max(expected) > RUN_S
    assert (outcome.first_start_s - given.submit_s).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("servers", [1, 2])
def test_each_wait_of_real_jobs_on_too_few_gpus_is_that_of_the_recursion(servers):
    if not REAL.exists():
        pytest.skip("needs ../shared/data/acme_kalos_converted")
    with REAL.open() as file:
        rows = sorted(
            (float(row["arrival_s"]), float(row["duration_s"])) for row in csv.DictReader(file)
        )
    given = single_gpu_jobs(*zip(*rows, strict=True))
    outcome = replayed(given, POLICIES["first come"], nodes=servers, per=1)
    expected = waits_by_recursion(given.submit_s, given.run_s, servers)
    assert sum(wait > 0 for wait in expected) > 25
    assert (outcome.first_start_s - given.submit_s).tolist() == pytest.approx(expected, abs=1e-3)


def test_cobhams_formula_by_hand():
    # M/M/1, u = 0.25 + 0.25: W = 0.5 s; 0.5 / (1 x 0.75) and 0.5 / (0.75 x 0.5).
    assert priority_wait_s(1, [0.25, 0.25], 1.0) == pytest.approx([2 / 3, 4 / 3])
    assert priority_wait_s(4, [3.0], 10.0) == pytest.approx([mean_wait_s(4, 3.0, 10.0)])


def means_of(policy, servers, use):
    """Return the mean wait of other jobs and of evaluations, in each replication."""
    found = []
    for replication in range(REPLICATIONS):
        arrivals, lengths, kinds = (
            np.random.Generator(np.random.Philox(key=[replication, stream])) for stream in range(3)
        )
        types = kinds.choice(["Other", "Evaluation"], NUMBER)
        submit_s = np.cumsum(arrivals.exponential(RUN_S / (servers * use), NUMBER))
        given = single_gpu_jobs(submit_s, lengths.exponential(RUN_S, NUMBER), types)
        waits_s = replayed(given, policy, nodes=servers, per=1).first_start_s - given.submit_s
        found.append(
            [waits_s[WARM:][types[WARM:] == one].mean() for one in ("Other", "Evaluation")]
        )
    return zip(*found, strict=True)


def assert_within_99_percent(means, expected_s):
    half = T_99 * statistics.stdev(means) / math.sqrt(REPLICATIONS)
    assert abs(statistics.fmean(means) - expected_s) < half
    assert half < 0.5 * expected_s


@pytest.mark.parametrize(("servers", "use"), [(1, 0.5), (4, 0.65), (8, 0.75)])
def test_evaluation_that_comes_last_waits_as_cobhams_formula_says(servers, use):
    others, evaluations = means_of(Policy(mode="idle"), servers, use)
    expected = priority_wait_s(servers, [servers * use / 2] * 2, RUN_S)
    assert expected[1] > 1.9 * expected[0]
    assert_within_99_percent(others, expected[0])
    assert_within_99_percent(evaluations, expected[1])


@pytest.mark.parametrize(("servers", "use"), [(1, 0.8), (2, 1.5), (4, 2.5)])
def test_evaluation_that_makes_room_delays_no_other_job(servers, use):
    """Each other job waits as the recursion says for a cluster without evaluation."""
    rng = np.random.Generator(np.random.Philox(key=[9, servers]))
    submit_s = np.cumsum(rng.exponential(RUN_S / (servers * use), 1000))
    run_s, types = rng.exponential(RUN_S, 1000), rng.choice(["Other", "Evaluation"], 1000)
    given = single_gpu_jobs(submit_s, run_s, types)
    outcome = replayed(given, Policy(mode="preemptible"), nodes=servers, per=1)
    others = types == "Other"
    expected = waits_by_recursion(submit_s[others], run_s[others], servers)
    assert max(expected) > 0
    waits_s = (outcome.first_start_s - given.submit_s)[others]
    assert waits_s.tolist() == pytest.approx(expected, abs=1e-6)
