"""Find the iterations of a job from its log, or from the utilisation of its GPUs.

In a log, an iteration is the time between two lines with successive step numbers. If the log prints
only every n-th step, the iteration covers n steps. In the utilisation of a GPU, an iteration is a
stretch of high values between two stretches of low values.
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
"""A step number in a line of a log: `step 12`, `iteration 12/ 1000`, `"global_step": 12`."""
LOW: Final = 20.0
"""Utilisation in percent below which a GPU counts as idle between two iterations."""
HIGH: Final = 70.0
"""Utilisation in percent from which on a GPU counts as working on an iteration."""
MIN_LOW_S: Final = 30.0
MIN_ITERATION_S: Final = 60.0
"""Shorter stretches of high utilisation are ignored as noise.

Omnistat 1.14 has the same four limits `LOW`, `HIGH`, `MIN_LOW_S` and `MIN_ITERATION_S`
(`inspect/constants.py`).
"""
UTILISATIONS: Final = ("gpu_sm_active", "gpu_utilization")
"""Metrics in which iterations can be recognized, the best one first."""


@dataclass(frozen=True, slots=True)
class Iteration:
    """The time of one iteration, which covers one or more steps.

    Attributes:
        start_ns: start, in Unix nanoseconds.
        end_ns: end, in Unix nanoseconds.
        last_step: the number of the last step of the iteration; None if no step number is known.
        steps: the number of steps in the iteration; 1 if no step number is known.
    """

    start_ns: int
    end_ns: int
    last_step: int | None = None
    steps: int = 1


def step_of(line: str) -> int | None:
    """Return the step number in a line of a log, or None if the line contains none."""
    match = STEP_LINE.search(line)
    return None if match is None else int(match[1])


def from_lines(lines: Iterable[tuple[int, int]]) -> list[Iteration]:
    """Return the iterations between the lines of a log.

    Args:
        lines: for each line that contains a step number, its time in Unix nanoseconds and the step
            number, in the order of the log. If the step number decreases, as it does after a
            restart, no iteration spans the two lines. A repeated step number is ignored.
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

    An iteration starts at the first value of at least `HIGH`. It ends at the last such value before
    the values stay below `LOW` for at least `MIN_LOW_S`. The last iteration of a series may be
    unfinished, so it is left out.
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
        if start_ns is not None and at_ns - low_since_ns >= MIN_LOW_S * 1e9:
            if last_high_ns - start_ns >= MIN_ITERATION_S * 1e9:
                found.append(Iteration(start_ns=start_ns, end_ns=last_high_ns))
            start_ns = None
    return found


def iterations_of(recording: Recording) -> tuple[Sequence[Iteration], str]:
    """Return the iterations of a recording, and the source that showed them.

    Returns:
        The iterations in chronological order, and their source: `log`, `phases` or the name of a
            metric. Without any source the list and the name are empty.
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
    """Return the median duration of a step in seconds; None if there are no iterations."""
    if not iterations:
        return None
    times_ns = array("d", ((one.end_ns - one.start_ns) / one.steps for one in iterations))
    return median(times_ns) / 1e9


def _of_spans(spans: Sequence[Span], *, logged: bool) -> Sequence[Iteration]:
    """Return the steps of one rank as iterations.

    A step that phases show lasts until the next step begins, since time between the phases is part
    of the step. The last step before a gap in the step numbers ends with its last phase.

    Args:
        spans: the recorded spans of one rank.
        logged: True to use only the steps that were found in the log, False to use the phases of
            all steps.
    """
    starts_ns, ends_ns, steps = array("q"), array("q"), array("q")
    for phase, start_ns, end_ns, step in fields(spans, "phase", "start_ns", "end_ns", "step"):
        if step is None or (logged and phase != STEP_PHASE):
            continue
        if not logged and steps and steps[-1] == step:
            ends_ns[-1] = max(ends_ns[-1], end_ns)
            continue
        if not logged and steps and steps[-1] + 1 == step:
            ends_ns[-1] = start_ns
        starts_ns.append(start_ns)
        ends_ns.append(end_ns)
        steps.append(step)
    return Columns(Iteration, {"start_ns": starts_ns, "end_ns": ends_ns, "last_step": steps})
