"""Define the supervisor's observations of the ranks, an optional input of `diagnose`."""

import math
import signal as signals
from collections.abc import Sequence
from dataclasses import dataclass

_PLACES = {"--section-limit-s": " for a section", "--first-step-limit-s": " for the first step"}
_STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting for a device", "Z": "dead"}


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """The end of one rank's process."""

    rank: int
    pid: int
    at_monotonic_s: float
    """The time of the observation; the rank with the least time died first."""
    exit_code: int | None = None
    """The exit code of the process; None if a signal ended the process."""
    signal: int | None = None
    """The signal that ended the process."""
    last_step: int | None = None

    def __post_init__(self) -> None:
        """Require exactly one of exit code and signal.

        Raises:
            ValueError: both or neither are given.
        """
        if (self.exit_code is None) == (self.signal is None):
            raise ValueError(f"rank {self.rank}: give exit_code or signal, exactly one of them")


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A job that made no step for longer than its limit."""

    ranks: tuple[int, ...] = ()
    """The frozen ranks, if distinguishable from those that wait for them."""
    pids: tuple[int, ...] = ()
    """The processes of `ranks`, in the same order."""
    process_state: str | None = None
    """The state letter of /proc/PID/stat (T stopped, D uninterruptible); None if uninformative."""
    last_step: int | None = None
    """The newest step of the job."""
    frozen_step: int | None = None
    """The newest step of the frozen ranks, if behind."""
    waited_s: float = 0.0
    limit_s: float | None = None
    only_silence: bool = False
    """True if no process was in a state that rules out work."""
    option: str | None = None
    """The option of `holdfast run` that sets the limit of silence at this place."""
    why: str | None = None
    """Another difference of the frozen ranks, or the common activity of all ranks."""


@dataclass(frozen=True, kw_only=True)
class BrokenLoss:
    """A loss that shows broken training."""

    value: float
    step: int
    """The step of the loss."""
    first_step: int
    """The first of the consecutive steps with a broken loss."""
    usual: float | None = None
    """The median of the losses before; None if too few are known."""


@dataclass(frozen=True, kw_only=True)
class JobContext:
    """The observations of one attempt's supervisor, in addition to the logs."""

    exits: tuple[RankExit, ...] = ()
    hang: Hang | None = None
    broken_loss: BrokenLoss | None = None
    last_step: int | None = None
    stopped_ranks: tuple[int, ...] = ()
    """Ranks that the supervisor or the launcher ended; their deaths are teardown."""
    left_rank: int | None = None
    """The rank that ended with code 0 while the others went on."""
    launcher_ended_first: bool = False
    """True if the launcher died, and its ranks with it."""
    lost_node: str | None = None
    """The name of the node that was lost with its ranks."""


def observed_lines(context: JobContext) -> tuple[str, ...]:
    """Return `context` as lines of `observer.log` without time stamps, for the same rules."""
    lines = [] if context.hang is None else _hang_lines(context.hang, context.last_step)
    if context.broken_loss is not None:
        lines += _loss_lines(context.broken_loss)
    in_order = sorted(context.exits, key=lambda one: (one.at_monotonic_s, one.rank))
    first_found = (
        context.hang is not None
        or context.broken_loss is not None
        or context.left_rank is not None
        or context.launcher_ended_first
        or context.lost_node is not None
    )
    if context.launcher_ended_first:
        lines.append(
            f"holdfast: the launcher died {_when(context.last_step, 'the')}; it ended first"
        )
    if context.lost_node is not None:
        lines.append(
            f"holdfast: node {context.lost_node} was lost {_when(context.last_step, 'the')}; it ended first"
        )
    left = _may_have_left(in_order)
    for one in in_order:
        how = f"exited with code {one.exit_code}"
        if one.signal:
            how = f"was killed by {_signal_name(one.signal)}"
        step = context.last_step if one.last_step is None else one.last_step
        end = ""
        if one.rank == context.left_rank:
            end = ", while the others went on; it ended first"
        elif one in left and not first_found:
            end = ", before the others"
        elif one.rank in context.stopped_ranks:
            end = "; teardown"
        elif not first_found and (one.signal or one.exit_code):
            end, first_found = "; it ended first", True
        lines.append(f"holdfast: rank {one.rank} (pid {one.pid}) {how} {_when(step, 'its')}{end}")
    return tuple(lines)


def _may_have_left(in_order: Sequence[RankExit]) -> Sequence[RankExit]:
    """Return the ranks that ended well before the first failure, unless most ranks did.

    If most ranks ended well, they completed the job.
    """
    first = next((place for place, one in enumerate(in_order) if one.exit_code != 0), 0)
    return in_order[:first] if 2 * first <= len(in_order) else ()


def _hang_lines(hang: Hang, job_step: int | None) -> list[str]:
    step = job_step if hang.last_step is None else hang.last_step
    only = ", since only silence is known" if hang.only_silence else ""
    place = _PLACES.get(hang.option or "", "")
    limit = "" if hang.limit_s is None else f" (limit {hang.limit_s:.1f} s{place}{only})"
    start = f"holdfast: no step for {hang.waited_s:.1f} s{limit} {_when(step, 'the')}"
    if not hang.ranks:
        return [f"{start}; no rank can be told apart" + (f": {hang.why}" if hang.why else "")]
    pids = hang.pids or (0,) * len(hang.ranks)
    if hang.process_state:
        state = hang.process_state
        why = f"process state {state} ({_STATES.get(state, 'unusual')})"
    elif hang.frozen_step is not None:
        why = f"it is behind the others at step {hang.frozen_step}"
    else:
        why = hang.why or "it is behind the others"
    frozen = zip(hang.ranks, pids, strict=True)
    return [f"{start}; rank {rank} (pid {pid}) is frozen: {why}" for rank, pid in frozen]


def _loss_lines(loss: BrokenLoss) -> list[str]:
    """Return the lines about a loss. Only the first is the root, and its words do not vary."""
    what = "has jumped" if math.isfinite(loss.value) else "is not finite"
    usual = "" if loss.usual is None else f"; usual was {loss.usual:.4g}"
    return [
        f"holdfast: the loss {what} at step {loss.step}",
        f"holdfast: the loss was {loss.value:.4g} since step {loss.first_step}{usual}",
    ]


def _signal_name(number: int | None) -> str:
    try:
        return signals.Signals(number or 0).name
    except ValueError:
        return f"signal {number}"


def _when(step: int | None, whose: str) -> str:
    return f"before {whose} first step" if step is None else f"after step {step}"
