"""Define the limits and the state that the decisions of the policy depend on."""

from dataclasses import dataclass, field, replace
from enum import Enum

from holdfast.recover.policy.events import RollbackMissed
from holdfast.recover.skipping.plan import Skipping


@dataclass(frozen=True, kw_only=True)
class RestartLimits:
    """Numbers and times that limit restarts and stops. The defaults suit a run of several days."""

    max_restarts: int = 20
    """The run ends after this number of consecutive restarts without a gain within `window_s`. With
    0, the first failure ends the run."""
    window_s: float = 3600.0
    backoff_first_s: float = 2.0
    backoff_max_s: float = 300.0
    outside_wait_s: float = 30.0
    """The seconds of the first wait if the cause is outside the job, such as storage or network,
    and must end by itself."""
    outage_max_s: float = 1800.0
    """The longest wait, in seconds, while probes show that such a cause lasts. The probes may be
    wrong, for example behind a firewall."""
    outside_retries: int = 4
    """The number of times that a cause outside the job, or a kill from outside, may strike without
    a gain.
    """
    blind_retries: int = 10
    """The number of times that any cause may strike without a gain, if the job reports neither
    steps nor checkpoints."""
    blind_gain_s: float = 600.0
    """If a job reports neither steps nor checkpoints, an attempt that lives for this number of
    seconds has gained something. Most jobs start in less time."""
    teardown_grace_s: float = 10.0
    """The seconds that ranks have to write their last logs and end, after one rank failed or all
    ranks saved."""
    stop_grace_s: float = 60.0
    """The seconds that a stop has to save the state first."""


MOVE_SAVES = 3.0
"""The time for a move, as a multiple of the longest save of the run: a save in progress, a step
that takes as long, and the save for the move."""
UNKNOWN_SAVE_S = 200.0
"""The assumed seconds of a save if the run has not saved yet."""
MAX_SAVE_S = 3600.0
"""A save that takes longer counts as this number of seconds."""


class Phase(Enum):
    """The phase of a run."""

    IDLE = "idle"
    RUNNING = "running"
    FAILING = "failing"
    """A rank failed, and the others must end."""
    DIAGNOSING = "diagnosing"
    WAITING = "waiting"
    """The wait before a restart."""
    STOPPING = "stopping"
    """A stop was requested, and the ranks save their state."""
    LEAVING = "leaving"
    """A stop was requested, and the ranks end, or are ended."""
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class State:
    """The whole state on which decisions depend."""

    phase: Phase = Phase.IDLE
    deadline_s: float | None = None
    """The time at which the present phase ends if no event comes before, in monotonic seconds."""
    outage_until_s: float | None = None
    """The latest time to which a lasting outage puts off the restart, in monotonic seconds; None
    if the cause is not outside the job."""
    launched_at_s: float = 0.0
    """The start time of the present attempt, in monotonic seconds."""
    vain_at_s: tuple[float, ...] = ()
    """The times of the consecutive failures that followed a restart and had gained nothing."""
    waits: int = 0
    """The number of consecutive failures that count for the length of the wait: failures without a
    gain, and all early failures of a job that reports neither steps nor checkpoints."""
    roots_since_gain: tuple[tuple[str, bool], ...] = ()
    """The roots of the failures since the last gain, each with its place: True if the attempt had
    completed a step."""
    best_step: int | None = None
    """The highest step at any failure since checkpoints were last lost."""
    best_checkpoint_step: int | None = None
    """The step of the newest durable checkpoint at any failure, without lost checkpoints."""
    rolled_back_to: int | None = None
    """The step of the checkpoint from which an attempt began when newer checkpoints were last lost.
    """
    leaving: str = ""
    """The node that the job is leaving. The next launch begins as soon as the state is saved."""
    goes_back_to: int | None = None
    """The step to which a person has the job go back. The next launch begins as soon as the ranks
    have ended."""
    stop_by: str | None = None
    """The source of the stop request; None if no stop was requested."""
    has_stepped: bool = False
    """True if the last attempt that failed completed a step."""
    in_place: bool = False
    """True if the present attempt began below the launchers of an earlier attempt."""
    spike_step: int | None = None
    """The step of the last spike of the loss that ended an attempt."""
    broken_step: int | None = None
    """The step of the last broken loss after which the run went back to a healthy checkpoint."""
    missed_rollback: RollbackMissed | None = None
    """The last rollback without effect; None if there was none."""
    grows: bool = False
    """True if the ranks are saving their state to end, for a launch on more nodes."""
    keeps_size: bool = False
    """True if the present attempt cannot save its state, so that it stays on its nodes until it
    ends.
    """
    save_s: float | None = None
    """The seconds of the longest save of the run; None before the first save."""
    is_replay: bool = False
    """True if the present or the next attempt is a replay, which runs the steps of a broken loss
    again.
    """
    replays_in_vain: int = 0
    """The number of replays since the last gain."""
    skipping: Skipping = field(default_factory=Skipping)
    """The batches that the attempts leave out."""

    @property
    def is_moving(self) -> bool:
        """True if the ranks are saving their state for a launch on other nodes.

        If a stop is requested, the move is over.
        """
        return bool(self.leaving or self.grows)

    def staying(self) -> "State":
        """Return a copy of the state without the move."""
        return replace(self, leaving="", grows=False)


def move_grace_s(limits: RestartLimits, save_s: float | None) -> float:
    """Return the seconds that the ranks have to save their state for a move.

    Args:
        limits: the limits of the run.
        save_s: the seconds of the longest save of the run; None before the first save.
    """
    longest_s = UNKNOWN_SAVE_S if save_s is None else save_s
    return limits.stop_grace_s + MOVE_SAVES * longest_s
