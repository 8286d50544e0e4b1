"""Assign each second of each rank to one cause, and each lost second to the incident that cost it.

The timeline of `wall_time` is divided further. A restart is divided at the times that the ledger
records: the end of the last process, the decision, the start and the restore. The restore may take
a different time on each rank. For each rank, the parts add up to the wall time, because time that
no record explains gets the cause `unexplained`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.core.accounting.records import (
    IncidentSummary,
    LostCause,
    LostTime,
    Phase,
    RankTime,
)
from holdfast.core.accounting.survival import ExecutedStep
from holdfast.core.ledger.records import Attempt, Event

TESTS_END = (
    "nodes_tested",
    "nodes_not_tested",
    "nodes_test_began",
    "supervisor_followed",
    "supervisor_lost",
    "begun",
)
"""Kinds of events after which the tests of the nodes are over."""

Seconds = dict[tuple[int | None, LostCause], float]
"""Seconds by incident and cause; the key holds the incident's number (None: no incident)."""


@dataclass(frozen=True)
class _Mark:
    """The end of a period that has one cause, in Unix seconds."""

    until_s: float
    cause: LostCause
    incident: int | None


@dataclass(frozen=True)
class _Restore:
    """The end of a rank's restore, in Unix seconds, and the duration of the restore, in seconds."""

    at_s: float
    took_s: float


@dataclass(frozen=True)
class _Window:
    """The period from the start of an attempt's processes to the first step, in Unix seconds."""

    attempt: int
    incident: int | None
    start_s: float
    end_s: float

    def divide(self, seconds: Seconds, restore: _Restore | None) -> None:
        """Add this period to the `seconds` of one rank: start, restore, first step."""
        if restore is None:
            _add(seconds, self.incident, "start", self.end_s - self.start_s)
            return
        began_s = min(max(restore.at_s - restore.took_s, self.start_s), self.end_s)
        restored_s = min(max(restore.at_s, began_s), self.end_s)
        _add(seconds, self.incident, "start", began_s - self.start_s)
        _add(seconds, self.incident, "restore", restored_s - began_s)
        _add(seconds, self.incident, "first_step", self.end_s - restored_s)


@dataclass(frozen=True, kw_only=True)
class Records:
    """The records of one run from which `lost_time` computes its result."""

    start_s: float
    phases: Sequence[Phase]
    attempts: Sequence[Attempt]
    executed: Mapping[int, Sequence[ExecutedStep]]
    incidents: Sequence[IncidentSummary]
    events: Sequence[Event]
    stalls_s: Mapping[int, float]
    ranks: int
    nnodes: int


def lost_time(records: Records) -> LostTime:
    """Return the seconds of all ranks by cause and by incident."""
    return _Account(records).lost_time()


