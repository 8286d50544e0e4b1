"""Find the times in which a device idles, and the cause of each: a phase, an incident, or unknown.

An idle valley is two or more samples in a row below 10 % of the run's median. The samples are SM
activity or, where no source measures SM activity, the best utilisation that was recorded. Samples
of 0 stay out of the median, so that a run that idles for most of its time has valleys too.
"""

import bisect
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from holdfast.profile.metrics import STEP_PHASE
from holdfast.profile.recording import Recording, Series, Span

ACTIVITY: Final = ("gpu_sm_active", "gpu_utilization", "process_cpu", "cpu_utilization")
"""Metrics that show a device's work, the best one first."""
SHARE_OF_MEDIAN: Final = 0.1
LEAST_SAMPLES: Final = 2
LONGEST_GAP: Final = 2.5
"""Sample intervals without a sample after which a device counts as not watched."""
UNKNOWN: Final = "unknown"
INCIDENT: Final = "incident"
BUBBLE: Final = "pipeline_bubble"
"""A gap between the phases of one step of a pipeline: the stage waits for another stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Valley:
    """Hold one idle valley of one device.

    Attributes:
        cause: a name of `metrics.PHASES`, `incident`, `pipeline_bubble` or `unknown`.
        detail: the incident's number and reason; empty for other causes.
        covered: the share of the valley that the cause covers.
    """

    node: str
    device: int | None
    rank: int | None
    start_ns: int
    end_ns: int
    cause: str
    detail: str
    covered: float

    @property
    def seconds(self) -> float:
        """Return the length in seconds."""
        return (self.end_ns - self.start_ns) / 1e9


@dataclass(frozen=True, kw_only=True)
class Valleys:
    """Hold the valleys of a run and the rule by which they were found.

    Attributes:
        metric: the metric that was used; None if no utilisation was recorded.
        median: the run's median of the samples above 0, in %.
        watched_s: seconds that all devices together were sampled.
    """

    metric: str | None
    median: float
    watched_s: float
    found: tuple[Valley, ...]

    def seconds_by_cause(self) -> dict[str, float]:
        """Return the seconds of all valleys by cause, the longest first, `unknown` last."""
        totals: dict[str, float] = {}
        for valley in self.found:
            totals[valley.cause] = totals.get(valley.cause, 0.0) + valley.seconds
        return dict(sorted(totals.items(), key=lambda one: (one[0] == UNKNOWN, -one[1])))


@dataclass(frozen=True, slots=True)
class Stretch:
    """Hold a time with one label; stretches of one rank do not overlap."""

    start_ns: int
    end_ns: int
    label: str
    detail: str = ""


def find_valleys(recording: Recording, *, pipeline: bool = False) -> Valleys:
    """Return every idle valley of a recording with its cause.

    The cause is the label that covers most of the valley. An incident has priority over phases, and
    an inner phase over the phase around it.

    Args:
        recording: the run.
        pipeline: True if the model is cut into pipeline stages, so that a gap inside a step is a
            wait for another stage.
    """
    metric = next((name for name in ACTIVITY if recording.of(name)), None)
    if metric is None:
        return Valleys(metric=None, median=0.0, watched_s=0.0, found=())
    series = recording.of(metric)
    busy = [value for one in series for value in one.values if value > 0]
    median = statistics.median(busy) if busy else 0.0
    labels = _Labels(recording, pipeline=pipeline)
    found: list[Valley] = []
    watched_ns = 0
    for one in series:
        ranks = labels.ranks_of(one)
        for start_ns, end_ns in _watched(one):
            watched_ns += end_ns - start_ns
        for start_ns, end_ns in idle_times(one, SHARE_OF_MEDIAN * median):
            cause, detail, covered = labels.cause(ranks, start_ns, end_ns)
            found.append(
                Valley(
                    node=one.node,
                    device=one.device,
                    rank=ranks[0] if len(ranks) == 1 else None,
                    start_ns=start_ns,
                    end_ns=end_ns,
                    cause=cause,
                    detail=detail,
                    covered=covered,
                )
            )
    found.sort(key=lambda valley: (valley.start_ns, valley.node, valley.device or 0))
    return Valleys(metric=metric, median=median, watched_s=watched_ns / 1e9, found=tuple(found))


def idle_times(series: Series, threshold: float) -> list[tuple[int, int]]:
    """Return the times of at least two samples in a row below a threshold, in Unix ns.

    A sample stands for the interval before it.
    """
    times: list[tuple[int, int]] = []
    run: list[tuple[int, int]] = []
    for (start_ns, end_ns), value in zip(_intervals(series), series.values, strict=True):
        if run and (value >= threshold or start_ns > run[-1][1]):
            if len(run) >= LEAST_SAMPLES:
                times.append((run[0][0], run[-1][1]))
            run = []
        if value < threshold:
            run.append((start_ns, end_ns))
    if len(run) >= LEAST_SAMPLES:
        times.append((run[0][0], run[-1][1]))
    return times


def local_ranks(recording: Recording) -> dict[str, list[int]]:
    """Return the ranks that each node recorded, in rising order."""
    nodes: dict[str, set[int]] = {}
    for span in recording.spans:
        nodes.setdefault(span.node, set()).add(span.rank)
    for use in recording.memory:
        nodes.setdefault(use.node, set()).add(use.rank)
    return {node: sorted(ranks) for node, ranks in nodes.items()}


def ranks_of(series: Series, local: Mapping[str, Sequence[int]]) -> list[int]:
    """Return the ranks that a series measures: its own, its device's, or all of its node."""
    if series.rank is not None:
        return [series.rank]
    ranks = list(local.get(series.node, ()))
    # Launchers give local rank i the device i.
    if series.device is not None and series.device < len(ranks):
        return [ranks[series.device]]
    return ranks


