"""Which executed steps are part of the final state.

The attempts are walked from the last to the first. An attempt that began from step s leaves of every earlier
one only the steps up to s: it rolled the rest back. Steps that a script executes twice within one attempt
(its own roll-back) are treated alike: the later execution counts.
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
    """One line of the journal with its fate."""

    record: StepRecord
    survives: bool
    covers: int
    """How many steps the line stands for: a script may report every tenth."""
    counted_s: float
    """`step_s`, an attempt's first step without its warm-up."""


def executed_steps(
    state: RunState,
    attempts: Sequence[Attempt],
    records: Mapping[int, Sequence[StepRecord]],
    checkpoints: Iterable[Checkpoint],
) -> dict[int, list[ExecutedStep]]:
    """Every journal line of every attempt, in order, marked with whether it survives.

    The final state of a run that is running or completed is what its last attempt computed. A run that
    stopped or failed leaves its newest checkpoint and nothing else: later steps died with its processes.

    An attempt's first step includes allocations, compilation and cold caches, so it counts as the median of
    that attempt's other surviving steps where that is smaller (of the other steps of the run, where the
    attempt has none).
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
            continue  # nothing is left of this attempt, so it rolled nothing back
        began = [line.step - 1 for line in lines] + [attempt.start_step] * (
            attempt.start_step is not None
        )
        ceiling = min([ceiling, *(step for step in began if step is not None)])
    return survival


def _final_step_limits(
    state: RunState, attempts: Sequence[Attempt], checkpoints: Iterable[Checkpoint]
) -> dict[int, float]:
    """What the end of the run left of its last attempts: the highest surviving step, -inf for nothing."""
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
