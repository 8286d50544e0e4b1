"""Decide how a job ended: completed, stopped, failed, still running or unknown.

This is decided before the cause. Lines of the kind `ending` state how a job or process ended. If a
log states that the work is done, the job survived all earlier errors in the log. A later error
belongs to the teardown if its kind is one that a process without work can raise. Exit codes from
the supervisor take precedence over the logs.
"""

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import re2

from holdfast.diagnose.explain.newest_step import LAST_STEP
from holdfast.diagnose.explain.scan import Event
from holdfast.diagnose.logs.job_context import JobContext
from holdfast.diagnose.rules.rules import ENDING
from holdfast.diagnose.rules.taxonomy import Ending, Outcome

_AT_TEARDOWN: Final = frozenset(
    {
        "collective_timeout",
        "crash",
        "death",
        "exit",
        "frozen",
        "peer_lost",
        "scheduler",
        "store_lost",
        "suspect",
        "teardown",
        "worker_lost",
    }
)
"""Kinds of events that a process can log after its work is done."""
_FAILED_TEARDOWN: Final = frozenset(
    {"collective_timeout", "crash", "death", "exit", "frozen", "scheduler"}
)
"""The subset of these kinds that mean a failed process; the other kinds are only remarks."""
_OF_TEARDOWN = re2.compile(
    r"(?i)destroy_process_group|\bshut(?:ting)? ?down|\bfinali[sz]|atexit|tear(?:ing)? ?down|__del__|interpreter"
)
"""Matches words of exceptions that the teardown raises."""
_CONFIDENCE: Final[dict[Outcome, float]] = {
    "completed": 0.95,
    "completed_teardown_failed": 0.9,
    "running": 0.3,
    "unknown": 0.2,
}
_ADVICE: Final[dict[Outcome, str]] = {
    "completed": "There is nothing to do.",
    "completed_teardown_failed": "Do not restart the job. Check that the last checkpoint is complete.",
    "running": "The log states no end and no error: the job still runs, or its log is cut off."
    " Check whether its processes are alive.",
    "unknown": "The logs state neither an end nor an error. Give all logs of the job, and what the scheduler says of"
    " the job (`sacct --json`).",
}


@dataclass(frozen=True, kw_only=True)
class End:
    """The way in which a job ended."""

    outcome: Outcome
    stated_by: Event | None = None
    """The event of the line that states the end, or None."""
    survived: frozenset[int] = frozenset()
    """The values `id(event)` of events that cannot be the cause: errors before the work was done.
    """

    @property
    def has_cause(self) -> bool:
        """True if there is a failure or a stop to explain."""
        return self.outcome in ("completed_teardown_failed", "stopped", "failed")

    @property
    def confidence(self) -> float:
        """The confidence in an outcome without a cause, 0 to 1."""
        return _CONFIDENCE[self.outcome]

    @property
    def advice(self) -> str:
        """The advice for a person if there is no cause."""
        return _ADVICE[self.outcome]


def decide_end(events: Sequence[Event], context: JobContext | None = None) -> End:
    """Decide how a job ended.

    A stop from outside counts as a failure here; `stopped_by` separates the two later.

    Args:
        events: all events, including those made from the supervisor's observations.
        context: the supervisor's observations. Their exits take precedence over the logs.
    """
    if context is not None and (context.exits or _failed_otherwise(context)):
        return _by_context(events, context)
    by_logs = _by_logs(events)
    if by_logs is not None:
        return by_logs
    newest = _latest(_stating(events, "step"))
    return End(outcome="unknown" if newest is None else "running", stated_by=newest)


def stopped_by(root: Event | None) -> bool:
    """Return True if `root` states that a person or the scheduler stopped the job."""
    if root is None:
        return False
    return root.rule.ending == "stopped" or (root.rule.kind == "scheduler" and not root.rule.ending)


def _failed_otherwise(context: JobContext) -> bool:
    """Return True if the supervisor observed a failure that exit codes do not show."""
    return (
        context.hang is not None
        or context.broken_loss is not None
        or context.left_rank is not None
        or context.launcher_ended_first
        or context.lost_node is not None
    )


def _by_context(events: Sequence[Event], context: JobContext) -> End:
    ends = _stating(events, "work_done", "job_succeeded", "process_succeeded")
    if not _failed_otherwise(context) and all(one.exit_code == 0 for one in context.exits):
        return End(outcome="completed", stated_by=_latest(ends))
    by_logs = _by_logs(events)
    # A process that SIGKILL ended may have been saving, since the kernel's OOM killer sends
    # SIGKILL.
    was_killed = any(
        one.signal == signal.SIGKILL and one.rank not in context.stopped_ranks
        for one in context.exits
    )
    is_hang_or_exit = not _failed_otherwise(context) or (
        context.hang is not None and context.broken_loss is None and context.lost_node is None
    )
    if (
        is_hang_or_exit
        and not was_killed
        and by_logs is not None
        and by_logs.outcome == "completed_teardown_failed"
    ):
        return by_logs
    return End(outcome="failed")


