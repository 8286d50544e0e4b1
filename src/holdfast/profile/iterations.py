"""Find the iterations of a job from its log, or from the utilisation of its GPUs alone.

From the log, an iteration is the time between two lines with successive step numbers, divided by the steps between.
From the utilisation, an iteration is a stretch of high values between two low ones.
"""

import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from holdfast.profile.columns import Columns, fields
from holdfast.profile.metrics import STEP_PHASE
from holdfast.profile.recording import Recording, Series, Span

STEP_LINE: Final = re.compile(
    r"\b(?:global[_ ]?step|training[_ ]step|iteration|iter|step)s?\b[\"']?\s*[:=#]?\s*(\d+)\b",
    re.IGNORECASE,
)
"""A line with a step's number: `step 12`, `iteration 12/ 1000`, `"global_step": 12`."""
LOW: Final = 20.0
"""Percent below which a GPU rests between two iterations."""
HIGH: Final = 70.0
"""Percent from which a GPU works at an iteration."""
LEAST_LOW_S: Final = 30.0
LEAST_ITERATION_S: Final = 60.0
"""Shorter stretches are noise. Omnistat 1.14 has the same four limits (`inspect/constants.py`)."""
UTILISATIONS: Final = ("gpu_sm_active", "gpu_utilization")
"""The metrics that show iterations, the better one first."""


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration, of one or several steps.

    Attributes:
        start_ns: Unix nanoseconds.
        end_ns: Unix nanoseconds.
        last_step: the last step in it; None if the log names none.
        steps: the number of steps in it; 1 if the log names none.
    """

    start_ns: int
    end_ns: int
    last_step: int | None = None
    steps: int = 1


def step_of(line: str) -> int | None:
    """Return the step that a line of a log names; None if the line names none."""
    match = STEP_LINE.search(line)
    return None if match is None else int(match[1])


def from_lines(lines: Iterable[tuple[int, int]]) -> list[Iteration]:
    """Return the iterations between the lines of a log.

    Args:
        lines: for each line that names a step, the line's time in Unix nanoseconds and the step, in
            their order. If a step number repeats or decreases, as after a restart, the count begins
            anew.
    """
    found = []
    before: tuple[int, int] | None = None
    for at_ns, step in lines:
        if before is not None and step == before[1]:
            continue
        if before is not None and step > before[1] and at_ns > before[0]:
            one = Iteration(
                start_ns=before[0], end_ns=at_ns, last_step=step, steps=step - before[1]
            )
            found.append(one)
        before = at_ns, step
    return found


def from_utilisation(series: Series) -> list[Iteration]:
    """Return the iterations that the utilisation of one GPU shows.

    An iteration begins at the first value of at least `HIGH` and ends at the last such value before
    a stretch of values below `LOW` that lasts `LEAST_LOW_S`. The last iteration of a series may go
    on, and is left out.
    """
    found: list[Iteration] = []
    start_ns: int | None = None
    last_high_ns = 0
    low_since_ns: int | None = None
    for at_ns, value in zip(series.times_ns, series.values, strict=True):
        if value >= HIGH:
            start_ns = at_ns if start_ns is None else start_ns
            last_high_ns = at_ns
        if value >= LOW:
            low_since_ns = None
            continue
        low_since_ns = at_ns if low_since_ns is None else low_since_ns
        if start_ns is not None and at_ns - low_since_ns >= LEAST_LOW_S * 1e9:
            if last_high_ns - start_ns >= LEAST_ITERATION_S * 1e9:
                found.append(Iteration(start_ns=start_ns, end_ns=last_high_ns))
            start_ns = None
    return found


def iterations_of(recording: Recording) -> tuple[Sequence[Iteration], str]:
    """Return the iterations of a recording, and their source.

    Returns:
        the iterations in the order of time, and their source: `phases`, `log`, the name of a
        metric, or an empty text if there is no source.
    """
    mine = recording.spans_of(min(recording.ranks, default=0))
    if found := _of_spans(mine, logged=True):
        return found, "log"
    if found := _of_spans(mine, logged=False):
        return found, "phases"
    for metric in UTILISATIONS:
        for series in recording.of(metric):
            if found := from_utilisation(series):
                return found, metric
    return [], ""


def typical_s(iterations: Sequence[Iteration]) -> float | None:
    """Return the median seconds of a step; None without iterations."""
    if not iterations:
        return None
    times_ns = array("d", ((one.end_ns - one.start_ns) / one.steps for one in iterations))
    return median(times_ns) / 1e9


def _of_spans(spans: Sequence[Span], *, logged: bool) -> Sequence[Iteration]:
    """Return the steps of one rank, from the spans of the log's steps or from the phases."""
    starts_ns, ends_ns, steps = array("q"), array("q"), array("q")
    for phase, start_ns, end_ns, step in fields(spans, "phase", "start_ns", "end_ns", "step"):
        if step is None or (logged and phase != STEP_PHASE):
            continue
        if not logged and steps and steps[-1] == step:
            ends_ns[-1] = max(ends_ns[-1], end_ns)
            continue
        starts_ns.append(start_ns)
        ends_ns.append(end_ns)
        steps.append(step)
    return Columns(Iteration, {"start_ns": starts_ns, "end_ns": ends_ns, "last_step": steps})
