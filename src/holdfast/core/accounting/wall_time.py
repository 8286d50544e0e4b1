"""Assign each second of the run to exactly one cause.

A cursor moves from the run's start to the run's end, and never backwards. The time that the cursor
passes is assigned to one cause at each move. So the parts always add up to the wall time, even if a
clock was set back or a record is missing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.core.accounting.records import Cause, Phase, TimeBreakdown
from holdfast.core.accounting.survival import ExecutedStep


@dataclass(frozen=True, kw_only=True)
class Outage:
    """The Unix times of a fault that ended an attempt, and of the detection of this fault."""

    fault_at_s: float
    detected_at_s: float


class _Tape:
    """The timeline up to a cursor, in seconds since the run's start."""

    def __init__(self, start_s: float, end_s: float) -> None:
        self.start_s = start_s
        self.length_s = max(0.0, end_s - start_s)
        self.cursor_s = 0.0
        self.seconds: dict[Cause, float] = {}
        self.phases: list[Phase] = []

    def span_to(self, at_s: float) -> float:
        """Return the seconds from the cursor to a Unix time.

        Times after the run's end count as the run's end. For times before the cursor the result is
        0.
        """
        return max(0.0, min(at_s - self.start_s, self.length_s) - self.cursor_s)

    def spend(
        self, seconds: float, cause: Cause, attempt: int, *, parts: Mapping[Cause, float]
    ) -> None:
        """Move the cursor by `seconds`, and append a phase of `cause` to the timeline.

        `parts` holds the seconds by cause. The seconds that no part names are the phase's
        `between_s`.
        """
        if seconds <= 0:
            return
        end_s = self.cursor_s + seconds
        between_s = max(0.0, seconds - sum(parts.values()))
        for part, part_s in parts.items():
            self.seconds[part] = self.seconds.get(part, 0.0) + part_s
        last = self.phases[-1] if self.phases else None
        if last is not None and (last.attempt, last.cause) == (attempt, cause):
            between_s += last.between_s
            self.phases[-1] = replace(last, end_s=end_s, between_s=between_s)
        else:
            start_s = self.cursor_s
            self.phases.append(
                Phase(
                    attempt=attempt,
                    cause=cause,
                    start_s=start_s,
                    end_s=end_s,
                    between_s=between_s,
                )
            )
        self.cursor_s = end_s

    def pass_to(self, at_s: float, cause: Cause, attempt: int) -> None:
        """Move the cursor to a Unix time, and assign all the time in between to one cause."""
        seconds = self.span_to(at_s)
        self.spend(seconds, cause, attempt, parts={cause: seconds})


def wall_time(
    *,
    start_s: float,
    end_s: float,
    running: bool,
    attempts: Sequence[int],
    steps: Mapping[int, Sequence[ExecutedStep]],
    outages: Mapping[int, Outage],
    stalls_s: Mapping[int, float],
) -> tuple[TimeBreakdown, tuple[Phase, ...]]:
    """Assign the time from `start_s` to `end_s` to causes; return it with the timeline.

    Args:
        start_s: the run's first start, in Unix seconds.
        end_s: the run's end, in Unix seconds; the time of the last record if there is no end.
        running: True if the ledger has the run as `running`.
        attempts: the numbers of the attempts, in order.
        steps: the steps of each attempt, in order.
        outages: the outages of the attempts that ended in an incident.
        stalls_s: by attempt, the seconds that training stood still for checkpoints.
    """
    tape = _Tape(start_s, end_s)
    for index, attempt in enumerate(attempts):
        starting: Cause = "starting" if index == 0 else "restarting"
        outage = outages.get(attempt)
        last = index == len(attempts) - 1
        between_s = _steps(tape, attempt, steps.get(attempt, ()), starting)
        if outage is not None:
            tape.pass_to(outage.fault_at_s, "lost" if steps.get(attempt) else starting, attempt)
            tape.pass_to(outage.detected_at_s, "detecting", attempt)
        if last and outage is not None:
            tape.pass_to(end_s, "restarting" if running else "other", attempt)
        elif last and running and any(steps.values()) and not steps.get(attempt):
            tape.pass_to(end_s, starting, attempt)  # the attempt has no first step yet
        elif last:
            # No incident ended the run: this time has the last save and the exit of the processes.
            seconds = tape.span_to(end_s)
            between_s += seconds
            tape.spend(seconds, "other", attempt, parts={})
        stall_s = min(between_s, stalls_s.get(attempt, 0.0))
        tape.seconds["checkpoint"] = tape.seconds.get("checkpoint", 0.0) + stall_s
        tape.seconds["other"] = tape.seconds.get("other", 0.0) + between_s - stall_s
    if not attempts:
        tape.pass_to(end_s, "other", 0)
    return _breakdown(tape.seconds), tuple(tape.phases)


def _steps(tape: _Tape, attempt: int, steps: Sequence[ExecutedStep], starting: Cause) -> float:
    """Add an attempt's steps to the timeline.

    Returns:
        The seconds between the steps, which have no cause yet.
    """
    between_s = 0.0
    for index, step in enumerate(steps):
        span_s = tape.span_to(step.record.at_s)
        counted_s = min(span_s, max(0.0, step.counted_s))
        rest_s = span_s - counted_s
        cause: Cause = "productive" if step.survives else "lost"
        if index == 0:
            tape.spend(rest_s, starting, attempt, parts={starting: rest_s})
            tape.spend(counted_s, cause, attempt, parts={cause: counted_s})
        else:
            between_s += rest_s
            tape.spend(span_s, cause, attempt, parts={cause: counted_s})
    return between_s


def _breakdown(seconds: Mapping[Cause, float]) -> TimeBreakdown:
    return TimeBreakdown(
        productive_s=seconds.get("productive", 0.0),
        lost_s=seconds.get("lost", 0.0),
        detecting_s=seconds.get("detecting", 0.0),
        restarting_s=seconds.get("restarting", 0.0),
        starting_s=seconds.get("starting", 0.0),
        checkpoint_s=seconds.get("checkpoint", 0.0),
        other_s=seconds.get("other", 0.0),
    )
