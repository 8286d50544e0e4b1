"""What the accounting of a run says. Times without a date are seconds since the run's start."""

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
"""The causes of the account of each rank's seconds; `LOST_CAUSES` says what each one is."""

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
    """Where the wall time went. The parts do not overlap and add up to it."""

    productive_s: float
    """Steps that survive in the final state."""
    lost_s: float
    """Steps executed and rolled back, and the unfinished step that a fault broke off."""
    detecting_s: float
    """From each fault to its detection."""
    restarting_s: float
    """From each detection to the next completed step, without that step's own time."""
    starting_s: float
    """From the first start to its first completed step, without that step's own time."""
    checkpoint_s: float
    """Training stood still for a checkpoint that became durable."""
    other_s: float
    """Evaluation, other sections without steps, and the run's end."""

    @property
    def total_s(self) -> float:
        """The sum of the parts: the wall time."""
        return sum(self.by_cause().values())

    def by_cause(self) -> dict[Cause, float]:
        """Seconds of each cause, in the order in which reports list them."""
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
    """A stretch of the time line. Stretches of steps include the checkpoints and evaluations between them."""

    attempt: int
    cause: Cause
    start_s: float
    end_s: float
    between_s: float = 0.0
    """Seconds of the stretch that are not of its cause: checkpoints and evaluations."""


@dataclass(frozen=True, kw_only=True)
class RankTime:
    """The account of some ranks whose seconds are alike."""

    ranks: tuple[int, ...]
    seconds: Mapping[LostCause, float]
    """Of each of these ranks; the sum is the run's wall time."""


@dataclass(frozen=True, kw_only=True)
class LostTime:
    """Each second of each rank by its cause. All are rank-seconds: seconds times ranks."""

    ranks: int
    by_cause: Mapping[LostCause, float]
    """The sum is the run's wall time times its ranks."""
    by_incident: Mapping[int, Mapping[LostCause, float]]
    """Of these, what each incident has cost, by the incident's number."""
    by_rank: tuple[RankTime, ...]

    @property
    def total_s(self) -> float:
        """The rank-seconds of the run."""
        return sum(self.by_cause.values())

    def incident_s(self, number: int) -> float:
        """Return the rank-seconds that an incident has cost."""
        return sum(self.by_incident.get(number, {}).values())

    @property
    def unexplained_share(self) -> float:
        """The part of the rank-seconds, 0 to 1, that no record explains."""
        return self.by_cause.get("unexplained", 0.0) / self.total_s if self.total_s > 0 else 0.0


def gpu_hours(rank_s: float) -> float:
    """Return the GPU-hours of rank-seconds: each rank holds one GPU."""
    return rank_s / 3600


class Point(NamedTuple):
    """One value of a curve."""

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
    """`metrics["val_loss"]` of surviving steps."""


@dataclass(frozen=True, kw_only=True)
class PassedOver:
    """A newer checkpoint that did not verify, so that an older one was restored."""

    step: int
    path: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class IncidentSummary:
    """One incident with what it cost."""

    number: int
    """1 for the run's first incident."""
    incident: Incident
    injected: tuple[Mapping[str, Any], ...]
    """Data of this attempt's `fault_injected` events up to the detection; empty where none is recorded."""
    fault_at_s: float
    """Unix time of the last of those events, else `Incident.fault_at_s`."""
    seconds_to_detect: float
    seconds_to_restart: float | None
    """From the detection to the next completed step; None where the job did not go on."""
    steps_lost: int | None
    """Completed before the incident and not in the state restored; None where the job did not go on."""
    restore_s: float | None
    """Of those seconds to restart, how long reading the checkpoint took."""
    passed_over: tuple[PassedOver, ...]
    node: str | None = None
    """The node of the rank at fault, else the lost node; None where neither is known."""
    cordoned: tuple[str, ...] = ()
    """The nodes that the tests after the incident found to be bad, and that were cordoned."""


@dataclass(frozen=True, kw_only=True)
class AttemptCheckpoints:
    """The checkpoints that became durable in one attempt, or, with attempt 0, in all."""

    attempt: int
    count: int
    first_step: int
    last_step: int
    size_bytes: int
    """Of the newest one."""
    total_stall_s: float
    mean_stall_s: float
    median_stall_s: float
    max_stall_s: float


@dataclass(frozen=True, kw_only=True)
class CheckpointSummary:
    """What checkpoints cost."""

    count: int
    damaged: int
    """Of those, how many were found damaged or incomplete since."""
    total_stall_s: float
    share_of_wall: float
    """Stall seconds / wall seconds, 0 to 1."""
    overall: AttemptCheckpoints | None
    """None where there is no checkpoint."""
    by_attempt: tuple[AttemptCheckpoints, ...]


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Everything that a report says of a run."""

    run: Run
    attempts: tuple[Attempt, ...]
    world_size: int | None
    wall_s: float
    """From the first start to the end, or to the last record of a run that is still running."""
    final_step: int
    """Steps completed in the final state."""
    steps_executed: int
    steps_lost: int
    """Of those executed, how many were rolled back."""
    median_step_s: float | None
    breakdown: TimeBreakdown
    ettr: float | None
    """ETTR, effective training time ratio, 0 to 1: `breakdown.productive_s / wall_s`; None at wall time 0."""
    phases: tuple[Phase, ...]
    incidents: tuple[IncidentSummary, ...]
    interventions: int
    """How often a person stepped in: asked the run to stop, or started it again."""
    lost_time: LostTime
    checkpoints: CheckpointSummary
    loss: LossCurve
    proof: Mapping[str, Any] | None
    """Data of the newest `proof` event: the final weights compared with those of a reference run."""
