"""Compute each engine's activities in equal slices of time, from a timeline.

While an engine works on several requests, its time is divided among their tasks.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from holdfast.evaluate.types.timeline import EngineSpan, RequestSpan, Span, Timeline

Values = npt.NDArray[np.float64]
OfEngine = TypeVar("OfEngine", EngineSpan, RequestSpan)

TASKS_APART = 6
"""The number of tasks that keep their own name; all further tasks share one name.

The tasks with the most engine time keep their names.
"""
OTHER_TASKS = "other tasks"


@dataclass(frozen=True, kw_only=True)
class Occupation:
    """Hold how much of each slice of time the engines spent on each activity.

    Attributes:
        edges_s: the edges of the slices in seconds; one more than there are slices.
        engines: the engines' numbers, one per row of `shares`.
        kinds: the possible activities: "load", "swap", "lost", "idle", then the names of tasks.
        shares: the share of each slice spent on each activity, of shape (engines, kinds, slices); 0
            for all activities while the engine did not exist.
    """

    edges_s: Values
    engines: tuple[int, ...]
    kinds: tuple[str, ...]
    shares: Values

    def seconds(self) -> dict[str, float]:
        """Return the engine-seconds of each activity."""
        slice_s = np.diff(self.edges_s)
        return dict(zip(self.kinds, (self.shares.sum(axis=0) @ slice_s).tolist(), strict=True))


def occupation(timeline: Timeline, *, slices: int) -> Occupation:
    """Compute the engines' activities in `slices` equal slices of the timeline."""
    edges_s = np.linspace(0.0, max(timeline.makespan_s, 1e-9), slices + 1)
    engines = sorted(
        {span.engine for span in timeline.engines} | {span.engine for span in timeline.requests}
    )
    names = _tasks_apart(timeline)
    kinds = ("load", "swap", "lost", "idle", *dict.fromkeys(names.values()))
    shares = np.zeros((len(engines), len(kinds), slices))
    spans = _by_engine(timeline.engines)
    requested = _by_engine(timeline.requests)
    for row, engine in enumerate(engines):
        of_kind = shares[row]
        for span_kind in ("load", "swap", "lost"):
            of_kind[kinds.index(span_kind)] = covered(
                [s for s in spans.get(engine, ()) if s.what == span_kind], edges_s
            )
        by_task: dict[str, list[RequestSpan]] = {}
        for request in requested.get(engine, ()):
            by_task.setdefault(names[request.task], []).append(request)
        at_once = {name: held(requests, edges_s) for name, requests in by_task.items()}
        total = sum(at_once.values(), np.zeros(slices))
        busy = covered(requested.get(engine, ()), edges_s)
        for name, amount in at_once.items():
            of_kind[kinds.index(name)] = busy * np.divide(
                amount, total, out=np.zeros(slices), where=total > 0
            )
        there = covered([*spans.get(engine, ()), *requested.get(engine, ())], edges_s)
        of_kind[kinds.index("idle")] = np.clip(there - of_kind.sum(axis=0), 0.0, 1.0)
    return Occupation(edges_s=edges_s, engines=tuple(engines), kinds=kinds, shares=shares)


def held(spans: Sequence[Span], edges_s: Values) -> Values:
    """Return the mean number of spans that are open at the same time, in each slice."""
    starts = np.sort(np.array([span.t0 for span in spans], dtype=float))
    ends = np.sort(np.array([max(span.t1, span.t0) for span in spans], dtype=float))
    amounts: Values = np.diff(_elapsed(starts, edges_s) - _elapsed(ends, edges_s)) / np.diff(
        edges_s
    )
    return np.clip(amounts, 0.0, None)  # rounding may give a small negative number


def most_at_once(spans: Sequence[Span]) -> int:
    """Return the largest number of spans that are open at the same time.

    A span that ends when another starts does not overlap with it.
    """
    changes = sorted(
        [(span.t0, 1) for span in spans] + [(max(span.t1, span.t0), -1) for span in spans]
    )
    return max(itertools.accumulate(change for _, change in changes), default=0)


def covered(spans: Sequence[Span], edges_s: Values) -> Values:
    """Return the share of each slice that is covered by at least one span."""
    if not spans:
        return np.zeros(len(edges_s) - 1)
    starts = np.array([span.t0 for span in spans], dtype=float)
    ends = np.array([max(span.t1, span.t0) for span in spans], dtype=float)
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    new = np.append(True, starts[1:] > ends[:-1])
    last = np.append(np.flatnonzero(new)[1:] - 1, len(starts) - 1)
    merged = _elapsed(starts[new], edges_s) - _elapsed(ends[last], edges_s)
    shares: Values = np.diff(merged) / np.diff(edges_s)
    return np.clip(shares, 0.0, 1.0)


def _elapsed(moments: Values, at: Values) -> Values:
    """Return, for each time t in `at`, the sum of t - m over all moments m before t.

    `moments` must be sorted in ascending order.
    """
    before = np.searchsorted(moments, at)
    passed: Values = before * at - np.append(0.0, np.cumsum(moments))[before]
    return passed


def _tasks_apart(timeline: Timeline) -> dict[int, str]:
    """Return the name of each task, the largest first; smaller tasks share one name."""
    seconds: dict[int, float] = {}
    for request in timeline.requests:
        seconds[request.task] = seconds.get(request.task, 0.0) + request.t1 - request.t0
    ranked = sorted(seconds, key=lambda task: (-seconds[task], task))
    apart = ranked if len(ranked) <= TASKS_APART + 1 else ranked[:TASKS_APART]
    return {task: timeline.task_name(task) if task in apart else OTHER_TASKS for task in ranked}


def _by_engine(spans: Sequence[OfEngine]) -> dict[int, list[OfEngine]]:
    grouped: dict[int, list[OfEngine]] = {}
    for span in spans:
        grouped.setdefault(span.engine, []).append(span)
    return grouped
