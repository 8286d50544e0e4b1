"""Define what happens to a run, and what the policy can do about it."""

from dataclasses import dataclass

from holdfast.recover.skipping.plan import Skip

# Events


@dataclass(frozen=True)
class Begin:
    """Start the run, or go on with one."""


@dataclass(frozen=True)
class Adopted:
    """Go on with an attempt that the supervisor before this one has launched."""

    in_place: bool
    """Whether that attempt began below the launchers of the one before."""


@dataclass(frozen=True)
class NodesMissing:
    """There are too few nodes for a launch, for too long."""

    outcome: str
    """How many are missing, a sentence."""


@dataclass(frozen=True)
class RankFailed:
    """A rank ended by a signal or with a code other than 0, or left the others with code 0."""

    others_run: bool = False
    """Whether it left with code 0, so that the processes of the other ranks are still there."""


@dataclass(frozen=True)
class JobFrozen:
    """The job stands still."""


@dataclass(frozen=True)
class LossBroken:
    """The loss shows that the state of the training is broken."""

    step: int
    """The step at which that was certain."""
    is_spike: bool
    """Whether the loss is a finite number; the training can go on from there."""
    can_go_back: bool = True
    """Whether there is a healthy checkpoint."""
    batches: tuple[int, int] | None = None
    """The first and the last of the batches that led there; None where the ranks report none."""


@dataclass(frozen=True)
class JobExited:
    """Every trainer ended, with all that it had started."""

    returncode: int
    """0 if every trainer returned 0."""


@dataclass(frozen=True, kw_only=True)
class Diagnosed:
    """Why the job failed."""

    fingerprint: str
    """The same for the same root."""
    step: int | None
    """Steps completed by then; None where the job reports none."""
    has_stepped: bool = False
    """Whether the attempt completed a step."""
    checkpoint_step: int | None = None
    """The newest checkpoint that the attempt made durable; None where it made none."""
    summary: str
    """The cause, a sentence."""
    mitigation: str
    """What a person should do, a sentence."""
    restart_helps: bool
    waits_for_outside: bool = False
    killed_from_outside: bool = False
    """Whether a signal from outside ended a rank or the launcher, and the logs state no other root."""
    advises_only_restart: bool = True
    """Whether `mitigation` is advice for a run that is restarted, and so is left out where the run ends."""
    restored_step: int | None = None
    """Steps completed in the state that the attempt went on from; None where unknown."""
    healthy_step: int | None = None
    """For a broken loss, the step of the checkpoint to go back to: only what is healthy is a gain."""
    batches: tuple[int, int] | None = None
    """For a broken loss, the first and the last of the batches that led to the loss; None where they are not known."""

    @property
    def reached(self) -> int | None:
        """Return the step by which gains are counted."""
        return self.step if self.healthy_step is None else self.healthy_step


@dataclass(frozen=True)
class StopAsked:
    """Somebody wants the run to stop."""

    by: str


@dataclass(frozen=True)
class StateSaved:
    """Every rank saved its state for the stop and is leaving."""


@dataclass(frozen=True)
class CannotSave:
    """No rank has a Checkpointer at work, so there is nothing to wait for."""


@dataclass(frozen=True)
class Tick:
    """Time passed."""


Event = (
    Begin
    | Adopted
    | NodesMissing
    | RankFailed
    | JobFrozen
    | LossBroken
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
    """Whether the launcher that is there is kept, and only the trainers below it are started again."""


@dataclass(frozen=True)
class Kill:
    """End every process of the job at once."""


@dataclass(frozen=True)
class Terminate:
    """Ask every rank to end with SIGTERM, so that its own handler can run."""


@dataclass(frozen=True)
class Diagnose:
    """Find out why the job failed; answer with `Diagnosed`."""


@dataclass(frozen=True)
class AskRanksToSave:
    """Have all ranks save at the same step and leave; answer with `StateSaved` or `CannotSave`."""


@dataclass(frozen=True, kw_only=True)
class Resolve:
    """Record what is done about the incident just diagnosed."""

    action: str
    explanation: str
    rule: str = ""
    """The name of the rule that decides, see `core.explanation.plain_words.RULES`."""


@dataclass(frozen=True, kw_only=True)
class End:
    """The run is over."""

    state: str
    exit_code: int
    outcome: str


Action = Launch | Kill | Terminate | Diagnose | AskRanksToSave | Skip | Resolve | End
