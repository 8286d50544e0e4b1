"""What a run truly cost, in the form from which `policy.bound` computes what no schedule could have gone below.

The makespan counts from the start of the coordinator, so what cannot be avoided after it belongs into the bound: an
engine starts once, as fast as it did, and the weights come once, as fast as they did. A plan counts them likewise
(`simulate.ideal`), and the two ratios say the same. What only took long because something else was late is left out, as
is what a better run would not have had: waiting for nodes and requests, retries, other weights put into an engine,
engines and nodes that were lost.

Where a cost is not known exactly, less is assumed, never more:

- a request costs what the engine's curve says, scaled down until no request was faster than alone on an engine and no
  engine did more than it had time for; where an engine does one thing at a time, its share of the time it took;
- the weights come at the fastest rate at which any node got them, since what a node waited for while the others were
  slow is no property of the wire: finer than the whole fetch is not recorded;
- a metric in which the judge was asked may have waited for its quota, so it counts as the shortest answer of the judge;
- an answer that was there from before costs nothing, and neither does one of the judge that was kept.
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
"""Of a sample: its task and its number therein."""


class _Cost(NamedTuple):
    """Of a request: the engine-seconds in a full batch, and the seconds with an engine to itself."""

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
    """The work of one model's evaluation; None where no engine answered anything.

    Args:
        timeline: of the evaluation.
        model: whose requests, metrics and weights are meant.
        curve: what the engines' work costs, as they measured it.
        judge: the limits that the judge was asked under.
        metric_slots: of a node; where more metrics ran at a time, so many.
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
    # Which sample asked the judge is not known: all that it was asked stands by itself, there from the start.
    asked = SampleWork(
        engine_s=0.0,
        alone_s=0.0,
        judge_requests=len(judged),
        judge_tokens=sum(span.tokens for span in judged),
    )
    shortest_s = min(cost.alone_s for cost in costs)
    nodes = {span.node for spans in (timeline.nodes, timeline.metrics) for span in spans}
    return RunWork(
        samples=[*samples, asked],
        engines_there_s=there_s,
        slots_there_s=[0.0] * (max(1, len(nodes)) * max(metric_slots, _at_once(timeline.metrics))),
        judge_requests=_quota(judge.requests_per_minute if judge else None),
        judge_tokens=_quota(judge.tokens_per_minute if judge else None),
        transfers=[[replace(weights, then_s=max(0.0, min(there_s) - fetch_s) + shortest_s)]]
        if fetch_s
        else [],
    )


def fetch_bytes_per_s(timeline: Timeline, model: int = 0) -> float:
    """The fastest rate at which any node got a model, from storage and its peers; 0 where none had to."""
    weights = _weights(timeline, model)
    return weights.bytes_per_s if weights.size_bytes else 0.0


def _weights(timeline: Timeline, model: int) -> Transfer:
    """The bytes of a model that any node had to get, at the fastest rate at which one got them.

    All of a model comes to every node, a part from storage and the rest through its peers, and no node has the whole
    before all of it was read. Bytes that were read again count once. A fetch that was over before the timeline begins
    took no time.
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
    """For each engine when it could have served at the earliest: 0 where it was there before.

    Ordered at once, it comes after the weights, and after what its start took beyond them. That is no more than its
    whole start where it was ordered late, nor more than that and the fastest fetch where the fetch was slow.
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
    """Of each request what it cost; of those of one engine together no more than it was at work."""
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
    if not does_one_at_a_time:  # what one engine has shown, any could do
        factors = dict.fromkeys(factors, min(factors.values()))
    return [
        _Cost(full_s=cost.full_s * factors[span.engine], alone_s=cost.alone_s)
        for span, cost in zip(requests, costs, strict=True)
    ]


def _shares(requests: Sequence[RequestSpan]) -> list[_Cost]:
    """Of requests that one forward answered, which have the same span, each a share of it."""
    together = Counter((span.engine, span.t0, span.t1) for span in requests)
    shares_s = [(span.t1 - span.t0) / together[span.engine, span.t0, span.t1] for span in requests]
    return [_Cost(full_s=share_s, alone_s=share_s) for share_s in shares_s]


def _by_curve(requests: Sequence[RequestSpan], curve: Curve) -> list[_Cost]:
    """By the curve, scaled so that none was faster than alone; what was cut off where the timeline begins says less."""
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
    """The samples that engines answered, and the metrics of those whose answers were there from before."""
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
    """What the metric of each sample took of a slot; of one computed again, the last time."""
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
    """A limit on every window of a minute: all of it can be used at once, and again a window later."""
    return None if a_minute is None else Quota(rate_per_s=a_minute / WINDOW_S, burst=a_minute)


def _at_once(metrics: Sequence[MetricSpan]) -> int:
    """The most metrics that ran at a time on one node."""
    edges = [(span.t0, 1, span.node) for span in metrics] + [
        (span.t1, -1, span.node) for span in metrics
    ]
    running: Counter[int] = Counter()
    most = 0
    for _, change, node in sorted(edges):
        running[node] += change
        most = max(most, running[node])
    return most
