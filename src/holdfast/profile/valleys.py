"""Find the times in which a device is idle, and the cause of each: a phase, an incident or unknown.

An idle valley is two or more consecutive samples below 10 % of the run's median. The samples are of
SM activity, or of the best other utilisation metric if no source measures SM activity. Samples of 0
are excluded from the median, so that valleys are also found in a run that is idle most of the time.
"""

import bisect
import heapq
import math
import statistics
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from holdfast.profile.columns import Columns, Words, column, fields
from holdfast.profile.metrics import STEP_PHASE
from holdfast.profile.recording import Recording, Series, Span

ACTIVITY: Final = ("gpu_sm_active", "gpu_utilization", "process_cpu", "cpu_utilization")
"""Metrics that show how busy a device is, the best one first."""
SHARE_OF_MEDIAN: Final = 0.1
MIN_SAMPLES: Final = 2
LONGEST_GAP: Final = 2.5
"""The gap between samples, in sample intervals, above which a device counts as not sampled."""
UNKNOWN: Final = "unknown"
INCIDENT: Final = "incident"
BUBBLE: Final = "pipeline_bubble"
"""The cause of a gap between the phases of a pipeline step: the stage waits for another stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Valley:
    """Hold one time in which one device was idle.

    Attributes:
        cause: a name of `metrics.PHASES`, `incident`, `pipeline_bubble` or `unknown`.
        detail: the number and reason of the incident; empty for other causes.
        covered: the share of the valley that the cause covers, from 0 to 1.
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
        """Return the length of the valley in seconds."""
        return (self.end_ns - self.start_ns) / 1e9


@dataclass(frozen=True, kw_only=True)
class Valleys:
    """Hold the idle valleys of a run, and the values by which they were found.

    Attributes:
        metric: the metric whose samples were used; None if no utilisation was recorded.
        median: the median of the run's samples above 0, in %.
        watched_s: the sampled time of all devices together, in seconds.
    """

    metric: str | None
    median: float
    watched_s: float
    found: tuple[Valley, ...]

    def seconds_by_cause(self) -> dict[str, float]:
        """Return the total seconds of idle valleys for each cause.

        The causes are sorted by seconds, the largest first, and `unknown` comes last.
        """
        totals: dict[str, float] = {}
        for valley in self.found:
            totals[valley.cause] = totals.get(valley.cause, 0.0) + valley.seconds
        return dict(sorted(totals.items(), key=lambda one: (one[0] == UNKNOWN, -one[1])))


@dataclass(frozen=True, slots=True)
class Stretch:
    """Hold an interval of one rank's time with one label, such as a phase or an incident."""

    start_ns: int
    end_ns: int
    label: str
    detail: str = ""


