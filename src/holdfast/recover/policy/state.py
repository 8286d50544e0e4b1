"""Define what the decisions of the policy depend on."""

from dataclasses import dataclass, field
from enum import Enum

from holdfast.recover.skipping.plan import Skipping


@dataclass(frozen=True, kw_only=True)
class RestartLimits:
    """How often, how fast and how long; the defaults suit a run of days."""

    max_restarts: int = 20
    """So many restarts in a row that gained nothing, within `window_s`, end the run; 0: the first failure does."""
    window_s: float = 3600.0
    backoff_first_s: float = 2.0
    backoff_max_s: float = 300.0
    outside_wait_s: float = 30.0
    """The first wait where the cause lies outside the job (storage, network) and must pass by itself."""
    outside_retries: int = 4
    """How often such a cause, or a kill from outside, may strike without a gain."""
    blind_retries: int = 10
    """How often any cause may strike a job that reports neither steps nor checkpoints, without a gain."""
    blind_gain_s: float = 600.0
    """How long an attempt of such a job must live to have gained something: longer than most jobs need to start."""
    teardown_grace_s: float = 10.0
    """How long the ranks may take to end by themselves, after one failed or when all saved: for last words."""
    stop_grace_s: float = 60.0
    """How long a stop may take to save state first."""


class Phase(Enum):
    """Where a run is."""

    IDLE = "idle"
    RUNNING = "running"
    FAILING = "failing"
    """A rank failed; the others are asked to end."""
    DIAGNOSING = "diagnosing"
    WAITING = "waiting"
    """Before a restart."""
    STOPPING = "stopping"
    """Asked to stop: the ranks save their state."""
    LEAVING = "leaving"
    """Asked to stop, and the ranks are ending or being ended."""
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class State:
    """All that decisions depend on."""

    phase: Phase = Phase.IDLE
    deadline_s: float | None = None
    """When the present phase is over by itself, monotonic seconds."""
    launched_at_s: float = 0.0
    """When the present attempt began, monotonic seconds."""
    vain_at_s: tuple[float, ...] = ()
    """The failures in a row that followed on a restart and had gained nothing."""
    waits: int = 0
    """The failures in a row that a wait follows: those in vain, and of a blind job all that come soon."""
    roots_since_gain: tuple[tuple[str, bool], ...] = ()
    """The roots of the failures since the last gain, each with whether its attempt had completed a step."""
    best_step: int | None = None
    """The highest step at any failure, of those since newer checkpoints were lost."""
    best_checkpoint_step: int | None = None
    """The newest durable checkpoint at any failure, of those that are not lost."""
    rolled_back_to: int | None = None
    """The older checkpoint that an attempt began from when newer ones were lost last."""
    stop_by: str | None = None
    """Who asked to stop, once somebody did."""
    has_stepped: bool = False
    """Whether the last attempt that failed completed a step."""
    in_place: bool = False
    """Whether the present attempt began below the launcher of the one before."""
    spike_step: int | None = None
    """The step of the last spike of the loss that ended an attempt."""
    broken_step: int | None = None
    """The step of the last broken loss after which a healthy checkpoint was gone back to."""
    skipping: Skipping = field(default_factory=Skipping)
    """The batches that the attempts leave out."""
