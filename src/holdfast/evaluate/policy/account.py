"""Account for each engine-second of an evaluation.

The seconds of all categories add up to the number of engines times the makespan.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.evaluate.types.engine import Curve
from holdfast.evaluate.types.timeline import EngineSpan, NodeSpan, RequestSpan, Timeline

USEFUL = "useful work"
UNDERFILLED = "batch not full"
REDONE = "work done twice or in vain"
WEIGHTS = "waiting for weights"
START = "starting engines"
SWAP = "swapping weights"
BEFORE = "idle before the first request"
BETWEEN = "idle between requests"
TAIL_SAMPLE = "idle while the last samples are generated"
TAIL_METRIC = "idle while the last metrics are computed"
TAIL_JUDGE = "idle while the last answers are judged"
LOST = "lost to failures"
ABSENT = "engine not there"

CATEGORIES = (
    USEFUL, UNDERFILLED, REDONE, WEIGHTS, START, SWAP, BEFORE, BETWEEN, TAIL_SAMPLE, TAIL_METRIC, TAIL_JUDGE, LOST,
    ABSENT,
)  # fmt: skip
"""The categories in the order in which a report lists them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of the critical path.

    `what` is the kind of span. `waited_s` is the time between the end of the previous step and the
    start of this step.
    """

    what: str
    t0: float
    t1: float
    waited_s: float = 0.0
    engine: int = -1
    node: int = -1
    task: int = -1
    sample: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Hold the seconds of every category, which add up to `engines * makespan_s`.

    `path` is the critical path, from the start to the end of the run.
    """

    engines: int
    makespan_s: float
    seconds: dict[str, float] = field(default_factory=dict)
    path: tuple[Step, ...] = ()

    def share(self, category: str) -> float:
        """Return a category's share of all engine-seconds."""
        total_s = self.engines * self.makespan_s
        return self.seconds[category] / total_s if total_s else 0.0


def account(timeline: Timeline, curves: Mapping[int, Curve] | Curve) -> Account:
    """Account for the engine-seconds of a run.

    While an engine works, the cost of its answers in a full batch (`Curve.saturated_s`) counts as
    useful, and the rest of the time counts as an unfilled batch. If the curve predicts more seconds
    than the engine took, all of the time is useful. A request that failed, or that another engine
    answered first, counts as redone work.

    Args:
        timeline: the timeline of the run.
        curves: the cost curve of each engine, or one curve for all engines. All work of an engine
            counts as useful if the engine has no curve or a batch size of one.
    """
    makespan_s = timeline.makespan_s
    spans: dict[int, list[EngineSpan]] = {}
    for span in timeline.engines:
        spans.setdefault(span.engine, []).append(span)
    requests: dict[int, list[RequestSpan]] = {number: [] for number in spans}
    for request in timeline.requests:
        requests.setdefault(request.engine, []).append(request)
    came_s = weights_came_s(timeline)
    last_request_s = min(
        max((request.t1 for request in timeline.requests), default=0.0), makespan_s
    )
    judged_s = max((span.t1 for span in timeline.judged), default=0.0)
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    for number in sorted(requests):
        curve = curves if isinstance(curves, Curve) else curves.get(number)
        busy = merged((max(one.t0, 0.0), min(one.t1, makespan_s)) for one in requests[number])
        busy_s = sum(end - begin for begin, end in busy)
        useful_s, vain_s = _work(requests[number], busy_s, curve)
        seconds[USEFUL] += useful_s
        seconds[REDONE] += vain_s
        seconds[UNDERFILLED] += busy_s - useful_s - vain_s
        first_s = busy[0][0] if busy else makespan_s
        for begin, end in _gaps(busy, makespan_s):
            for category, part_s in _idle(begin, end, spans.get(number, ()), came_s):
                if category:
                    seconds[category] += part_s[1] - part_s[0]
                    continue
                from_s, to_s = part_s
                if to_s <= first_s and busy:
                    seconds[BEFORE] += to_s - from_s
                elif busy and from_s < busy[-1][1]:
                    seconds[BETWEEN] += to_s - from_s
                else:
                    cut_s = min(max(from_s, last_request_s), to_s)
                    seconds[TAIL_SAMPLE] += cut_s - from_s
                    heard_s = min(max(cut_s, judged_s), to_s)
                    seconds[TAIL_JUDGE] += heard_s - cut_s
                    seconds[TAIL_METRIC] += to_s - heard_s
    return Account(
        engines=len(requests), makespan_s=makespan_s, seconds=seconds, path=critical_path(timeline)
    )


def _work(
    requests: Sequence[RequestSpan], busy_s: float, curve: Curve | None
) -> tuple[float, float]:
    """Return the seconds of useful work and of redone work, at the cost of a full batch.

    If their sum exceeds `busy_s`, both are scaled down so that the sum equals `busy_s`.
    """
    useful_s = vain_s = 0.0
    batched = curve if curve is not None and curve.max_batch > 1 else None
    for request in requests:
        if batched is None:
            cost_s = request.t1 - request.t0
        else:
            cost_s = batched.saturated_s(request.prompt_tokens, request.new_tokens)
        if request.error:
            vain_s += cost_s
        else:
            useful_s += cost_s
    total_s = useful_s + vain_s
    if total_s > busy_s or (batched is None and total_s > 0):
        return busy_s * useful_s / total_s, busy_s * vain_s / total_s
    return useful_s, vain_s