def find_valleys(recording: Recording, *, pipeline: bool = False) -> Valleys:
    """Return every idle valley of a recording, with its cause.

    The cause is chosen in this order:

    1. an incident that covers at least half of the valley
    2. the phase that covers the largest part of the valley; where phases nest, only the inner one
       counts
    3. `unknown`, if the part without any phase is larger than every phase

    Args:
        recording: the recording of a run.
        pipeline: True if the model is cut into pipeline stages. A gap between the phases of a step
            is then labelled as a wait for another stage.
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
    """Return the start and end of each idle time of a series, in Unix ns.

    An idle time is at least two consecutive samples below the threshold. A sample describes the
    interval before it.
    """
    times: list[tuple[int, int]] = []
    run: list[tuple[int, int]] = []
    for (start_ns, end_ns), value in zip(_intervals(series), series.values, strict=True):
        if run and (value >= threshold or start_ns > run[-1][1]):
            if len(run) >= MIN_SAMPLES:
                times.append((run[0][0], run[-1][1]))
            run = []
        if value < threshold:
            run.append((start_ns, end_ns))
    if len(run) >= MIN_SAMPLES:
        times.append((run[0][0], run[-1][1]))
    return times


def local_ranks(recording: Recording) -> dict[str, list[int]]:
    """Return the ranks that were recorded on each node, in ascending order."""
    places = {*fields(recording.spans, "node", "rank"), *fields(recording.memory, "node", "rank")}
    nodes: dict[str, list[int]] = {}
    for node, rank in sorted(places):
        nodes.setdefault(node, []).append(rank)
    return nodes


def ranks_of(series: Series, local: Mapping[str, Sequence[int]]) -> list[int]:
    """Return the ranks to which a series applies.

    These are the series' own rank, else the rank that uses the series' device, else all ranks of
    its node.
    """
    if series.rank is not None:
        return [series.rank]
    ranks = list(local.get(series.node, ()))
    # Launchers give local rank i the device i.
    if series.device is not None and series.device < len(ranks):
        return [ranks[series.device]]
    return ranks


def phases_of_rank(spans: Sequence[Span]) -> Sequence[Stretch]:
    """Return the phases of one rank without overlap; where phases nest, only the inner one counts.

    Args:
        spans: the spans of one rank, in the order of `Recording.spans`.
    """
    return flattened(_phases(spans))


def flattened(intervals: Iterable[tuple[int, int, str]]) -> Sequence[Stretch]:
    """Cut intervals so that none overlap.

    Where intervals overlap, the one that started last counts until its end.

    Args:
        intervals: start, end and label of each, sorted by start. Of two with the same start, the
            longer one comes first.
    """
    starts_ns, ends_ns, labels = array("q"), array("q"), Words()
    open_: list[tuple[int, str]] = []  # end and label; the innermost last
    at_ns = last_ns = 0

    def advance(to_ns: int) -> None:
        nonlocal at_ns
        while open_ and at_ns < to_ns:
            end_ns, label = open_[-1]
            if end_ns <= at_ns:
                open_.pop()
                continue
            until_ns = min(end_ns, to_ns)
            if ends_ns and labels[-1] == label and ends_ns[-1] == at_ns:
                ends_ns[-1] = until_ns
            else:
                starts_ns.append(at_ns)
                ends_ns.append(until_ns)
                labels.insert(len(labels), label)
            at_ns = until_ns
        at_ns = max(at_ns, to_ns)

    for start_ns, end_ns, label in intervals:
        advance(start_ns)
        open_.append((end_ns, label))
        last_ns = max(last_ns, end_ns)
    advance(last_ns)
    return Columns(Stretch, {"start_ns": starts_ns, "end_ns": ends_ns, "label": labels})


def _phases(spans: Sequence[Span]) -> Iterator[tuple[int, int, str]]:
    for phase, start_ns, end_ns in fields(spans, "phase", "start_ns", "end_ns"):
        if phase != STEP_PHASE:
            yield start_ns, end_ns, phase


class _Labels:
    """Look up the phase or incident that covers most of a time."""

    def __init__(self, recording: Recording, *, pipeline: bool) -> None:
        self._local = local_ranks(recording)
        last_ns = max(
            [one.times_ns[-1] for one in recording.series if one.times_ns]
            + [max(column(recording.spans, "end_ns"), default=0)],
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
        self._phases: dict[int, Sequence[Stretch]] = {}
        for rank, own in recording.spans_by_rank():
            steps = _steps(own) if pipeline else ()
            inside_out = heapq.merge(steps, _phases(own), key=lambda one: (one[0], -one[1]))
            self._phases[rank] = flattened(inside_out)

    def ranks_of(self, series: Series) -> list[int]:
        return ranks_of(series, self._local)

    def cause(self, ranks: Sequence[int], start_ns: int, end_ns: int) -> tuple[str, str, float]:
        """Return the cause of an idle time, its detail, and the share of the time it covers."""
        length_ns = end_ns - start_ns
        hit = max(self._incidents, key=lambda one: _overlap(one, start_ns, end_ns), default=None)
        struck_ns = 0 if hit is None else _overlap(hit, start_ns, end_ns)
        if hit is not None and 2 * struck_ns >= length_ns:
            return INCIDENT, hit.detail, struck_ns / length_ns
        covered: dict[str, float] = {}
        for rank in ranks:
            stretches = self._phases.get(rank, ())
            first = bisect.bisect_right(column(stretches, "start_ns"), start_ns) - 1
            for index in range(max(0, first), len(stretches)):
                if stretches[index].start_ns >= end_ns:
                    break
                label = stretches[index].label
                share_ns = _overlap(stretches[index], start_ns, end_ns) / len(ranks)
                covered[label] = covered.get(label, 0.0) + share_ns
        covered[UNKNOWN] = max(0.0, length_ns - sum(covered.values()))
        cause = max(covered, key=lambda label: (covered[label], label))
        return cause, "", covered[cause] / length_ns


def _steps(spans: Sequence[Span]) -> Iterator[tuple[int, int, str]]:
    """Yield start and end of each step of one rank, labelled as a pipeline bubble.

    A step runs from the start of its first phase to the end of its last phase.
    """
    open_: tuple[int, int, int] | None = None
    for step, phase, start_ns, end_ns in fields(spans, "step", "phase", "start_ns", "end_ns"):
        if step is None or phase == STEP_PHASE:
            continue
        if open_ is not None and open_[0] == step:
            open_ = (step, open_[1], max(open_[2], end_ns))
            continue
        if open_ is not None:
            yield open_[1], open_[2], BUBBLE
        open_ = (step, start_ns, end_ns)
    if open_ is not None:
        yield open_[1], open_[2], BUBBLE


def _intervals(series: Series) -> list[tuple[int, int]]:
    interval_ns = round(series.interval_s * 1e9)
    longest_ns = round(LONGEST_GAP * interval_ns)
    before = [-math.inf, *series.times_ns]
    return [
        (int(earlier) if at_ns - earlier <= longest_ns else at_ns - interval_ns, at_ns)
        for earlier, at_ns in zip(before, series.times_ns, strict=False)
    ]


def _watched(series: Series) -> list[tuple[int, int]]:
    """Return the times during which a series has samples without a gap."""
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
