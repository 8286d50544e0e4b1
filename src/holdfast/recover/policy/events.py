"""Define the events of a run and the actions of the policy."""

from dataclasses import dataclass

from holdfast.recover.skipping.plan import Skip

# Events


@dataclass(frozen=True)
class Begin:
    """A run starts, or is resumed."""


@dataclass(frozen=True)
class Adopted:
    """A new supervisor has taken over an attempt that the previous supervisor launched."""

    in_place: bool
    """True if the attempt began below the launchers of an earlier attempt."""
    moves: bool = False
    """True if the attempt had been ordered to save its state and end, for a launch on other nodes.
    """
    save_s: float | None = None
    """The seconds of the run's longest save, as recorded with the move; None if there was no save.
    """


@dataclass(frozen=True)
class NodesMissing:
    """For too long there have been too few nodes for a launch."""

    outcome: str
    """A sentence with the number of missing nodes."""
    queued: bool = False
    """True if the run was queued again, and will continue in another job of its scheduler."""


@dataclass(frozen=True)
class NodesBack:
    """The job runs on fewer nodes than it should, and now there are enough nodes for more."""


@dataclass(frozen=True)
class RankFailed:
    """A rank was ended by a signal, ended with a code other than 0, or left the others with code 0."""

    others_run: bool = False
    """True if the rank left the others with code 0, so that the processes of the other ranks still
    run.
    """


@dataclass(frozen=True)
class JobFrozen:
    """The job hangs."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint is durable."""

    save_s: float
    """The seconds from the call of `save` until the checkpoint was durable."""


@dataclass(frozen=True)
class LossBroken:
    """The loss shows that the state of the training is broken."""

    step: int
    """The step at which the broken state became certain."""
    is_spike: bool
    """True if the loss is a finite number, so that training can continue from it."""
    can_go_back: bool = True
    """True if there is a healthy checkpoint."""
    batches: tuple[int, int] | None = None
    """The first and the last of the batches that led to the broken loss; None if ranks report no
    batches.
    """
    since: int | None = None
    """The step since which the loss is broken in every report that the supervisor has received; None
    if that is `step`.
    """


@dataclass(frozen=True)
class RollbackRequested:
    """A person has requested a rollback to an earlier checkpoint."""

    to_step: int


@dataclass(frozen=True)
class RollbackMissed:
    """An attempt after a rollback continues from a newer state than the rollback left."""

    to_step: int
    """The step of the checkpoint that the rollback left as the newest."""
    start_step: int
    """The step from which the attempt continues."""

    @property
    def sentence(self) -> str:
        """Return the event as a sentence."""
        return (
            f"The job was to go back to the checkpoint of step {self.to_step}, but continued from "
            f"step {self.start_step}."
        )


@dataclass(frozen=True, kw_only=True)
class NodeToLeave:
    """The job must leave a node, which has not failed yet."""

    node: str
    why: str
    """The evidence, as a sentence."""
    rule: str = ""
    """The finding that led to the decision (see `nodes.plan_for`)."""


@dataclass(frozen=True)
class OutageLasts:
    """A service or storage whose outage ended the job does not answer a probe."""


@dataclass(frozen=True)
class OutageOver:
    """The service or storage answers again."""


@dataclass(frozen=True)
class JobExited:
    """All trainers have ended, and all processes that they had started."""

    returncode: int
    """The exit code: 0 if every trainer returned 0."""


@dataclass(frozen=True, kw_only=True)
class Diagnosed:
    """The failure of the job was diagnosed."""

    fingerprint: str
    """The identity of the root cause, which is equal for equal roots."""
    step: int | None
    """The number of steps completed before the failure; None if the job reports no steps."""
    has_stepped: bool = False
    """True if the attempt completed at least one step."""
    checkpoint_step: int | None = None
    """The step of the newest checkpoint that the attempt made durable; None if it made none."""
    summary: str
    """The cause, as a sentence."""
    mitigation: str
    """The advice for a person, as a sentence."""
    restart_helps: bool
    work_done: bool = False
    """True if the job had completed its work and failed only while it was ending."""
    waits_for_outside: bool = False
    killed_from_outside: bool = False
    """True if a signal from outside ended a rank or the launcher, and the logs show no other
    root."""
    advises_only_restart: bool = True
    """True if `mitigation` is advice only for a run that was restarted, and is left out if the run
    ends.
    """
    restored_step: int | None = None
    """The number of steps in the state from which the attempt continued; None if unknown."""
    healthy_step: int | None = None
    """For a broken loss, the step of the checkpoint to go back to. Only steps up to it can be a
    gain."""
    batches: tuple[int, int] | None = None
    """For a broken loss, the first and the last of the batches that led to the loss; None if
    unknown."""
    replays: bool = False
    """For a broken loss, True if the same steps must run again before batches are left out."""
    is_hardware: bool = False
    """For a broken loss, True if the same steps gave different numbers with the same data and
    weights.
    """
    is_checkpoint: bool = False
    """For a broken loss, True if a damaged checkpoint is the cause."""
    because: str = ""
    """Why a restart helps, as a sentence; set for the class of a broken loss, or for a failed start
    on fewer nodes."""

    @property
    def reached(self) -> int | None:
        """The step by which gains are counted."""
        return self.step if self.healthy_step is None else self.healthy_step


@dataclass(frozen=True)
class StopRequested:
    """A request to stop the run arrived."""

    by: str


@dataclass(frozen=True)
class StateSaved:
    """All ranks have saved their state for a stop or a move, and end now."""


@dataclass(frozen=True)
class CannotSave:
    """No rank has an active Checkpointer, so no state can be saved."""


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = (
    Begin
    | Adopted
    | NodesMissing
    | NodesBack
    | RankFailed
    | JobFrozen
    | Saved
    | LossBroken
    | NodeToLeave
    | OutageLasts
    | OutageOver
    | RollbackRequested
    | RollbackMissed
    | JobExited
    | Diagnosed
    | StopRequested
    | StateSaved
    | CannotSave
    | Tick
)

# Actions


@dataclass(frozen=True)
class Launch:
    """Start the job's processes."""

    in_place: bool = False
    """True if the present launchers are kept, and only the trainers below them are started again.
    """
    moves_ranks: bool = False
    """True if each rank must run on another node or GPU than before, for a replay."""


@dataclass(frozen=True)
class Replay:
    """Run the same steps again in the next attempt, to find the class of a broken loss."""


@dataclass(frozen=True)
class Kill:
    """Kill all processes of the job immediately."""


@dataclass(frozen=True)
class Terminate:
    """Send SIGTERM to every rank, so that the rank's own handler can run."""


@dataclass(frozen=True)
class Diagnose:
    """Find the cause of the job's failure; the event `Diagnosed` follows."""


@dataclass(frozen=True)
class RequestFinalSave:
    """Have all ranks save their state at the same step, and end.

    The event `StateSaved` or `CannotSave` follows.
    """


@dataclass(frozen=True, kw_only=True)
class Resolve:
    """Record the action for the incident that was just diagnosed."""

    action: str
    explanation: str
    rule: str = ""
    """The name of the rule that decided (see `core.explanation.plain_words.RULES`)."""


@dataclass(frozen=True, kw_only=True)
class End:
    """End the run."""

    state: str
    exit_code: int
    outcome: str


Action = Launch | Replay | Kill | Terminate | Diagnose | RequestFinalSave | Skip | Resolve | End