def phases_of_rank(spans: Iterable[Span]) -> list[Stretch]:
    """Return the phases of one rank without overlap: where phases nest, the inner one counts."""
    return flattened(
        (span.start_ns, span.end_ns, span.phase) for span in spans if span.phase != STEP_PHASE
    )


def flattened(intervals: Iterable[tuple[int, int, str]]) -> list[Stretch]:
    """Cut intervals so that none overlap: the one that began last counts until it ends."""
    stretches: list[Stretch] = []
    open_: list[tuple[int, str]] = []  # end and label; the innermost last
    at_ns = 0

    def advance(to_ns: int) -> None:
        nonlocal at_ns
        while open_ and at_ns < to_ns:
            end_ns, label = open_[-1]
            if end_ns <= at_ns:
                open_.pop()
                continue
            until_ns = min(end_ns, to_ns)
            if stretches and stretches[-1].label == label and stretches[-1].end_ns == at_ns:
                stretches[-1] = Stretch(stretches[-1].start_ns, until_ns, label)
            else:
                stretches.append(Stretch(at_ns, until_ns, label))
            at_ns = until_ns
        at_ns = max(at_ns, to_ns)

    ordered = sorted(intervals, key=lambda one: (one[0], -one[1]))
    for start_ns, end_ns, label in ordered:
        advance(start_ns)
        open_.append((end_ns, label))
    if ordered:
        advance(max(end_ns for _, end_ns, _ in ordered))
    return stretches


class _Labels:
    """Answers which phase or incident covers most of a time."""

    def __init__(self, recording: Recording, *, pipeline: bool) -> None:
        spans: dict[int, list[Span]] = {}
        for span in recording.spans:
            spans.setdefault(span.rank, []).append(span)
        self._local = local_ranks(recording)
        last_ns = max(
            [one.times_ns[-1] for one in recording.series if one.times_ns]
            + [span.end_ns for span in recording.spans],
            default=0,
        )
        self._incidents = [
            Stretch(
                one.start_ns,
                last_ns if one.end_ns is None else one.end_ns,
                INCIDENT,
                f"{one.incident_id}: {one.reason or one.kind}",
            )
            for one in recording.incidents
        ]
        self._phases: dict[int, list[Stretch]] = {}
        self._starts: dict[int, list[int]] = {}
        for rank, own in spans.items():
            outer = _steps(own) if pipeline else []
            inner = [
                (span.start_ns, span.end_ns, span.phase) for span in own if span.phase != STEP_PHASE
            ]
            self._phases[rank] = flattened([*outer, *inner])
            self._starts[rank] = [one.start_ns for one in self._phases[rank]]

    def ranks_of(self, series: Series) -> list[int]:
        return ranks_of(series, self._local)

    def cause(self, ranks: Sequence[int], start_ns: int, end_ns: int) -> tuple[str, str, float]:
        """Return the cause of a valley, its detail, and the share that it covers."""
        length_ns = end_ns - start_ns
        hit = max(self._incidents, key=lambda one: _overlap(one, start_ns, end_ns), default=None)
        struck_ns = 0 if hit is None else _overlap(hit, start_ns, end_ns)
        if hit is not None and 2 * struck_ns >= length_ns:
            return INCIDENT, hit.detail, struck_ns / length_ns
        covered: dict[str, float] = {}
        for rank in ranks:
            stretches = self._phases.get(rank, [])
            first = bisect.bisect_right(self._starts.get(rank, []), start_ns) - 1
            for index in range(max(0, first), len(stretches)):
                if stretches[index].start_ns >= end_ns:
                    break
                label = stretches[index].label
                share_ns = _overlap(stretches[index], start_ns, end_ns) / len(ranks)
                covered[label] = covered.get(label, 0.0) + share_ns
        covered[UNKNOWN] = max(0.0, length_ns - sum(covered.values()))
        cause = max(covered, key=lambda label: (covered[label], label))
        return cause, "", covered[cause] / length_ns


def _steps(spans: Sequence[Span]) -> list[tuple[int, int, str]]:
    """Return the time of each step of one rank, from its first phase to the end of its last."""
    bounds: list[tuple[int, int, int]] = []
    for span in spans:
        if span.step is None or span.phase == STEP_PHASE:
            continue
        if bounds and bounds[-1][0] == span.step:
            step, start_ns, end_ns = bounds[-1]
            bounds[-1] = (step, start_ns, max(end_ns, span.end_ns))
        else:
            bounds.append((span.step, span.start_ns, span.end_ns))
    return [(start_ns, end_ns, BUBBLE) for _, start_ns, end_ns in bounds]


def _intervals(series: Series) -> list[tuple[int, int]]:
    interval_ns = round(series.interval_s * 1e9)
    longest_ns = round(LONGEST_GAP * interval_ns)
    before = [-math.inf, *series.times_ns]
    return [
        (int(earlier) if at_ns - earlier <= longest_ns else at_ns - interval_ns, at_ns)
        for earlier, at_ns in zip(before, series.times_ns, strict=False)
    ]


def _watched(series: Series) -> list[tuple[int, int]]:
    """Return the times in which a series has samples, without their gaps."""
    intervals = _intervals(series)
    if not intervals:
        return []
    cuts = [0]
    cuts += [at for at, (one, two) in enumerate(pairwise(intervals), 1) if two[0] > one[1]]
    return [
        (intervals[start][0], intervals[end - 1][1])
        for start, end in pairwise([*cuts, len(intervals)])
    ]


def _overlap(stretch: Stretch, start_ns: int, end_ns: int) -> int:
    return max(0, min(stretch.end_ns, end_ns) - max(stretch.start_ns, start_ns))
