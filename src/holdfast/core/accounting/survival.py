"""Determine which executed steps are part of the final state.

The attempts are examined from the last to the first. An attempt that began from step s has rolled
back all steps above s of every earlier attempt. If a script itself rolls back within an attempt,
the script executes some steps twice, and only the later execution counts.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.core.ledger.records import Attempt, Checkpoint, RunState
from holdfast.core.telemetry import StepRecord

UNUSABLE_STATES = frozenset({"damaged", "incomplete"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutedStep:
    """One line of the journal, with the information whether the line's steps survive."""

    record: StepRecord
    survives: bool
    covers: int
    """The number of steps that the line reports; a script may report only every tenth step."""
    counted_s: float
    """`step_s` of the record; for the first step of an attempt, without the warm-up."""


def executed_steps(
    state: RunState,
    attempts: Sequence[Attempt],
    records: Mapping[int, Sequence[StepRecord]],
    checkpoints: Iterable[Checkpoint],
) -> dict[int, list[ExecutedStep]]:
    """Return the journal lines of each attempt, in order, and mark the lines whose steps survive.

    A running or completed run ends in the state of its last attempt. A stopped or failed run leaves
    only its newest usable checkpoint, so all later steps are lost.

    An attempt's first step includes allocations, compilation and cold caches. So this step counts
    with at most the median time of the attempt's other surviving steps. If there are no other
    steps, the median of the run is the limit.
    """
    survival = _survival(attempts, records, _final_step_limits(state, attempts, checkpoints))
    later_s = [record.step_s for of_attempt in records.values() for record in of_attempt[1:]]
    usual_s = statistics.median(later_s) if later_s else math.inf
    executed = {}
    for attempt in attempts:
        lines = records.get(attempt.number, ())
        kept = survival[attempt.number]
        others_s = [
            line.step_s for line, survives in zip(lines[1:], kept[1:], strict=True) if survives
        ]
        first_limit_s = statistics.median(others_s) if others_s else usual_s
        before = attempt.start_step
        marked = []
        for index, (line, survives) in enumerate(zip(lines, kept, strict=True)):
            covers = 1 if before is None or line.step < before else line.step - before
            counted_s = min(line.step_s, first_limit_s) if index == 0 else line.step_s
            marked.append(
                ExecutedStep(record=line, survives=survives, covers=covers, counted_s=counted_s)
            )
            before = line.step
        executed[attempt.number] = marked
    return executed


def _survival(
    attempts: Sequence[Attempt],
    records: Mapping[int, Sequence[StepRecord]],
    final_limits: Mapping[int, float],
) -> dict[int, list[bool]]:
    survival: dict[int, list[bool]] = {}
    # The highest step that a line may have and still survive.
    ceiling = math.inf
    for attempt in reversed(attempts):
        lines = records.get(attempt.number, ())
        limit = min(ceiling, final_limits.get(attempt.number, math.inf))
        kept = []
        for index in range(len(lines) - 1, -1, -1):
            step = lines[index].step
            kept.append(step <= limit)
            # A script may report one step in two lines, its loss and then its validation loss.
            again = index > 0 and lines[index - 1].step == step
            limit = min(limit, step if again else step - 1)
        survival[attempt.number] = kept[::-1]
        if final_limits.get(attempt.number) == -math.inf:
            continue  # no step of this attempt survives, so the attempt rolled back no earlier step
        began = [line.step - 1 for line in lines] + [attempt.start_step] * (
            attempt.start_step is not None
        )
        ceiling = min([ceiling, *(step for step in began if step is not None)])
    return survival


def _final_step_limits(
    state: RunState, attempts: Sequence[Attempt], checkpoints: Iterable[Checkpoint]
) -> dict[int, float]:
    """Return, for each attempt, the highest step that survives the end of the run.

    The limit is -inf if no step of the attempt survives. An attempt without a limit is not in the
    result.
    """
    if state in ("running", "completed"):
        return {}
    usable = [mark for mark in checkpoints if mark.state not in UNUSABLE_STATES]
    limits: dict[int, float] = {}
    for attempt in reversed(attempts):
        known = [mark.step for mark in usable if mark.attempt == attempt.number]
        if attempt.start_step is not None:
            known.append(attempt.start_step)
        limits[attempt.number] = max(known, default=-math.inf)
        if known:
            break
    return limits
