"""Check the bound of actual runs: at most the makespan, and equal to the plan's for equal work."""

import random

import pytest

from holdfast.evaluate.policy.bound import lower_bound
from holdfast.evaluate.run.actual_cost import fetch_bytes_per_s, work_of
from holdfast.evaluate.run.options import JudgeLimits
from holdfast.evaluate.types.engine import Curve
from holdfast.evaluate.types.timeline import (
    Begin,
    End,
    EngineSpan,
    JudgeSpan,
    MetricSpan,
    NodeSpan,
    RequestSpan,
    timeline_of,
)
from holdfast.simulate.evaluate import simulate
from holdfast.simulate.workload import SimCluster, SimModel, SimTask, Workload

CURVE = Curve(
    prefill_tokens_per_s=1000.0, request_s=0.0, step_base_s=1.0, step_sequence_s=0.5, max_batch=2
)
GB = 10**9


def bound(lines, *, curve=CURVE, **limits):
    timeline = timeline_of([Begin(started_at_s=0.0, suite="s", tasks=["t"]), *lines])
    work = work_of(timeline, 0, curve, **limits)
    assert work is not None
    return lower_bound(work).terms


def load(engine, t0, t1):
    return EngineSpan(what="load", engine=engine, node=engine, t0=t0, t1=t1)


def fetch(node, t0, t1, remote_bytes=GB, peer_bytes=0):
    return NodeSpan(
        what="fetch", node=node, t0=t0, t1=t1, remote_bytes=remote_bytes, peer_bytes=peer_bytes
    )


def request(t0, t1, *, engine=0, sample=0, tokens=0, prompt=0):
    return RequestSpan(
        engine=engine, task=0, sample=sample, t0=t0, t1=t1, new_tokens=tokens, prompt_tokens=prompt
    )


def simulated(seed):
    """Make a random simulated run with the lines of a live run, and the judge's limits."""
    rng = random.Random(seed)
    judge_per_s = rng.choice((0.0, 0.0, 0.2))
    cluster = SimCluster(
        nodes=rng.randint(1, 3),
        engines_per_node=rng.randint(1, 2),
        metric_slots=rng.randint(1, 4),
        curve=Curve(
            prefill_tokens_per_s=rng.choice((100.0, 5000.0)),
            request_s=rng.choice((0.0, 0.1)),
            step_base_s=rng.choice((0.05, 0.5)),
            step_sequence_s=rng.choice((0.001, 0.2)),
            max_batch=rng.choice((1, 2, 8)),
        ),
        store_bytes_per_s=rng.choice((0.01, 1.0)) * GB,
        node_bytes_per_s=rng.choice((0.02, 1.0)) * GB,
        engine_start_s=rng.choice((0.0, 3.0, 40.0)),
        judge_per_s=judge_per_s,
    )
    tasks = tuple(
        SimTask(
            name=f"task {number}",
            prompt_tokens=[rng.randint(1, 200) for _ in range(count)],
            new_tokens=[rng.randint(0, 40) for _ in range(count)],
            max_new_tokens=40,
            metric_s=[rng.choice((0.0, 0.1, 9.0)) for _ in range(count)],
        )
        for number, count in enumerate(rng.choices((1, 5, 60), k=2))
    )
    size_bytes = rng.choice((0.01, 0.5)) * GB
    outcome = simulate(
        Workload(tasks=tasks, models=(SimModel(size_bytes=size_bytes),)), cluster, record=True
    )
    whole, seen = int(size_bytes), outcome.timeline
    part = whole // cluster.nodes
    lines = [
        seen.begin, *seen.engines, *seen.requests, *seen.metrics,
        *(fetch(node, 0.0, cluster.fetch_s(whole), part, whole - part) for node in range(cluster.nodes)),
        *(JudgeSpan(task=-1, sample=-1, t0=one.t0, t1=one.t1) for one in seen.metrics if judge_per_s),
        End(state="done", t1=outcome.makespan_s),
    ]  # fmt: skip
    judge = (
        JudgeLimits(url="http://h/v1", requests_per_minute=60 * judge_per_s)
        if judge_per_s
        else None
    )
    return outcome, cluster, timeline_of(lines), judge


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 200), marks=pytest.mark.slow)])
def test_never_above_the_makespan_and_near_the_plans(seeds):
    bound_by, near = set(), 0
    for seed in seeds:
        outcome, cluster, timeline, judge = simulated(seed)
        work = work_of(timeline, 0, cluster.curve, judge=judge, metric_slots=cluster.metric_slots)
        assert work is not None
        found = lower_bound(work)
        assert found.seconds <= timeline.makespan_s + 1e-9, f"run {seed}: {found}"
        bound_by.add(found.binds)
        near += judge is not None or 0.9 < found.seconds / outcome.bound.seconds < 1.1
    assert bound_by >= {"engines", "sample", "metrics", "judge"}
    assert near > 0.9 * len(seeds), "a run's bound and its plan's are the same bound"


