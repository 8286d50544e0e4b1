"""Compute the figures of a period, such as the last week, over all runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.accounting import RunSummary, gpu_hours, summarize
from holdfast.core.accounting.costs import interventions
from holdfast.core.accounting.records import Cause
from holdfast.core.errors import HoldfastError, LedgerError
from holdfast.core.explanation import IncidentStory, story_of
from holdfast.core.ledger import EvaluationRecord, Event, Ledger, NodeRecord, Run
from holdfast.core.paths import RunPaths


@dataclass(frozen=True, kw_only=True)
class PeriodIncident:
    """One incident in the period."""

    run_id: str
    reason: str
    """The reason that the diagnosis gave."""
    story: IncidentStory
    is_recovered: bool
    """True if the policy restarted the job and the job trained again."""


@dataclass(frozen=True, kw_only=True)
class RunInPeriod:
    """The part of one run that lies in the period."""

    run: Run
    state: str
    """The actual state of the run; unlike the ledger's state, it may be `lost`."""
    ranks: int
    wall_s: float
    """Seconds of the run that lie in the period."""
    seconds: Mapping[Cause, float]
    """The seconds in `wall_s` by cause; empty if the steps are unknown."""
    final_step: int
    interventions: int
    """The number of times that a person stopped the run or started the run again."""
    incidents: tuple[PeriodIncident, ...]
    why_unknown: str = ""
    """Why the steps are unknown; empty if they are known."""

    @property
    def gpu_hours(self) -> float:
        """The GPU-hours that the run used in the period."""
        return gpu_hours(self.wall_s * self.ranks)

    @property
    def ettr(self) -> float | None:
        """Effective training time ratio in the period, 0 to 1; None if the steps are unknown."""
        if not self.seconds or self.wall_s <= 0:
            return None
        return self.seconds.get("productive", 0.0) / self.wall_s


@dataclass(frozen=True, kw_only=True)
class Period:
    """The figures of all runs from `since_s` to `until_s`, which are in Unix seconds."""

    since_s: float
    until_s: float
    runs: tuple[RunInPeriod, ...]
    cordoned: tuple[NodeRecord, ...]
    """The nodes that were cordoned in the period and still are."""
    evaluations: tuple[EvaluationRecord, ...]

    @property
    def rank_seconds(self) -> dict[Cause, float]:
        """The rank-seconds of the runs with known steps, by cause."""
        total: dict[Cause, float] = {}
        for run in self.runs:
            for cause, seconds in run.seconds.items():
                total[cause] = total.get(cause, 0.0) + seconds * run.ranks
        return total

    @property
    def incidents(self) -> tuple[PeriodIncident, ...]:
        """The incidents of all runs, in the order of time."""
        found = [one for run in self.runs for one in run.incidents]
        return tuple(sorted(found, key=lambda one: one.story.at_s))

    @property
    def gpu_hours(self) -> float:
        """The GPU-hours of all runs."""
        return sum(run.gpu_hours for run in self.runs)

    @property
    def ettr(self) -> float | None:
        """The mean ETTR of the runs with known steps, weighted by GPU-hours; None without any."""
        seconds = self.rank_seconds
        total_s = sum(seconds.values())
        return seconds.get("productive", 0.0) / total_s if total_s > 0 else None


def period_of(
    ledger: Ledger,
    home: Path,
    since_s: float,
    until_s: float,
    *,
    state_of: Callable[[Run], str],
    progress: Callable[[str, float, float | None], None] = lambda *_: None,
) -> Period:
    """Compute the figures of a period.

    A step survives if it is part of the run's state today. If a phase crosses the start or the end
    of the period, its seconds are divided in proportion to time.

    Args:
        ledger: the ledger.
        home: `$HOLDFAST_HOME`, the folder above the journals of the runs.
        since_s: the start of the period, in Unix seconds.
        until_s: the end of the period, in Unix seconds.
        state_of: returns the actual state of a run, which may be `lost`.
        progress: receives the name of the work, the number of runs done, and the number of all
            runs.

    Raises:
        LedgerError: the ledger cannot be read.
    """
    asked = [
        run
        for run in ledger.runs()
        if run.started_at_s < until_s and (run.ended_at_s is None or run.ended_at_s > since_s)
    ]
    found = []
    for number, run in enumerate(asked):
        progress("reading the runs", number, len(asked))
        part = _part(ledger, home, run, since_s, until_s, state=state_of(run))
        if part.wall_s > 0:  # a lost run may have ended before the period
            found.append(part)
    return Period(
        since_s=since_s,
        until_s=until_s,
        runs=tuple(found),
        cordoned=tuple(
            one for one in ledger.nodes() if since_s <= (one.cordoned_at_s or 0.0) < until_s
        ),
        evaluations=tuple(
            one for one in ledger.evaluations() if since_s <= one.started_at_s < until_s
        ),
    )


def _part(
    ledger: Ledger, home: Path, run: Run, since_s: float, until_s: float, *, state: str
) -> RunInPeriod:
    why = ""
    try:
        summary = summarize(ledger, home, run.run_id)
        if (
            any(one.last_step for one in summary.attempts)
            and not RunPaths(home, run.run_id).steps.exists()
        ):
            why = f"the journal of steps is on {summary.run.host}"
    except LedgerError:
        raise
    except HoldfastError as error:  # one damaged journal must not hide all other runs
        why, summary = str(error), summarize(ledger, home, run.run_id, steps=())
    events = ledger.events(run.run_id)
    start_s = max(since_s, run.started_at_s)
    end_s = min(until_s, summary.run.started_at_s + summary.wall_s)
    return RunInPeriod(
        run=summary.run,
        state=state,
        ranks=summary.world_size or 1,
        wall_s=max(0.0, end_s - start_s),
        seconds={} if why else _clipped(summary, since_s, until_s),
        final_step=max([summary.final_step, *(one.last_step or 0 for one in summary.attempts)]),
        interventions=_interventions(summary, events, until_s)
        - _interventions(summary, events, since_s),
        incidents=tuple(_incidents(summary, events, since_s, until_s)),
        why_unknown=why,
    )


def _clipped(summary: RunSummary, since_s: float, until_s: float) -> dict[Cause, float]:
    """Return the seconds of the run in the period by cause; stalls for saves count as `other`."""
    seconds: dict[Cause, float] = {}
    for phase in summary.phases:
        begin_s = summary.run.started_at_s + phase.start_s
        length_s = phase.end_s - phase.start_s
        inside_s = min(until_s, begin_s + length_s) - max(since_s, begin_s)
        if inside_s <= 0:
            continue
        between_s = phase.between_s * inside_s / length_s
        seconds[phase.cause] = seconds.get(phase.cause, 0.0) + inside_s - between_s
        seconds["other"] = seconds.get("other", 0.0) + between_s
    return seconds


def _interventions(summary: RunSummary, events: Sequence[Event], until_s: float) -> int:
    attempts = [one for one in summary.attempts if one.started_at_s < until_s]
    incidents = [one.incident for one in summary.incidents]
    return interventions(attempts, incidents, [one for one in events if one.at_s < until_s])


def _incidents(
    summary: RunSummary, events: Sequence[Event], since_s: float, until_s: float
) -> list[PeriodIncident]:
    costs = {one.number: one.incident for one in summary.incidents}
    return [
        PeriodIncident(
            run_id=summary.run.run_id,
            reason=str(costs[story.number].diagnosis.get("reason") or "Unknown"),
            story=story,
            is_recovered=costs[story.number].action == "restart"
            and story.resumed_after_s is not None,
        )
        for story in story_of(summary, events).incidents
        if since_s <= story.at_s < until_s
    ]
