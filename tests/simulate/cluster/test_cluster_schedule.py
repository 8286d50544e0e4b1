"""Schedules that were worked out by hand, and what holds for all of them."""

import numpy as np
import pytest
from small_clusters import NODES, PER, POLICIES, Watched, jobs, random_jobs, replayed, starts

from holdfast.core.errors import BadUse
from holdfast.simulate.cluster import Jobs, Policy, usual_reserve

FIRST_COME = POLICIES["first come"]


def test_jobs_start_in_the_order_of_arrival_and_backfill_does_not_delay_the_first():
    """Two nodes of 4 GPUs: job 1 needs both at 8 s; job 2 ends by then, job 3 does not."""
    given = jobs(
        [
            (0.0, 8.0, 4, "Other"),  # on one node until 8
            (1.0, 4.0, 8, "Other"),  # both nodes: from 8 to 12
            (2.0, 4.0, 4, "Other"),  # until 6 on the free node
            (2.0, 16.0, 4, "Other"),  # would delay job 1: from 12
            (7.0, 1.0, 1, "Other"),  # from 7 to 8
        ]
    )
    outcome = replayed(given, FIRST_COME, nodes=2, per=4)
    assert starts(outcome) == [0.0, 8.0, 2.0, 12.0, 7.0]
    assert outcome.backfilled == 2
    assert outcome.end_s.tolist() == [8.0, 12.0, 6.0, 28.0, 8.0]
    assert outcome.span_s == 28.0
    assert outcome.idle_gpu_s == 8 * 28 - (32 + 32 + 16 + 64 + 1)


def test_a_long_job_is_backfilled_on_a_node_that_the_first_job_does_not_need():
    """Three nodes; job 2 needs two: one is free at once, the other at 8 s."""
    given = jobs(
        [
            (0.0, 8.0, 4, "Other"),
            (0.0, 64.0, 3, "Other"),
            (1.0, 8.0, 8, "Other"),
            (2.0, 64.0, 1, "Other"),
            (2.0, 64.0, 1, "Other"),
        ]
    )
    outcome = replayed(given, FIRST_COME, nodes=3, per=4)
    assert starts(outcome) == [0.0, 0.0, 8.0, 2.0, 16.0]


def test_a_job_of_a_node_and_a_half_takes_a_whole_node_and_the_fullest_that_fits():
    given = jobs([(0.0, 9.0, 1, "Other"), (1.0, 9.0, 6, "Other"), (2.0, 9.0, 1, "Other")])
    seen = []
    run = Watched(
        given, FIRST_COME, nodes=3, per=4, look=lambda one: seen.append(list(one.regular.free))
    )
    run.outcome()
    assert sorted(seen[1]) == [0, 1, 4]
    assert sorted(seen[2]) == [0, 0, 4]


def test_evaluation_makes_room_and_runs_again_from_its_beginning():
    given = jobs(
        [(0.0, 10.0, 1, "Evaluation"), (4.0, 8.0, 8, "Other"), (5.0, 2.0, 1, "Evaluation")]
    )
    outcome = replayed(given, Policy(), nodes=2, per=4)
    assert outcome.first_start_s.tolist() == [0.0, 4.0, 12.0]
    assert starts(outcome) == [12.0, 4.0, 12.0]
    assert outcome.restarts.tolist() == [1, 0, 0]
    assert outcome.lost_by_job_gpu_s.tolist() == [4.0, 0.0, 0.0]


def test_evaluation_is_not_ended_while_idle_gpus_suffice_for_the_others():
    given = jobs([(0.0, 10.0, 4, "Evaluation"), (1.0, 10.0, 4, "Other")])
    outcome = replayed(given, Policy(), nodes=2, per=4)
    assert (starts(outcome), outcome.lost_gpu_s) == ([0.0, 1.0], 0.0)


def test_idle_evaluation_comes_last_and_stays_off_reserved_nodes():
    given = jobs(
        [
            (0.0, 8.0, 4, "Other"),
            (1.0, 8.0, 1, "Evaluation"),
            (2.0, 8.0, 4, "Other"),
            (3.0, 8.0, 4, "Pretrain"),
        ]
    )
    policy = Policy(reserved_nodes={"Pretrain": 1}, mode="idle")
    assert starts(replayed(given, policy, nodes=2, per=4)) == [0.0, 16.0, 8.0, 3.0]


def test_reserved_quota_is_a_floor_and_not_a_ceiling():
    given = jobs([(0.0, 8.0, 4, "Pretrain"), (1.0, 8.0, 4, "Pretrain"), (2.0, 8.0, 4, "Other")])
    policy = Policy(reserved_nodes={"Pretrain": 1})
    assert starts(replayed(given, policy, nodes=2, per=4)) == [0.0, 1.0, 9.0]


def test_a_pool_with_reserved_nodes_may_hold_evaluations_that_have_none():
    given = Jobs.of(
        {
            "submit_s": [0.0, 1.0, 2.0],
            "run_s": [8.0, 8.0, 8.0],
            "gpus": [4, 4, 4],
            "type": ["Other", "Evaluation", "Pretrain"],
            "pool": ["dev", "gpu", "gpu"],
        }
    )
    policy = Policy(reserved_nodes={"gpu": 1}, mode="idle")
    assert starts(replayed(given, policy, nodes=2, per=4)) == [0.0, 8.0, 2.0]


def test_a_job_over_the_limit_of_its_type_waits_and_delays_nobody():
    given = jobs([(0.0, 8.0, 1, "Debug"), (1.0, 8.0, 1, "Debug"), (2.0, 8.0, 2, "Other")])
    policy = Policy(limit_gpus={"Debug": 1})
    assert starts(replayed(given, policy, nodes=1, per=4)) == [0.0, 8.0, 2.0]