def test_the_weights_come_once_at_the_fastest_rate_and_an_engine_starts_after_them():
    lines = [
        fetch(0, 0.0, 4.0, GB, GB), fetch(1, 0.0, 5.0, GB, GB),
        load(0, 0.0, 6.0), load(1, 0.0, 7.5),
        request(7.0, 9.0, prompt=2000), request(8.0, 10.0, engine=1, sample=1, prompt=2000),
    ]  # fmt: skip
    terms = bound(lines)
    assert terms["storage"] == 4.0 + 2.0 + 2.0, "2 GB at 0.5 GB/s, into the device, one answer"
    assert terms["sample"] == 6.0 + 2.0
    assert terms["engines"] == 8.25, "the second after 4.0 + 2.5 s; both were at work for 2 s"
    again = [
        fetch(0, 20.0, 30.0, 2 * GB),
        load(0, 20.0, 40.0),
        request(41.0, 43.0, sample=2, prompt=2000),
    ]
    assert bound([*lines, *again])["storage"] == 8.0, (
        "what was read again after a stop is read once"
    )


def test_a_late_engine_could_have_come_early_and_a_warm_one_was_there():
    late = [fetch(0, 0.0, 10.0), load(0, 50.0, 55.0), request(60.0, 62.0, prompt=2000)]
    assert bound(late)["sample"] == 5.0 + 2.0
    assert bound(late)["storage"] == 10.0 + 2.0
    warm = [
        EngineSpan(what="serve", engine=0, node=0, t0=0.0, t1=70.0),
        request(60.0, 62.0, prompt=2000),
    ]
    assert bound(warm)["sample"] == 2.0
    assert "storage" not in {name for name, seconds in bound(warm).items() if seconds}


def test_no_engine_did_more_than_it_had_time_for():
    ready = EngineSpan(what="serve", engine=0, node=0, t0=0.0, t1=9.0)
    crowd = [request(1.0, 4.0, sample=one, tokens=2) for one in range(8)]
    assert bound([ready, *crowd])["engines"] == pytest.approx(3.0), (
        "8 at a time, where the curve says 2"
    )
    alone = [request(1.0, 2.0, sample=0, tokens=2), request(2.0, 5.0, sample=1, tokens=2)]
    assert bound([ready, *alone])["sample"] == pytest.approx(1.0), (
        "the first took a third of what the curve says"
    )
    cut = [request(0.0, 0.1, sample=0, tokens=2), request(1.0, 4.0, sample=1, tokens=2)]
    assert bound([ready, *cut])["sample"] == pytest.approx(3.0), (
        "what began before tells nothing of speed"
    )


def test_what_was_answered_before_costs_its_metric_alone():
    lines = [
        EngineSpan(what="serve", engine=0, node=0, t0=0.0, t1=9.0),
        request(1.0, 4.0, sample=0, tokens=2),
        MetricSpan(node=0, task=0, sample=1, t0=0.5, t1=8.5),
    ]
    assert bound(lines)["engines"] == pytest.approx(2.0)
    assert bound(lines)["metrics"] == pytest.approx(8.0)
    assert bound(lines, metric_slots=4)["metrics"] == pytest.approx(2.0)


def test_the_judges_quota_bounds_and_waiting_for_it_is_no_metric():
    lines = [
        EngineSpan(what="serve", engine=0, node=0, t0=0.0, t1=999.0),
        request(1.0, 4.0, sample=0, tokens=2),
        MetricSpan(node=0, task=0, sample=0, t0=4.0, t1=304.0),
        *(
            JudgeSpan(task=-1, sample=-1, tokens=50, t0=4.0 + one, t1=5.0 + one)
            for one in range(300)
        ),
    ]
    url = "http://h/v1"
    terms = bound(lines, judge=JudgeLimits(url=url, requests_per_minute=60))
    assert terms["judge"] == pytest.approx(240.0), "60 at once, then one a second"
    assert terms["sample"] == pytest.approx(3.0 + 1.0), (
        "of its 300 s in the metric one answer is its own for certain"
    )
    assert bound(lines, judge=JudgeLimits(url=url, tokens_per_minute=3000))[
        "judge"
    ] == pytest.approx(240.0)
    assert not bound(lines, judge=JudgeLimits(url=url))["judge"]
    assert not bound(lines)["judge"]


def test_nobody_answered():
    assert work_of(timeline_of([load(0, 0.0, 5.0)]), 0, CURVE) is None
    assert fetch_bytes_per_s(timeline_of([])) == 0.0
    assert fetch_bytes_per_s(timeline_of([fetch(0, 1.0, 3.0)])) == GB / 2