def _idle(
    begin: float, end: float, spans: Sequence[EngineSpan], came_s: Mapping[EngineSpan, float]
) -> Iterable[tuple[str, tuple[float, float]]]:
    """Split an idle time of an engine by what the engine did.

    Yields:
        A category and its start and end; the category is "" while the engine was ready to serve.
    """
    now_s = begin
    for span in spans:
        from_s, to_s = max(span.t0, now_s), min(span.t1, end)
        if to_s <= from_s:
            continue
        if from_s > now_s:
            yield ABSENT, (now_s, from_s)
        if span.what == "load":
            cut_s = min(max(came_s.get(span, from_s), from_s), to_s)
            yield WEIGHTS, (from_s, cut_s)
            yield START, (cut_s, to_s)
        else:
            yield {"swap": SWAP, "lost": LOST}.get(span.what, ""), (from_s, to_s)
        now_s = to_s
    if now_s < end:
        yield ABSENT, (now_s, end)


def weights_came_s(timeline: Timeline) -> dict[EngineSpan, float]:
    """Return when each load's weights reached the node, for nodes that fetched the weights.

    A resumed run fetches the weights again. A fetch that began after the end of a load does not
    count for this load.
    """
    fetches: dict[tuple[int, int], list[NodeSpan]] = {}
    for node in timeline.nodes:
        if node.what == "fetch":
            fetches.setdefault((node.node, node.model), []).append(node)
    found = {}
    for load in timeline.engines:
        if load.what == "load":
            ends_s = [
                one.t1 for one in fetches.get((load.node, load.model), ()) if one.t0 < load.t1
            ]
            if ends_s:
                found[load] = max(ends_s)
    return found


def merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merge overlapping spans; return disjoint spans in order of time."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if end <= begin:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def _gaps(busy: Sequence[tuple[float, float]], end_s: float) -> Iterable[tuple[float, float]]:
    now_s = 0.0
    for begin, end in busy:
        if begin > now_s:
            yield now_s, begin
        now_s = end
    if now_s < end_s:
        yield now_s, end_s


def critical_path(timeline: Timeline) -> tuple[Step, ...]:
    """Trace the critical path backwards from the end of the run.

    The path goes from the last metric to the answer that the metric needed, and then from answer to
    previous answer of the same engine. Answers of an engine without a pause between them are one
    step.
    """
    ends: dict[int, list[RequestSpan]] = {}
    answers: dict[tuple[int, int, int], RequestSpan] = {}
    for one in sorted(timeline.requests, key=lambda one: one.t1):
        ends.setdefault(one.engine, []).append(one)
        answers[one.model, one.task, one.sample] = one
    steps: list[Step] = []
    last_metric = max(timeline.metrics, key=lambda span: span.t1, default=None)
    last_request = max(timeline.requests, key=lambda span: span.t1, default=None)
    request: RequestSpan | None
    if last_metric is not None and (last_request is None or last_metric.t1 >= last_request.t1):
        request = answers.get((last_metric.model, last_metric.task, last_metric.sample))
        waited_s = last_metric.t0 - request.t1 if request else 0.0
        steps.append(Step(what="metric", t0=last_metric.t0, t1=last_metric.t1, waited_s=waited_s,
                          node=last_metric.node, task=last_metric.task, sample=last_metric.sample))  # fmt: skip
    else:
        request = last_request
    while request is not None:
        before = ends[request.engine]
        place = bisect_right(before, request.t0 + 1e-9, key=lambda one: one.t1)
        previous = before[place - 1] if place else None
        if previous is request or (previous is not None and previous.t1 > request.t0 + 1e-9):
            previous = None
        stood_s = max(
            (span.t1 for span in timeline.engines
             if span.engine == request.engine and span.what in {"load", "swap"} and span.t1 <= request.t0 + 1e-9),
            default=0.0,
        )  # fmt: skip
        if previous is not None and previous.t1 < stood_s:
            previous = None
        since_s = previous.t1 if previous else stood_s
        steps.append(Step(what="request", t0=request.t0, t1=request.t1, waited_s=max(0.0, request.t0 - since_s),
                          engine=request.engine, task=request.task, sample=request.sample))  # fmt: skip
        if previous is None:
            steps += [
                Step(what=span.what, t0=span.t0, t1=span.t1, engine=span.engine, node=span.node)
                for span in timeline.engines
                if span.engine == request.engine
                and span.what in {"load", "swap"}
                and span.t1 == stood_s
            ][:1]
        request = previous if previous is not None and previous.t0 < request.t0 else None
    return tuple(reversed(_joined(steps)))


def _joined(steps: Sequence[Step]) -> list[Step]:
    """Merge steps of requests that followed one another without a pause on the same engine.

    The steps are in backward order here.
    """
    found: list[Step] = []
    for step in steps:
        if (
            found
            and found[-1].what == step.what == "request"
            and found[-1].engine == step.engine
            and found[-1].waited_s < _PAUSE_S
        ):
            last = found[-1]
            found[-1] = Step(what="request", t0=step.t0, t1=last.t1, waited_s=step.waited_s, engine=step.engine,
                             task=last.task, sample=last.sample)  # fmt: skip
        else:
            found.append(step)
    return found


_PAUSE_S = 0.05
