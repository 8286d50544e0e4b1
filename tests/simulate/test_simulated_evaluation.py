"""The simulator loses nothing, repeats itself, and stays above the bound."""

import itertools

import pytest

from evaluation.peer_policies import PEERS, simulate_peer
from evaluation.policy_load import policy_load
from evaluation.suites import paper_like, random_suite
from holdfast.evaluate.policy.account import CATEGORIES, account
from holdfast.evaluate.types.engine import Curve
from holdfast.simulate.engine_model import NEVER_S, VirtualEngine
from holdfast.simulate.evaluate import simulate
from holdfast.simulate.workload import SimCluster, SimModel, SimTask, Workload

CURVE = Curve(
    prefill_tokens_per_s=1000.0, request_s=0.0, step_base_s=1.0, step_sequence_s=0.5, max_batch=2
)


def small(models=1):
    generated = SimTask(
        name="generated", prompt_tokens=[100] * 40, new_tokens=[*range(1, 41)], max_new_tokens=64,
        metric_s=[0.5] * 20 + [0.0] * 20,
    )  # fmt: skip
    choice = SimTask(
        name="choice",
        prompt_tokens=[50] * 60,
        new_tokens=[0] * 60,
        max_new_tokens=0,
        metric_s=[0.0] * 60,
        choices=4,
    )
    return Workload(
        tasks=(generated, choice),
        models=tuple(SimModel(release_s=5.0 * one, size_bytes=1e9) for one in range(models)),
    )


CLUSTER = SimCluster(nodes=2, engines_per_node=2, metric_slots=2, engine_start_s=2.0)


def test_a_virtual_engine_by_hand():
    engine = VirtualEngine(CURVE)
    engine.submit(0.0, [(0, 1000, 2), (1, 1000, 1), (2, 1000, 0)])
    happened = []
    while engine.next_s < NEVER_S:
        now_s = engine.next_s
        happened += [(request, begun_s, now_s) for request, begun_s in engine.advance()]
    # Two prompts are read, a second each; a step of both; then there is a place to read the third
    # before the last step.
    assert happened == [(1, 1.0, 4.0), (2, 4.0, 5.0), (0, 0.0, 6.5)]


def test_a_prompt_that_comes_during_a_step_waits_for_its_end():
    engine = VirtualEngine(CURVE)
    engine.submit(0.0, [(0, 1000, 3)])
    assert engine.advance() == []
    engine.submit(1.6, [(1, 1000, 0)])
    assert engine.next_s == 3.5
    assert engine.recall({1}) == [], "it is being read"


@pytest.mark.parametrize("models", [1, 3])
def test_every_request_is_answered_once_and_every_metric_computed_once(models):
    workload = small(models)
    outcome = simulate(workload, CLUSTER, record=True)
    assert outcome.samples == 100 * models
    assert len(outcome.timeline.requests) == outcome.requests == (40 + 240) * models
    assert len(outcome.timeline.metrics) == 20 * models
    assert outcome.makespan_s >= outcome.bound.seconds
    assert outcome.makespan_s == outcome.timeline.makespan_s
    for metric in outcome.timeline.metrics:
        answers = [
            one.t1
            for one in outcome.timeline.requests
            if (one.model, one.task, one.sample) == (metric.model, metric.task, metric.sample)
        ]
        assert metric.t0 >= max(answers)


def test_an_engine_never_serves_two_models_at_a_time():
    timeline = simulate(small(3), CLUSTER, record=True).timeline
    for request in timeline.requests:
        served = [
            span for span in timeline.engines
            if span.engine == request.engine and span.what == "serve" and span.t0 <= request.t0 <= request.t1 <= span.t1
        ]  # fmt: skip
        assert [span.model for span in served] == [request.model]


def test_the_same_seed_gives_the_same_run_and_the_account_adds_up():
    first, second = (simulate(small(2), CLUSTER, record=True, seed=3) for _ in range(2))
    assert first.timeline == second.timeline
    found = account(first.timeline, CLUSTER.curve)
    assert found.engines == CLUSTER.engines
    assert sum(found.seconds[name] for name in CATEGORIES) == pytest.approx(
        found.engines * first.makespan_s
    )
    assert found.path[-1].t1 <= first.makespan_s


def test_a_judges_quota_is_kept():
    cluster = SimCluster(nodes=1, engines_per_node=2, engine_start_s=1.0, judge_per_s=2.0)
    outcome = simulate(small(), cluster, record=True)
    begun = sorted(metric.t0 for metric in outcome.timeline.metrics)
    assert min(b - a for a, b in itertools.pairwise(begun)) >= 0.5 - 1e-9
    assert outcome.bound.binds in {"judge", "engines", "sample"}


def test_a_slow_engine_gets_less():
    cluster = SimCluster(nodes=1, engines_per_node=4, engine_start_s=1.0, slowness={0: 4.0})
    task = SimTask(
        name="t",
        prompt_tokens=[100] * 4000,
        new_tokens=[60] * 4000,
        max_new_tokens=64,
        metric_s=[0.0] * 4000,
    )
    timeline = simulate(Workload(tasks=(task,)), cluster, record=True).timeline
    counts = [sum(request.engine == engine for request in timeline.requests) for engine in range(4)]
    assert counts[0] < min(counts[1:]) / 2


@pytest.mark.parametrize("policy", PEERS)
def test_a_peer_is_above_the_bound(policy):
    workload = small()
    assert simulate_peer(policy, workload, CLUSTER) > simulate(workload, CLUSTER).bound.seconds


def test_an_unknown_peer_is_named():
    with pytest.raises(ValueError, match="no policy 'best'"):
        simulate_peer("best", small(), CLUSTER)


def test_suites_are_what_they_were():
    workload = paper_like()
    assert len(workload.tasks) == 60
    assert sum(len(task) for task in workload.tasks) == 92_766
    suite, cluster = random_suite(7)
    again, _ = random_suite(7)
    assert suite == again
    assert cluster.nodes in {1, 2, 4, 8, 16, 32}


def test_history_helps():
    workload, cluster = random_suite(140)
    blind = simulate(workload, cluster).makespan_s
    assert simulate(workload, cluster, history=workload.history(0.2, 1)).makespan_s < blind


def test_the_load_of_the_policy_is_measured():
    load = policy_load(samples=2000, engines=16)
    assert load.samples == 2000
    assert load.answers_per_s > 0
