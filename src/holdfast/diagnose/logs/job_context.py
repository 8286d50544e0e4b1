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
    """The time of the observation in seconds; the rank with the smallest time died first."""
    exit_code: int | None = None
    """The exit code of the process; None if a signal ended the process."""
    signal: int | None = None
    """The signal that ended the process."""
    last_step: int | None = None

    def __post_init__(self) -> None:
        """Require either an exit code or a signal.

        Raises:
            ValueError: both or neither of them are given.
        """
        if (self.exit_code is None) == (self.signal is None):
            raise ValueError(f"rank {self.rank}: give exit_code or signal, exactly one of them")


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A hang: a job that made no step for longer than its limit."""

    ranks: tuple[int, ...] = ()
    """The frozen ranks; empty if they cannot be distinguished from ranks that wait for them."""
    pids: tuple[int, ...] = ()
    """The process ids of `ranks`, in the same order."""
    process_state: str | None = None
    """The state letter in /proc/PID/stat of the frozen processes (T: stopped, D: uninterruptible
    sleep); None if it is not informative.
    """
    last_step: int | None = None
    """The newest step of the job."""
    frozen_step: int | None = None
    """The newest step of the frozen ranks, if they are behind the job."""
    waited_s: float = 0.0
    limit_s: float | None = None
    only_silence: bool = False
    """True if no process was in a state in which it cannot work, so all may have been working."""
    option: str | None = None
    """The option of `holdfast run` that sets the time limit which was exceeded."""
    why: str | None = None
    """Another way in which the frozen ranks differ from the others, or what all ranks were doing.
    """


@dataclass(frozen=True, kw_only=True)
class BrokenLoss:
    """A loss that shows that training is broken."""

    value: float
    step: int
    """The step with the loss that was reported."""
    first_step: int
    """The first of the consecutive steps that have a broken loss."""
    usual: float | None = None
    """The median of the earlier losses; None if there are too few."""


@dataclass(frozen=True, kw_only=True)
class JobContext:
    """The supervisor's observations of one attempt, in addition to the logs."""

    exits: tuple[RankExit, ...] = ()
    hang: Hang | None = None
    broken_loss: BrokenLoss | None = None
    last_step: int | None = None
    stopped_ranks: tuple[int, ...] = ()
    """The ranks that the supervisor or the launcher ended, so that their deaths belong to the
    teardown.
    """
    left_rank: int | None = None
    """The rank that ended with exit code 0 while the others continued."""
    launcher_ended_first: bool = False
    """True if the launcher died, and took its ranks with it."""
    lost_node: str | None = None
    """The name of the node that was lost together with its ranks."""


def observed_lines(context: JobContext) -> tuple[str, ...]:
    """Convert `context` to log lines without time stamps, so that rules can match observations."""
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
    """Return the ranks that ended with success before the first failure, unless most ranks did.

    If most ranks ended with success, they completed the job.
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
    """Return the lines about a broken loss.

    Only the first line matches a rule for a root. Its words are always the same.
    """
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
