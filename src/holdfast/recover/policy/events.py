"""Define the events of a run and the actions of the policy."""

from dataclasses import dataclass

from holdfast.recover.skipping.plan import Skip

# Events


@dataclass(frozen=True)
class Begin:
    """Start a run, or go on with a run."""


@dataclass(frozen=True)
class Adopted:
    """Go on with an attempt that the previous supervisor launched."""

    in_place: bool
    """True if that attempt began below the launchers of the attempt before."""
    moves: bool = False
    """True if that attempt was to save its state and end, for a launch on other nodes."""
    save_s: float | None = None
    """Seconds of the longest save in the record of the move; None without a save."""


@dataclass(frozen=True)
class NodesMissing:
    """There have been too few nodes for a launch for too long."""

    outcome: str
    """The number of missing nodes, as a sentence."""
    queued: bool = False
    """True if the run is queued again, and goes on in another job of its scheduler."""


@dataclass(frozen=True)
class NodesBack:
    """The job runs on fewer nodes than it is to, and there are enough nodes for more now."""


@dataclass(frozen=True)
class RankFailed:
    """A rank ended by a signal or with a code other than 0, or left the others with code 0."""

    others_run: bool = False
    """True if the rank left with code 0, so that the processes of the other ranks still run."""


@dataclass(frozen=True)
class JobFrozen:
    """The job stands still."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint is durable."""

    save_s: float
    """Seconds from the call of `save` until the checkpoint was durable."""


@dataclass(frozen=True)
class LossBroken:
    """The loss shows that the state of the training is broken."""

    step: int
    """The step at which the broken state was certain."""
    is_spike: bool
    """True if the loss is a finite number; the training can go on from it."""
    can_go_back: bool = True
    """True if there is a healthy checkpoint."""
    batches: tuple[int, int] | None = None
    """The first and the last of the batches that led to the loss; None if the ranks report none."""


@dataclass(frozen=True)
class RollbackAsked:
    """A person wants the training to go on from an earlier checkpoint."""

    to_step: int


@dataclass(frozen=True, kw_only=True)
class NodeToLeave:
    """The job must go on without a node, which has not failed the job."""

    node: str
    why: str
    """The evidence."""
    rule: str = ""
    """The finding that decides, see `nodes.plan_for`."""


@dataclass(frozen=True)
class JobExited:
    """Every trainer ended, and so did every process that a trainer had started."""

    returncode: int
    """0 if every trainer returned 0."""


@dataclass(frozen=True, kw_only=True)
class Diagnosed:
    """The cause of the job's failure."""

    fingerprint: str
    """The identity of the root: equal for equal roots."""
    step: int | None
    """Steps completed before the failure; None if the job reports none."""
    has_stepped: bool = False
    """True if the attempt completed a step."""
    checkpoint_step: int | None = None
    """The step of the newest checkpoint that the attempt made durable; None if there is none."""
    summary: str
    """The cause, as a sentence."""
    mitigation: str
    """The advice for a person, as a sentence."""
    restart_helps: bool
    work_done: bool = False
    """True if the job had done its work and failed only on ending."""
    waits_for_outside: bool = False
    killed_from_outside: bool = False
    """True if a signal from outside ended a rank or the launcher, and the logs show no other
    root."""
    advises_only_restart: bool = True
    """True if `mitigation` is advice for a restarted run only; it is left out if the run ends."""
    restored_step: int | None = None
    """Steps completed in the state from which the attempt went on; None if unknown."""
    healthy_step: int | None = None
    """For a broken loss, the step of the checkpoint to go back to: only healthy steps are a
    gain."""
    batches: tuple[int, int] | None = None
    """For a broken loss, the first and the last of the batches that led to the loss; None if
    unknown."""
    replays: bool = False
    """For a broken loss, True if the same steps are to run again before batches are left out."""
    is_hardware: bool = False
    """For a broken loss, True if the same steps gave other numbers on the same data and weights."""
    is_checkpoint: bool = False
    """For a broken loss, True if a damaged checkpoint is the cause."""
    because: str = ""
    """The evidence that a restart helps, as a sentence: of the class of a broken loss, or of a start on fewer
    nodes."""

    @property
    def reached(self) -> int | None:
        """Return the step by which gains are counted."""
        return self.step if self.healthy_step is None else self.healthy_step


@dataclass(frozen=True)
class StopAsked:
    """A request to stop the run arrived."""

    by: str


@dataclass(frozen=True)
class StateSaved:
    """Every rank has saved its state for the stop, and ends now."""


@dataclass(frozen=True)
class CannotSave:
    """No rank has an active Checkpointer, so there is nothing to wait for."""


@dataclass(frozen=True)
class Tick:
    """Time passed."""


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
    | RollbackAsked
    | JobExited
    | Diagnosed
    | StopAsked
    | StateSaved
    | CannotSave
    | Tick
)

# Actions


@dataclass(frozen=True)
class Launch:
    """Start the job's processes."""

    in_place: bool = False
    """True if the present launcher is kept, and only the trainers below it are started again."""
    moves_ranks: bool = False
    """True if each rank is to run on another node or GPU than before, for a replay."""


@dataclass(frozen=True)
class Replay:
    """Run the same steps again in the next attempt, to find the class of a broken loss."""


@dataclass(frozen=True)
class Kill:
    """End every process of the job at once."""


@dataclass(frozen=True)
class Terminate:
    """Send SIGTERM to every rank, so that the rank's own handler can run."""


@dataclass(frozen=True)
class Diagnose:
    """Find the cause of the job's failure; the answer is `Diagnosed`."""


@dataclass(frozen=True)
class AskRanksToSave:
    """Have all ranks save at the same step and leave.

    The answer is `StateSaved` or `CannotSave`.
    """


@dataclass(frozen=True, kw_only=True)
class Resolve:
    """Record the action taken for the incident just diagnosed."""

    action: str
    explanation: str
    rule: str = ""
    """The name of the rule that decides; see `core.explanation.plain_words.RULES`."""


@dataclass(frozen=True, kw_only=True)
class End:
    """The run is over."""

    state: str
    exit_code: int
    outcome: str


Action = Launch | Replay | Kill | Terminate | Diagnose | AskRanksToSave | Skip | Resolve | End