def test_a_job_that_runs_longer_than_predicted_is_predicted_anew():
    given = jobs([(0.0, 100.0, 4, "Other"), (1.0, 8.0, 8, "Other"), (2.0, 8.0, 4, "Other")])
    given.predicted_s[0] = 4.0
    run = Watched(given, FIRST_COME, nodes=2, per=4)
    outcome = run.outcome()
    # At 2 s the reservation is for 4 s, too early for the last job; that starts after the end of
    # the first two.
    assert starts(outcome) == [0.0, 100.0, 108.0]
    assert run.reservations[0] == (1, 4.0)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_nodes_hold_what_they_have_and_quota_and_limits_hold(name, seed):
    policy, given = POLICIES[name], random_jobs(seed)
    limited = [
        (given.types.index(one), most)
        for one, most in policy.limit_gpus.items()
        if one in given.types
    ]
    own = given.types.index("Pretrain")
    looks = 0

    def look(run):
        nonlocal looks
        looks += 1
        held = [0] * NODES
        for job, places in run.placed.items():
            assert sum(gpus for _, gpus in places) == given.gpus[job]
            for node, gpus in places:
                held[node] += gpus
                if run.regular.group[node] >= 2:
                    assert given.type[job] == own or run.yields[job]
        assert all(0 <= one <= PER for one in held)
        assert run.actual.free == [PER - one for one in held]
        assert run.free == sum(run.actual.free)
        running = np.array(list(run.placed), dtype=int)
        for number, most in limited:
            assert given.gpus[running[given.type[running] == number]].sum() <= most

    run = Watched(given, policy, nodes=NODES, per=PER, look=look)
    outcome = run.outcome()
    assert looks > 100
    assert (outcome.first_start_s >= given.submit_s).all()
    assert outcome.end_s == pytest.approx(outcome.start_s + given.run_s)
    # Best-effort jobs make room in some of these, so that the branch is in the test.
    if policy.mode == "preemptible" and policy.best_effort:
        assert outcome.restarts.sum() > 0


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_backfill_never_delays_the_reservation_of_a_first_job(name, seed):
    """If no job exceeds its prediction, a first job starts at its reserved moment or before."""
    run = Watched(random_jobs(seed), POLICIES[name], nodes=NODES, per=PER)
    outcome = run.outcome()
    assert len(run.reservations) > 20
    assert outcome.backfilled > 5
    late = [job for job, at_s in run.reservations if outcome.start_s[job] > at_s]
    # Evaluation that comes last may lose its reservation to any other job.
    assert all(run.rank[job] for job in late)


@pytest.mark.parametrize("mode", ["preemptible", "idle"])
def test_the_same_jobs_give_the_same_schedule(mode):
    policy = Policy(reserved_nodes={"Pretrain": 2}, mode=mode)
    one, other = (replayed(random_jobs(7), policy, nodes=NODES, per=PER) for _ in range(2))
    assert one.start_s.tobytes() == other.start_s.tobytes()
    assert one.busy_gpus.tobytes() == other.busy_gpus.tobytes()


def test_gpu_time_that_is_not_conserved_is_an_error(monkeypatch):
    run = Watched(random_jobs(1), Policy(), nodes=NODES, per=PER)
    look = run._look

    def lose():
        run.idle_gpu_s += 0.01
        look()

    monkeypatch.setattr(run, "_look", lose)
    with pytest.raises(RuntimeError, match="GPU time of all nodes"):
        run.outcome()


def test_hours_tell_how_scattered_the_free_gpus_are():
    given = jobs([(0.0, 9000.0, 1, "Other"), (0.0, 9000.0, 8, "Other"), (7200.0, 1.0, 1, "Other")])
    outcome = replayed(given, FIRST_COME, nodes=5, per=4)
    assert outcome.busy_gpus.tolist() == [0.0, 9.0, 9.0]
    assert outcome.partly_used_nodes.tolist() == [0.0, 1.0, 1.0]
    assert outcome.free_on_partly_used.tolist() == [0.0, 3.0, 3.0]
    assert outcome.largest_fit.tolist() == [20.0, 8.0, 8.0]
    assert outcome.utilisation == pytest.approx(9 / 20)


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ({"reserved_nodes": {"Nobody": 1}}, "no type or pool 'Nobody'"),
        ({"reserved_nodes": {"Evaluation": 1}}, "best effort and can have no reserved nodes"),
        ({"reserved_nodes": {"Pretrain": 9}}, "9 nodes are reserved of 4"),
        ({"limit_gpus": {"Pretrain": 1}}, "wants .* GPUs, but may use 1"),
        ({"limit_gpus": {"Pretrain": 0}}, "Give 1 or more"),
        ({"mode": "now"}, "Allowed: preemptible, idle"),
    ],
)
def test_a_policy_that_cannot_be_says_why(policy, says):
    with pytest.raises(BadUse, match=says):
        replayed(random_jobs(0), Policy(**policy), nodes=NODES, per=PER)


def test_the_usual_reserve_is_the_peak_and_leaves_room_for_the_largest_other_job():
    given = jobs([(0.0, 10.0, 8, "Pretrain"), (5.0, 10.0, 8, "Pretrain"), (6.0, 1.0, 6, "Other")])
    assert usual_reserve(given, "Pretrain", nodes=10, gpus_per_node=4) == 4
    assert usual_reserve(given, "Pretrain", nodes=5, gpus_per_node=4) == 3
    assert usual_reserve(given, "Pretrain", nodes=3, gpus_per_node=4) == 0
    assert usual_reserve(given, "SFT", nodes=10, gpus_per_node=4) == 0