def _by_logs(events: Sequence[Event]) -> End | None:
    """Return the end that the statements and errors in the logs show, or None."""
    troubles = [
        one
        for one in events
        if one.rule.kind != ENDING
        and not (one.recovered or one.demoted or one.of_generated_program)
    ]
    done = _work_done(events)
    stops = [one for one in troubles if one.rule.kind == "scheduler" and stopped_by(one)]
    if done is None and stops:
        return End(outcome="failed")  # a stop counts as a failure here; see `stopped_by`
    job = _latest(_stating(events, "job_succeeded"))
    if job is not None and not any(
        one.rule.ending == "job_failed"
        or (_is_after(one, job) and (_is_serious(one) or _fails_teardown(one)))
        for one in troubles
    ):
        return End(outcome="completed", stated_by=job)
    if done is not None:
        return _after_the_work(events, troubles, done)
    process = _latest(_stating(events, "process_succeeded"))
    bad = [one for one in troubles if one.rule.kind not in ("teardown", "suspect", "store_lost")]
    if process is not None and not bad:
        return End(outcome="completed", stated_by=process)
    return End(outcome="failed") if troubles else None


def _after_the_work(events: Sequence[Event], troubles: Sequence[Event], done: Event) -> End:
    later = [one for one in troubles if one.log is not done.log or _is_after(one, done)]
    has_failed_end = any(_fails_teardown(one) for one in later)
    # An exception without a traceback that ended no process was logged and handled.
    if any(_is_serious(one) and (one.whole_traceback or has_failed_end) for one in later):
        return End(outcome="failed")
    if not has_failed_end:
        return End(outcome="completed", stated_by=done)
    kept = {id(one) for one in later}
    return End(
        outcome="completed_teardown_failed",
        stated_by=done,
        survived=frozenset(id(one) for one in events if id(one) not in kept),
    )


def _work_done(events: Sequence[Event]) -> Event | None:
    """Return the last statement that the work is done.

    The last step of the training is no such statement if an error follows, since the save after the
    last step may have failed.
    """
    return _latest(
        [
            event
            for event in _stating(events, "work_done")
            if event.rule is not LAST_STEP or not any(_is_trouble(one, event) for one in events)
        ]
    )


def _is_trouble(event: Event, end: Event) -> bool:
    """Return True if `event` is an error after `end`, or an error in another log."""
    return (
        (event.log is not end.log or _is_after(event, end))
        and not (event.recovered or event.demoted)
        and event.rule.kind not in (ENDING, "suspect")
    )


def _stating(events: Iterable[Event], *endings: Ending) -> list[Event]:
    """Return the events that state one of `endings`, unless training continued after them."""
    return [
        one
        for one in events
        if one.rule.kind == ENDING and one.rule.ending in endings and not _went_on(one)
    ]


def _went_on(event: Event) -> bool:
    """Return True if the log has later steps or a restart after `event`."""
    return event.own_progress or event.log.steps.went_on(event.before)


def _latest(events: Sequence[Event]) -> Event | None:
    """Return the last of `events` in its log; of several logs, the first log by name."""
    by_log: dict[int, Event] = {}
    for one in events:
        held = by_log.get(id(one.log))
        if held is None or one.log_line > held.log_line:
            by_log[id(one.log)] = one
    return min(by_log.values(), key=lambda one: (one.file, one.line), default=None)


def _is_after(event: Event, end: Event) -> bool:
    # All lines made from one record (`sacct --json`) have the same line number, so none is before
    # another.
    return event.log is end.log and event is not end and event.log_line >= end.log_line


def _is_serious(event: Event) -> bool:
    """Return True if the event means that a part of the work failed, instead of the teardown."""
    if event.caught == "the interpreter" or _OF_TEARDOWN.search(event.text):
        return False
    return event.rule.kind not in _AT_TEARDOWN


def _fails_teardown(event: Event) -> bool:
    """Return True if the event means a failed process. A requested end is no failure."""
    if event.rule.kind in _FAILED_TEARDOWN:
        return event.rule.kind != "exit" or not stopped_by(event)
    return event.whole_traceback and event.caught != "the interpreter"
