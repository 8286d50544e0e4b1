"""Measure the actual costs of a run, from which `policy.bound` computes the lower bound.

The makespan starts with the coordinator. So the bound includes the unavoidable part of the
start-up: one start of an engine and one transfer of the weights, at the measured speeds.
`simulate.ideal` counts the same costs, so that planned and measured ratios are comparable.
Avoidable costs are left out: waiting for nodes and requests, retries, swaps of weights, and lost
engines and nodes.

Costs that were not measured exactly are estimated from below:

- A request costs what the engine's curve predicts. The predictions are scaled down until no request
  was faster than it would be alone on an engine, and no engine worked longer than its busy time. On
  an engine that runs one forward pass at a time, a request costs its share of the pass.
- The weights arrive at the fastest rate of any node, since slower nodes may have waited for their
  peers. Only the rate of the whole fetch is recorded.
- A metric that called the judge may include waiting for the quota, so it costs as much as the
  judge's shortest answer.
- Answers from the journal, of engines and of the judge, cost nothing.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from holdfast.evaluate.metrics.judge.quota import WINDOW_S
from holdfast.evaluate.policy.account import merged, weights_came_s
from holdfast.evaluate.policy.bound import Quota, RunWork, SampleWork, Transfer
from holdfast.evaluate.run.options import JudgeLimits
from holdfast.evaluate.types.engine import Curve
from holdfast.evaluate.types.timeline import MetricSpan, NodeSpan, RequestSpan, Timeline

_Place = tuple[int, int]
"""The number of the task, and the index of the sample in the task."""


class _Cost(NamedTuple):
    """The cost of a request: engine-seconds in a full batch, and seconds if alone on an engine."""

    full_s: float
    alone_s: float


def work_of(
    timeline: Timeline,
    model: int,
    curve: Curve,
    *,
    judge: JudgeLimits | None = None,
    metric_slots: int = 1,
) -> RunWork | None:
    """Compute the work of one model's evaluation; None if no engine answered a request.

    Args:
        timeline: the timeline of the evaluation.
        model: the number of the model.
        curve: the measured cost curve of the engines.
        judge: the limits of the judge; None without a judge.
        metric_slots: the configured number of metrics that a node computes at the same time; a
            higher number seen in the timeline replaces it.
    """
    requests = [span for span in timeline.requests if span.model == model and not span.error]
    if not requests or not timeline.engines:
        return None
    weights = _weights(timeline, model)
    fetch_s = weights.size_bytes / weights.bytes_per_s
    there_s = _engines_there_s(timeline, model, fetch_s)
    costs = _costs(requests, curve)
    judged = [span for span in timeline.judged if span.model == model]
    samples = _samples(requests, costs, _metrics_s(timeline, model), min(there_s))
    # Count each judge request as separate work that is ready from the start, since the sample that
    # it belongs to is not recorded.
    work = SampleWork(
        engine_s=0.0,
        alone_s=0.0,
        judge_requests=len(judged),
        judge_tokens=sum(span.tokens for span in judged),
    )
    shortest_s = min(cost.alone_s for cost in costs)
    nodes = {span.node for spans in (timeline.nodes, timeline.metrics) for span in spans}
    return RunWork(
        samples=[*samples, work],
        engines_there_s=there_s,
        slots_there_s=[0.0] * (max(1, len(nodes)) * max(metric_slots, _at_once(timeline.metrics))),
        judge_requests=_quota(judge.requests_per_minute if judge else None),
        judge_tokens=_quota(judge.tokens_per_minute if judge else None),
        transfers=[[replace(weights, then_s=max(0.0, min(there_s) - fetch_s) + shortest_s)]]
        if fetch_s
        else [],
    )


def fetch_bytes_per_s(timeline: Timeline, model: int = 0) -> float:
    """Return the fastest rate at which any node received a model; 0 if no node fetched it."""
    weights = _weights(timeline, model)
    return weights.bytes_per_s if weights.size_bytes else 0.0


def _weights(timeline: Timeline, model: int) -> Transfer:
    """Return the size of a model and the fastest rate at which a node received the model.

    Every node receives the whole model, partly from storage and partly from its peers, and no node
    can be complete before all bytes were read from storage. Bytes that were read twice count once.
    A fetch that ended before the timeline begins took no time.
    """
    fetches = [
        span
        for span in timeline.nodes
        if span.what == "fetch" and span.model == model and span.remote_bytes
    ]
    if not fetches:
        return Transfer(size_bytes=0.0, bytes_per_s=1.0)
    rates = [
        _got_bytes(span) / (span.t1 - span.t0) if span.t1 > span.t0 else float("inf")
        for span in fetches
    ]
    return Transfer(size_bytes=min(_got_bytes(span) for span in fetches), bytes_per_s=max(rates))


def _got_bytes(span: NodeSpan) -> int:
    return span.remote_bytes + span.peer_bytes


def _engines_there_s(timeline: Timeline, model: int, fetch_s: float) -> list[float]:
    """Return the earliest time at which each engine could have served; 0 if it already ran.

    An engine that is started at once can serve when the weights have arrived and the rest of its
    start has passed. So the result is the smaller of two times: the engine's whole start as
    measured, and the rest of its start plus the fastest fetch.
    """
    came_s = weights_came_s(timeline)
    there_s: dict[int, float] = {}
    for span in timeline.engines:
        if span.what == "load":
            after_s = span.t1 - min(max(came_s.get(span, span.t0), span.t0), span.t1)
            least_s = min(span.t1 - span.t0, after_s + (fetch_s if span.model == model else 0.0))
            there_s[span.engine] = min(there_s.get(span.engine, least_s), least_s)
    return [
        there_s.get(engine, 0.0) for engine in sorted({span.engine for span in timeline.engines})
    ]


def _costs(requests: Sequence[RequestSpan], curve: Curve) -> list[_Cost]:
    """Compute the cost of each request.

    The costs of an engine's requests together are at most the engine's busy time.
    """
    does_one_at_a_time = curve.max_batch == 1
    costs = _shares(requests) if does_one_at_a_time else _by_curve(requests, curve)
    spent_s: dict[int, float] = defaultdict(float)
    spans: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for span, cost in zip(requests, costs, strict=True):
        spent_s[span.engine] += cost.full_s
        spans[span.engine].append((span.t0, span.t1))
    busy_s = {
        engine: sum(end - begin for begin, end in merged(its)) for engine, its in spans.items()
    }
    factors = {
        engine: min(1.0, busy_s[engine] / total_s) if total_s else 1.0
        for engine, total_s in spent_s.items()
    }
    if not does_one_at_a_time:  # the fastest engine is the standard for all
        factors = dict.fromkeys(factors, min(factors.values()))
    return [
        _Cost(full_s=cost.full_s * factors[span.engine], alone_s=cost.alone_s)
        for span, cost in zip(requests, costs, strict=True)
    ]


def _shares(requests: Sequence[RequestSpan]) -> list[_Cost]:
    """Divide each forward pass equally among the requests that it answered.

    Requests with equal start and end on one engine were answered by the same pass.
    """
    together = Counter((span.engine, span.t0, span.t1) for span in requests)
    shares_s = [(span.t1 - span.t0) / together[span.engine, span.t0, span.t1] for span in requests]
    return [_Cost(full_s=share_s, alone_s=share_s) for share_s in shares_s]


def _by_curve(requests: Sequence[RequestSpan], curve: Curve) -> list[_Cost]:
    """Compute the cost of each request by the cost curve.

    The costs are scaled so that no request was faster than it would be alone on an engine. A
    request that the start of the timeline cuts off does not lower the scale.
    """
    costs = [
        _Cost(
            full_s=curve.saturated_s(span.prompt_tokens, span.new_tokens),
            alone_s=curve.alone_s(span.prompt_tokens, span.new_tokens),
        )
        for span in requests
    ]
    took_s = [span.t1 - span.t0 for span in requests]
    ratios = [
        took / cost.alone_s
        for span, took, cost in zip(requests, took_s, costs, strict=True)
        if span.t0 > 0 and took > 0 and cost.alone_s > 0
    ]
    scale = min([1.0, *ratios])
    return [
        _Cost(full_s=min(scale * cost.full_s, took), alone_s=min(scale * cost.alone_s, took))
        for cost, took in zip(costs, took_s, strict=True)
    ]


def _samples(
    requests: Sequence[RequestSpan],
    costs: Sequence[_Cost],
    metrics_s: dict[_Place, float],
    ready_s: float,
) -> list[SampleWork]:
    """List the work of all samples.

    A sample whose answers were all reused has only the work of its metric.
    """
    engine_s: dict[_Place, float] = defaultdict(float)
    longest_s: dict[_Place, float] = defaultdict(float)
    for span, cost in zip(requests, costs, strict=True):
        place = span.task, span.sample
        engine_s[place] += cost.full_s
        longest_s[place] = max(longest_s[place], cost.alone_s)
    answered = [
        SampleWork(
            ready_s=ready_s,
            engine_s=full_s,
            alone_s=longest_s[place],
            metric_s=metrics_s.get(place, 0.0),
        )
        for place, full_s in engine_s.items()
    ]
    reused = [
        SampleWork(engine_s=0.0, alone_s=0.0, metric_s=metric_s)
        for place, metric_s in metrics_s.items()
        if place not in engine_s
    ]
    return answered + reused


def _metrics_s(timeline: Timeline, model: int) -> dict[_Place, float]:
    """Return the seconds for which each sample's metric occupied a slot.

    If a metric was computed several times, the last time counts.
    """
    judged = [span for span in timeline.judged if span.model == model]
    answers_s = sorted(span.t1 for span in judged)
    shortest_s = min((span.t1 - span.t0 for span in judged), default=0.0)
    found: dict[_Place, float] = {}
    for metric in timeline.metrics:
        if metric.model != model:
            continue
        took_s = metric.t1 - metric.t0
        next_answer = bisect_left(answers_s, metric.t0)
        if next_answer < len(answers_s) and answers_s[next_answer] <= metric.t1:
            took_s = min(took_s, shortest_s)
        found[metric.task, metric.sample] = took_s
    return found


def _quota(a_minute: float | None) -> Quota | None:
    """Convert a limit per minute to a quota.

    The whole limit can be used at once, and again one window later.
    """
    return None if a_minute is None else Quota(rate_per_s=a_minute / WINDOW_S, burst=a_minute)


def _at_once(metrics: Sequence[MetricSpan]) -> int:
    """Return the largest number of metrics that ran at the same time on one node."""
    edges = [(span.t0, 1, span.node) for span in metrics] + [
        (span.t1, -1, span.node) for span in metrics
    ]
    running: Counter[int] = Counter()
    most = 0
    for _, change, node in sorted(edges):
        running[node] += change
        most = max(most, running[node])
    return most
