"""Define the results of a run's accounting.

Times are seconds since the run's start, unless a field is in Unix seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from holdfast.core.ledger.records import Attempt, Incident, Run

Cause = Literal["productive", "lost", "detecting", "restarting", "starting", "checkpoint", "other"]

LostCause = Literal[
    "trained",
    "steps_again",
    "saves",
    "sections",
    "detection",
    "teardown",
    "diagnosis",
    "backoff",
    "nodes_missing",
    "node_tests",
    "start",
    "restore",
    "first_step",
    "not_running",
    "after_end",
    "unexplained",
]
"""The causes in the account of each rank's seconds; `LOST_CAUSES` describes each one."""

LOST_CAUSES: Mapping[LostCause, str] = {
    "trained": "steps that survive",
    "steps_again": "steps rolled back and made again, and steps broken off",
    "saves": "training stood still for a save",
    "sections": "evaluations and other sections without steps",
    "detection": "from the fault to its detection",
    "teardown": "until the last process of the job had ended",
    "diagnosis": "until it was decided what to do",
    "backoff": "the wait before a restart that may not help",
    "nodes_missing": "the wait for nodes",
    "node_tests": "tests of the nodes, to find a faulty one",
    "start": "the start of the processes, imports and process groups",
    "restore": "reading the checkpoint",
    "first_step": "from the restore to the first step, without that step's usual time: compilation, caches",
    "not_running": "the run had ended, until a person resumed it",
    "after_end": "from the last step to the end of the run",
    "unexplained": "no record says what it was",
}


@dataclass(frozen=True, kw_only=True)
class TimeBreakdown:
    """The wall time by cause. The parts do not overlap, and their sum is the wall time."""

    productive_s: float
    """Time of the steps that survive in the final state."""
    lost_s: float
    """Time of steps that were rolled back, and of the unfinished steps that faults interrupted."""
    detecting_s: float
    """From each fault to its detection."""
    restarting_s: float
    """From each detection to the next completed step, without that step's own time."""
    starting_s: float
    """From the first start to its first completed step, without that step's own time."""
    checkpoint_s: float
    """Stalls of the training for checkpoints that became durable."""
    other_s: float
    """Evaluation, other sections without steps, and the run's end."""

    @property
    def total_s(self) -> float:
        """The wall time, which is the sum of the parts."""
        return sum(self.by_cause().values())

    def by_cause(self) -> dict[Cause, float]:
        """Return the seconds of each cause, in the order in which reports list the causes."""
        return {
            "productive": self.productive_s,
            "lost": self.lost_s,
            "detecting": self.detecting_s,
            "restarting": self.restarting_s,
            "starting": self.starting_s,
            "checkpoint": self.checkpoint_s,
            "other": self.other_s,
        }


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A period of the timeline that has one cause and belongs to one attempt.

    A period of steps includes the checkpoints and evaluations between the steps.
    """

    attempt: int
    cause: Cause
    start_s: float
    end_s: float
    between_s: float = 0.0
    """The seconds of this period that went to checkpoints and evaluations, not to `cause`."""


@dataclass(frozen=True, kw_only=True)
class RankTime:
    """The seconds by cause of ranks that all have the same figures."""

    ranks: tuple[int, ...]
    seconds: Mapping[LostCause, float]
    """Seconds of each of these ranks by cause; the sum is the run's wall time."""


@dataclass(frozen=True, kw_only=True)
class LostTime:
    """The seconds of all ranks by cause, in rank-seconds (seconds times ranks)."""

    ranks: int
    by_cause: Mapping[LostCause, float]
    """Rank-seconds by cause; the sum is the run's wall time times its ranks."""
    by_incident: Mapping[int, Mapping[LostCause, float]]
    """The rank-seconds that each incident cost, by the incident's number and by cause."""
    by_rank: tuple[RankTime, ...]

    @property
    def total_s(self) -> float:
        """The rank-seconds of the run: the wall time times the number of ranks."""
        return sum(self.by_cause.values())

    def incident_s(self, number: int) -> float:
        """Return the rank-seconds that an incident has cost."""
        return sum(self.by_incident.get(number, {}).values())

    @property
    def unexplained_share(self) -> float:
        """The share of the rank-seconds, 0 to 1, that no record explains."""
        return self.by_cause.get("unexplained", 0.0) / self.total_s if self.total_s > 0 else 0.0


