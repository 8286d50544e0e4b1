"""Assign each second of a simulated run to one cause: the classes of the live account."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.core.accounting import LostCause, LostTime, RankTime


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one simulated run.

    Attributes:
        lost_time: the account of all ranks, of the type that live runs have.
        incidents: the cause of each incident; number 1 is the first.
        wall_s: seconds simulated.
        work_s: training that survives, in seconds at full speed.
        completed: the run did all its work.
        interventions: the times that a person was needed.
        restarts: launches after the first.
        decisions: events that the live policy decided on.
        nodes_out: the most nodes under repair at a time.
    """

    lost_time: LostTime
    incidents: tuple[str, ...]
    wall_s: float
    work_s: float
    completed: bool
    interventions: int
    restarts: int
    decisions: int
    nodes_out: int

    @property
    def ettr(self) -> float:
        """The effective training time ratio: seconds of steps that survive, over all seconds."""
        return self.part("trained")

    @property
    def goodput(self) -> float:
        """The training that survives, at full speed, over all seconds: a slow node lowers it."""
        return self.work_s / self.wall_s if self.wall_s else 0.0

    def part(self, cause: LostCause) -> float:
        """Return the part of all seconds that a cause took."""
        total_s = self.lost_time.total_s
        return self.lost_time.by_cause.get(cause, 0.0) / total_s if total_s else 0.0

    def rank_s_by_failure(self) -> dict[str, float]:
        """Return the rank-seconds that each cause of failures cost; saves are no failures."""
        found: dict[str, float] = {}
        for number, name in enumerate(self.incidents, start=1):
            found[name] = found.get(name, 0.0) + self.lost_time.incident_s(number)
        return found

    def failures(self) -> dict[str, int]:
        """Return the number of incidents of each cause."""
        found: dict[str, int] = {}
        for name in self.incidents:
            found[name] = found.get(name, 0) + 1
        return found


@dataclass
class Account:
    """The seconds so far."""

    seconds: dict[LostCause, float] = field(default_factory=dict)
    by_incident: dict[int, dict[LostCause, float]] = field(default_factory=dict)
    incidents: list[str] = field(default_factory=list)

    def add(self, cause: LostCause, seconds: float, incident: int | None = None) -> None:
        """Add seconds of all ranks."""
        if seconds == 0.0:
            return
        self.seconds[cause] = self.seconds.get(cause, 0.0) + seconds
        if incident:
            own = self.by_incident.setdefault(incident, {})
            own[cause] = own.get(cause, 0.0) + seconds

    def take_back(self, seconds: float, incident: int) -> None:
        """Count seconds of training as lost, because the run goes back to an earlier state."""
        self.add("trained", -seconds)
        self.add("steps_again", seconds, incident)

    def lost_time(self, ranks: int, wall_s: float) -> LostTime:
        """Return the account in rank-seconds.

        Raises:
            AssertionError: the causes do not add up to the wall time, to one part in 10^9.
        """
        total_s = math.fsum(self.seconds.values())
        assert math.isclose(total_s, wall_s, rel_tol=1e-9, abs_tol=1e-9), (total_s, wall_s)
        return LostTime(
            ranks=ranks,
            by_cause=_times(self.seconds, ranks),
            by_incident={number: _times(own, ranks) for number, own in self.by_incident.items()},
            by_rank=(RankTime(ranks=tuple(range(ranks)), seconds=dict(self.seconds)),),
        )


def _times(seconds: Mapping[LostCause, float], ranks: int) -> dict[LostCause, float]:
    return {cause: value * ranks for cause, value in seconds.items()}