class _Account:
    def __init__(self, records: Records) -> None:
        self._records = records
        self._attempts = {one.number: one for one in records.attempts}
        self._incidents: dict[int, IncidentSummary] = {}
        for cost in records.incidents:
            self._incidents.setdefault(cost.incident.attempt, cost)
        self._decided = _decisions(records.events)
        self._begun_s = [one.at_s for one in records.events if one.kind == "begun"]
        self._lost_s = {
            one.attempt: one.at_s for one in records.events if one.kind == "supervisor_lost"
        }
        self._tests = _tests(records.events)
        self._order = sorted(self._attempts)
        self._places = {number: place for place, number in enumerate(self._order)}

    def lost_time(self) -> LostTime:
        common: Seconds = {}
        stretches = []
        stalls_s = dict(self._records.stalls_s)
        for phase in self._records.phases:
            length_s = phase.end_s - phase.start_s
            if phase.cause in ("productive", "lost", "other") and phase.between_s > 0:
                stall_s = min(phase.between_s, stalls_s.get(phase.attempt, 0.0))
                stalls_s[phase.attempt] = stalls_s.get(phase.attempt, 0.0) - stall_s
                _add(common, None, "saves", stall_s)
                rest: LostCause = "after_end" if phase.cause == "other" else "sections"
                _add(common, None, rest, phase.between_s - stall_s)
                length_s -= phase.between_s
            if phase.cause == "productive":
                _add(common, None, "trained", length_s)
            elif phase.cause == "detecting":
                _add(common, self._number(phase.attempt), "detection", length_s)
            elif phase.cause != "lost" and length_s > 0:
                stretches.append(phase)
        self._add_lost_steps(common)
        return self._of_all_ranks(common, stretches)

    def _of_all_ranks(self, common: Seconds, stretches: Sequence[Phase]) -> LostTime:
        windows = [window for phase in stretches for window in self._divide(common, phase)]
        restores = _restores(self._records.events)
        usual: dict[int, _Restore] = {}
        for rank in sorted(restores):
            usual = {**restores[rank], **usual}  # a rank without a restore waits for the others
        alike: dict[tuple[_Restore | None, ...], list[int]] = {}
        for rank in range(self._records.ranks):
            known = {**usual, **restores.get(rank, {})}
            alike.setdefault(tuple(known.get(one.attempt) for one in windows), []).append(rank)
        by_rank, total = [], Seconds()
        for restored, ranks in alike.items():
            own = dict(common)
            for window, restore in zip(windows, restored, strict=True):
                window.divide(own, restore)
            for (incident, cause), seconds in own.items():
                _add(total, incident, cause, seconds * len(ranks))
            by_rank.append(RankTime(ranks=tuple(ranks), seconds=_by_cause(own)))
        by_incident: dict[int, dict[LostCause, float]] = {}
        for (incident, cause), seconds in total.items():
            if incident is not None:
                by_incident.setdefault(incident, {})[cause] = seconds
        return LostTime(
            ranks=self._records.ranks,
            by_cause=_by_cause(total),
            by_incident=by_incident,
            by_rank=tuple(by_rank),
        )

    def _divide(self, common: Seconds, phase: Phase) -> list[_Window]:
        """Assign a phase without steps to causes; return the period before the first step.

        That period is returned because its division differs from rank to rank (`_Window.divide`).
        """
        cursor_s = self._records.start_s + phase.start_s
        end_s = self._records.start_s + phase.end_s

        def advance(marks: Iterable[_Mark]) -> None:
            nonlocal cursor_s
            for mark in marks:
                until_s = min(mark.until_s, end_s)
                if until_s > cursor_s:
                    _add(common, mark.incident, mark.cause, until_s - cursor_s)
                    cursor_s = until_s

        number, windows = phase.attempt, []
        if number in self._attempts:
            before, incident = self._marks_before(number)
            advance(before)
            own = self._incidents.get(number)
            until_s = end_s if own is None else min(end_s, own.incident.detected_at_s)
            if until_s > cursor_s:
                windows.append(_Window(number, incident, cursor_s, until_s))
                cursor_s = until_s
            if own is not None:
                after, incident = self._marks_of_end(number, math.inf)
                if own.incident.action != "stop":
                    after += self._until_start(math.inf, self._waiting, incident)
                advance(after)
        elif not self._order:
            advance(self._until_start(math.inf, self._waiting, None))
        rest: LostCause = "unexplained" if self._order else self._waiting
        is_over = phase.cause == "other" and self._order
        _add(common, None, "after_end" if is_over else rest, end_s - cursor_s)
        return windows

    @property
    def _waiting(self) -> LostCause:
        """The cause of the time before the processes of an attempt are started."""
        return "nodes_missing" if self._records.nnodes > 1 else "start"

    def _marks_before(self, number: int) -> tuple[list[_Mark], int | None]:
        """Return the marks of the time before an attempt began, and the incident before it."""
        attempt, place = self._attempts[number], self._places[number]
        marks: list[_Mark] = []
        incident = None
        if place > 0:
            marks, incident = self._marks_of_end(self._order[place - 1], attempt.started_at_s)
        is_known = place == 0 or bool(marks) or incident is not None
        cause: LostCause = self._waiting if is_known else "unexplained"
        return [*marks, *self._until_start(attempt.started_at_s, cause, incident)], incident

    def _until_start(self, until_s: float, cause: LostCause, incident: int | None) -> list[_Mark]:
        """Return the marks of the wait for the start of the processes, including node tests."""
        marks = []
        for began_s, ended_s in self._tests:
            if began_s < until_s:
                marks.append(_Mark(began_s, cause, incident))
                marks.append(_Mark(min(ended_s, until_s), "node_tests", incident))
        return [*marks, _Mark(until_s, cause, incident)]

    def _marks_of_end(self, number: int, until_s: float) -> tuple[list[_Mark], int | None]:
        """Return the marks from the end of an attempt to the next start, and the incident to blame.

        The attempt ended by a failure or a stop.

        Args:
            number: the number of the attempt.
            until_s: the start of the next attempt, in Unix seconds.
        """
        incident = self._number(number)
        ended_at_s = self._attempts[number].ended_at_s
        if number in self._lost_s:
            return [_Mark(self._lost_s[number], "not_running", None)], None
        marks = [] if ended_at_s is None else [_Mark(ended_at_s, "teardown", incident)]
        decided = self._decided.get(number)
        if decided is not None:
            at_s, wait_s = decided
            marks.append(_Mark(at_s, "diagnosis", incident))
            if wait_s > 0:
                marks.append(_Mark(at_s + wait_s, "backoff", incident))
        ended_s = -math.inf if ended_at_s is None else ended_at_s
        by_hand_s = [at_s for at_s in self._begun_s if ended_s <= at_s <= until_s]
        if by_hand_s and math.isfinite(until_s):
            marks.append(_Mark(max(by_hand_s), "not_running", None))
            incident = None
        elif decided is None and incident is not None and math.isfinite(until_s):
            marks.append(_Mark(until_s, "unexplained", incident))
        return marks, incident

    def _add_lost_steps(self, common: Seconds) -> None:
        """Assign the time of rolled-back steps to the incidents that caused the rollback."""
        for number in self._order:
            booked_s = sum(
                phase.end_s - phase.start_s - phase.between_s
                for phase in self._records.phases
                if (phase.attempt, phase.cause) == (number, "lost")
            )
            own: dict[int | None, float] = {}
            for step in self._records.executed.get(number, ()):
                if not step.survives:
                    incident = self._rolled_back_by(number, step.record.step)
                    own[incident] = own.get(incident, 0.0) + max(0.0, step.counted_s)
            counted_s = sum(own.values())
            scale = min(1.0, booked_s / counted_s) if counted_s > 0 else 0.0
            for incident, seconds in own.items():
                _add(common, incident, "steps_again", seconds * scale)
            # The rest of the time was spent in the unfinished step that the fault interrupted.
            rest_s = booked_s - counted_s * scale
            _add(common, self._number(number), "steps_again", rest_s)

    def _rolled_back_by(self, number: int, step: int) -> int | None:
        later = [one for one in self._order if one > number]
        for before, attempt in zip([number, *later], later, strict=False):
            start_step = self._attempts[attempt].start_step
            if start_step is not None and start_step < step:
                return self._number(before)
        return self._number(number)

    def _number(self, attempt: int) -> int | None:
        cost = self._incidents.get(attempt)
        return None if cost is None else cost.number