def gpu_hours(rank_s: float) -> float:
    """Convert rank-seconds to GPU-hours; each rank holds one GPU."""
    return rank_s / 3600


class Point(NamedTuple):
    """One value of a curve, at one step."""

    step: int
    value: float


@dataclass(frozen=True, kw_only=True)
class LostSegment:
    """Consecutive steps of one attempt that were rolled back."""

    attempt: int
    points: tuple[Point, ...]


@dataclass(frozen=True, kw_only=True)
class LossCurve:
    """The reported losses, in step order. NaN and infinities are kept."""

    surviving: tuple[Point, ...]
    lost: tuple[LostSegment, ...]
    validation: tuple[Point, ...]
    """The values of the metric `val_loss` at surviving steps."""


@dataclass(frozen=True, kw_only=True)
class PassedOver:
    """A checkpoint that did not verify, so that an older one was restored in its place."""

    step: int
    path: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class IncidentSummary:
    """One incident with its cost in seconds and steps."""

    number: int
    """The number of the incident in its run, from 1."""
    incident: Incident
    injected: tuple[Mapping[str, Any], ...]
    """Data of the `fault_injected` events of the same attempt, up to the detection."""
    fault_at_s: float
    """Unix time of the last event in `injected`; without such an event, `Incident.fault_at_s`."""
    seconds_to_detect: float
    seconds_to_restart: float | None
    """Seconds from the detection to the next completed step; None if there was no such step."""
    steps_lost: int | None
    """Steps that were completed before the incident and that the restored state does not include.

    None if the incident's step or the restored step is unknown.
    """
    restore_s: float | None
    """Seconds of the restart spent on reading the checkpoint."""
    passed_over: tuple[PassedOver, ...]
    node: str | None = None
    """The node of the rank at fault; without a rank at fault, the lost node; None if unknown."""
    cordoned: tuple[str, ...] = ()
    """The nodes cordoned because the tests after the incident found them to be bad."""


@dataclass(frozen=True, kw_only=True)
class AttemptCheckpoints:
    """The checkpoints that became durable in one attempt, or in all attempts (attempt 0)."""

    attempt: int
    count: int
    first_step: int
    last_step: int
    size_bytes: int
    """The size of the newest checkpoint."""
    total_stall_s: float
    mean_stall_s: float
    median_stall_s: float
    max_stall_s: float


@dataclass(frozen=True, kw_only=True)
class CheckpointSummary:
    """The number of the checkpoints of a run, and the time that training stood still for them."""

    count: int
    damaged: int
    """The number of checkpoints that were later found to be damaged or incomplete."""
    total_stall_s: float
    share_of_wall: float
    """Stall seconds / wall seconds, 0 to 1."""
    overall: AttemptCheckpoints | None
    """The figures of all checkpoints of the run; None if there is no checkpoint."""
    by_attempt: tuple[AttemptCheckpoints, ...]


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The content of a run's report."""

    run: Run
    attempts: tuple[Attempt, ...]
    world_size: int | None
    wall_s: float
    """Seconds from the first start to the run's end, or to the last record if there is no end."""
    final_step: int
    """Steps completed in the final state."""
    steps_executed: int
    steps_lost: int
    """The number of executed steps that were rolled back."""
    median_step_s: float | None
    breakdown: TimeBreakdown
    ettr: float | None
    """ETTR, the effective training time ratio, 0 to 1; None at wall time 0.

    The value is `breakdown.productive_s / wall_s`.
    """
    phases: tuple[Phase, ...]
    incidents: tuple[IncidentSummary, ...]
    interventions: int
    """The number of times that a person stopped the run or started the run again."""
    lost_time: LostTime
    checkpoints: CheckpointSummary
    loss: LossCurve
    proof: Mapping[str, Any] | None
    """Data of the newest `proof` event: a comparison of the final weights with a reference run."""
    metrics: Mapping[str, tuple[Point, ...]]
    """The values of `steps per second`, and of each number that the script reported, by step.

    Only surviving steps have values.
    """
