"""Define the limits and the state on which the decisions of the policy depend."""

from dataclasses import dataclass, field, replace
from enum import Enum

from holdfast.recover.skipping.plan import Skipping


@dataclass(frozen=True, kw_only=True)
class RestartLimits:
    """Counts and times that limit restarts and stops; the defaults suit a run of days."""

    max_restarts: int = 20
    """Restarts in a row without a gain, within `window_s`, that end the run; 0: the first failure
    ends the run."""
    window_s: float = 3600.0
    backoff_first_s: float = 2.0
    backoff_max_s: float = 300.0
    outside_wait_s: float = 30.0
    """Seconds of the first wait for a cause outside the job (storage, network) that must pass by
    itself."""
    outside_retries: int = 4
    """Times that a cause outside the job, or a kill from outside, may strike without a gain."""
    blind_retries: int = 10
    """Times that any cause may strike without a gain a job that reports neither steps nor
    checkpoints."""
    blind_gain_s: float = 600.0
    """Seconds that an attempt of a job without reports must live to have gained; most jobs start in
    less time."""
    teardown_grace_s: float = 10.0
    """Seconds for the ranks to write their last logs and end, after one rank failed or all ranks
    saved."""
    stop_grace_s: float = 60.0
    """Seconds for a stop to save state first."""


MOVE_SAVES = 3.0
"""The longest saves of the run that fit into the time for a move: a save that is going on, a step
that takes as long, and the save of the move."""
UNKNOWN_SAVE_S = 200.0
"""The seconds of a save if the run has not saved yet."""
MOST_SAVE_S = 3600.0
"""The most seconds of a save that count."""


class Phase(Enum):
    """The phase of a run."""

    IDLE = "idle"
    RUNNING = "running"
    FAILING = "failing"
    """A rank failed; the others must end."""
    DIAGNOSING = "diagnosing"
    WAITING = "waiting"
    """The time before a restart."""
    STOPPING = "stopping"
    """A stop was requested: the ranks save their state."""
    LEAVING = "leaving"
    """A stop was requested: the ranks end, or are ended."""
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class State:
    """The whole state on which decisions depend."""

    phase: Phase = Phase.IDLE
    deadline_s: float | None = None
    """The end of the present phase if no event comes before, in monotonic seconds."""
    launched_at_s: float = 0.0
    """The start of the present attempt, in monotonic seconds."""
    vain_at_s: tuple[float, ...] = ()
    """The times of the failures in a row that followed a restart and had gained nothing."""
    waits: int = 0
    """The count of failures in a row that a wait follows: those without a gain, and all early ones
    of a blind job."""
    roots_since_gain: tuple[tuple[str, bool], ...] = ()
    """The roots of the failures since the last gain, each with True if the attempt had completed a
    step."""
    best_step: int | None = None
    """The highest step at any failure since newer checkpoints were last lost."""
    best_checkpoint_step: int | None = None
    """The step of the newest durable checkpoint at any failure, except for lost checkpoints."""
    rolled_back_to: int | None = None
    """The step of the older checkpoint from which an attempt began when newer ones were last
    lost."""
    leaving: str = ""
    """The node that the job leaves: the next launch begins as soon as the state is saved."""
    goes_back_to: int | None = None
    """The step to which a person has the job go back: the next launch begins as soon as the ranks
    have ended."""
    stop_by: str | None = None
    """The source of the stop request; None if no stop was requested."""
    has_stepped: bool = False
    """True if the last attempt that failed completed a step."""
    in_place: bool = False
    """True if the present attempt began below the launcher of the attempt before."""
    spike_step: int | None = None
    """The step of the last spike of the loss that ended an attempt."""
    broken_step: int | None = None
    """The step of the last broken loss after which the run went back to a healthy checkpoint."""
    grows: bool = False
    """True if the ranks save their state and leave, for a launch on more nodes."""
    keeps_size: bool = False
    """True if the present attempt cannot save, so that it stays on its nodes until it ends."""
    save_s: float | None = None
    """Seconds of the longest save of the run; None before the first save."""
    is_replay: bool = False
    """True if the present attempt, or the next one, runs the steps of a broken loss again."""
    replays_in_vain: int = 0
    """The number of replays since the last gain."""
    skipping: Skipping = field(default_factory=Skipping)
    """The batches that the attempts leave out."""

    @property
    def is_moving(self) -> bool:
        """Return True if the state is saved for a launch on other nodes.

        A stop request ends the move.
        """
        return bool(self.leaving or self.grows)

    def staying(self) -> "State":
        """Return the state without the move."""
        return replace(self, leaving="", grows=False)


def move_grace_s(limits: RestartLimits, save_s: float | None) -> float:
    """Return the seconds for the ranks to save their state for a move.

    Args:
        limits: the limits of the run.
        save_s: seconds of the longest save of the run; None before the first save.
    """
    longest_s = UNKNOWN_SAVE_S if save_s is None else save_s
    return limits.stop_grace_s + MOVE_SAVES * longest_s