def _decisions(events: Sequence[Event]) -> dict[int, tuple[float, float]]:
    """Return, for each failed attempt, when the decision was made and the wait before the restart.

    The decision's time is in Unix seconds, the wait in seconds.
    """
    decided = {}
    for event in events:
        if event.kind == "decision" and event.data.get("finding", {}).get("kind") == "diagnosed":
            wait_s = event.data.get("plan", {}).get("wait_s")
            decided[event.attempt] = event.at_s, _seconds(wait_s)
    return decided


def _tests(events: Sequence[Event]) -> list[tuple[float, float]]:
    """Return the starts and ends of the node tests, in Unix seconds.

    A test whose end was not recorded ends when its supervisor ends, or when the next attempt
    begins. The end of the last test may be infinite.
    """
    tests: list[tuple[float, float]] = []
    began: Event | None = None
    for event in events:
        if began is not None and (event.kind in TESTS_END or event.attempt > began.attempt):
            tests.append((began.at_s, event.at_s))
            began = None
        if event.kind == "nodes_test_began":
            began = event
    return tests if began is None else [*tests, (began.at_s, math.inf)]


def _restores(events: Sequence[Event]) -> dict[int, dict[int, _Restore]]:
    """Return the first restore of each rank in each attempt, by rank and then by attempt."""
    restores: dict[int, dict[int, _Restore]] = {}
    for event in events:
        if event.kind == "restored" and event.rank is not None:
            restored = _Restore(event.at_s, _seconds(event.data.get("restore_s")))
            restores.setdefault(event.rank, {}).setdefault(event.attempt, restored)
    return restores


def _seconds(value: Any) -> float:
    return max(0.0, float(value)) if isinstance(value, int | float) else 0.0


def _add(seconds: Seconds, incident: int | None, cause: LostCause, more_s: float) -> None:
    if more_s > 0:
        key = (incident, cause)
        seconds[key] = seconds.get(key, 0.0) + more_s


def _by_cause(seconds: Seconds) -> dict[LostCause, float]:
    causes: dict[LostCause, float] = {}
    for (_, cause), value_s in seconds.items():
        causes[cause] = causes.get(cause, 0.0) + value_s
    return causes
