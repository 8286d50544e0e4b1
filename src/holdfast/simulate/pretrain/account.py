"""Assign each second of a simulated run to one cause, from the same list as in live runs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.core.accounting import LostCause, LostTime, RankTime


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one simulated run.

    Attributes:
        lost_time: the time of all ranks by cause, in the type that live runs use.
        incidents: the cause of each incident, in order; incident 1 comes first.
        wall_s: seconds simulated.
        work_s: the training that no failure undid, in seconds at full speed.
        completed: True if the run did all its work.
        interventions: how many times a person was needed.
        restarts: the number of launches after the first.
        decisions: the number of events on which the live policy decided.
        nodes_out: the largest number of nodes under repair at the same time.
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
        """The effective training time ratio: the share of seconds in steps that no failure undid."""
        return self.part("trained")

    @property
    def goodput(self) -> float:
        """The training that no failure undid, in seconds at full speed, over all seconds.

        Unlike the ETTR, the goodput falls if a slow node slows the job down.
        """
        return self.work_s / self.wall_s if self.wall_s else 0.0

    def part(self, cause: LostCause) -> float:
        """Return the share of all seconds that a cause took, 0 to 1."""
        total_s = self.lost_time.total_s
        return self.lost_time.by_cause.get(cause, 0.0) / total_s if total_s else 0.0

    def rank_s_by_failure(self) -> dict[str, float]:
        """Return the rank-seconds that failures of each cause cost; saves do not count."""
        found: dict[str, float] = {}
        for number, name in enumerate(self.incidents, start=1):
            found[name] = found.get(name, 0.0) + self.lost_time.incident_s(number)
        return found

    def failures(self) -> dict[str, int]:
        """Return the number of incidents by cause."""
        found: dict[str, int] = {}
        for name in self.incidents:
            found[name] = found.get(name, 0) + 1
        return found


@dataclass
class Account:
    """The seconds of a run so far, by cause and by incident."""

    seconds: dict[LostCause, float] = field(default_factory=dict)
    by_incident: dict[int, dict[LostCause, float]] = field(default_factory=dict)
    incidents: list[str] = field(default_factory=list)

    def add(self, cause: LostCause, seconds: float, incident: int | None = None) -> None:
        """Add seconds to a cause, and to the incident with the number `incident`, if given."""
        if seconds == 0.0:
            return
        self.seconds[cause] = self.seconds.get(cause, 0.0) + seconds
        if incident:
            own = self.by_incident.setdefault(incident, {})
            own[cause] = own.get(cause, 0.0) + seconds

    def take_back(self, seconds: float, incident: int) -> None:
        """Count seconds of training as lost to an incident that makes the run go back."""
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
