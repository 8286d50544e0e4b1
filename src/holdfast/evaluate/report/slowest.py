"""The samples that took longest, from their first request's start to their last answer, metric or judgement."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.evaluate.types.timeline import Timeline

SHOWN = 15


@dataclass
class SampleTime:
    """One sample of one model."""

    model: int
    task: int
    sample: int
    requests: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    engine_s: float = 0.0
    """Its requests' times on the engine, added up."""
    metric_s: float = 0.0
    judge_s: float = 0.0
    t0: float = float("inf")
    t1: float = 0.0


def slowest(timeline: Timeline, *, shown: int = SHOWN) -> list[SampleTime]:
    """The samples that took longest from their first start to their last end, the longest first."""
    found = sample_times(timeline)
    return heapq.nlargest(
        shown, found, key=lambda sample: (sample.t1 - sample.t0, -sample.task, -sample.sample)
    )


def sample_times(timeline: Timeline) -> Iterable[SampleTime]:
    """Every sample that an engine, a metric or a judge worked on."""
    found: dict[tuple[int, int, int], SampleTime] = {}

    def of(model: int, task: int, sample: int) -> SampleTime:
        key = (model, task, sample)
        if key not in found:
            found[key] = SampleTime(model=model, task=task, sample=sample)
        return found[key]

    for request in timeline.requests:
        one = of(request.model, request.task, request.sample)
        one.requests += 1
        one.prompt_tokens += request.prompt_tokens
        one.new_tokens += request.new_tokens
        one.engine_s += request.t1 - request.t0
        one.t0, one.t1 = min(one.t0, request.t0), max(one.t1, request.t1)
    for metric in timeline.metrics:
        one = of(metric.model, metric.task, metric.sample)
        one.metric_s += metric.t1 - metric.t0
        one.t0, one.t1 = min(one.t0, metric.t0), max(one.t1, metric.t1)
    for judged in timeline.judged:
        one = of(judged.model, judged.task, judged.sample)
        one.judge_s += judged.t1 - judged.t0 + judged.waited_s
        one.t0, one.t1 = min(one.t0, judged.t0 - judged.waited_s), max(one.t1, judged.t1)
    return found.values()
