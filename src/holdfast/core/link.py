"""The seam between a rank's code and the rank's supervisor.

`holdfast.attach()` sets the process's link; the checkpoint room reads the link. A Checkpointer and
the integrations connect by `connected_link`, so a script that never calls `attach` sends reports,
too. Without a supervisor the link is `Unsupervised`, which records nothing and never requests a
stop.
"""

import importlib
import os
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Protocol, SupportsFloat

ENV_RUN: Final = "HOLDFAST_RUN"
"""The id of the run of a supervised rank."""
ENV_ATTEMPT: Final = "HOLDFAST_ATTEMPT"
"""The number of the rank's attempt, a start of the run."""
ENV_ACCUMULATION: Final = "HOLDFAST_ACCUMULATION"
"""The micro-batches that a rank accumulates for each one of the job as launched at first."""
ENV_FRESH: Final = "HOLDFAST_FRESH"
"""Set to 1 to set checkpoints of other runs aside."""
ENV_CONNECT: Final = "HOLDFAST_CONNECT"
"""`MODULE:FUNCTION` of the function that sets the link of this process.

A supervisor sets the variable for its ranks.
"""
Number = float | SupportsFloat
"""A number, or a tensor of one element."""


class JobLink(Protocol):
    """The exchange of a rank with its supervisor.

    Every method returns at once unless the method states otherwise.
    """

    def watch(self) -> None:
        """Announce reports of steps from this process, so that their absence shows a hang."""
        ...

    def take_back_sigterm(self, replaced: Collection[Any]) -> None:
        """Let the supervisor decide again what SIGTERM does.

        `replaced` holds the handlers that a trainer has replaced by its own. If the link's handler
        is not among them, the method does nothing.
        """
        ...

    def step(self, step: int, loss: Number | None, metrics: Mapping[str, Number]) -> None:
        """Report `step` completed steps, with the loss and other numbers of the last one."""
        ...

    def emit(self, kind: str, data: Mapping[str, Any]) -> None:
        """Send an event of plain JSON values. Never blocks, never raises."""
        ...

    def section(self, name: str, *, limit_s: float | None = None) -> AbstractContextManager[None]:
        """Mark a stretch without steps, such as a save, so that it is not taken for a hang.

        After `limit_s` seconds the stretch does count as a hang; None: the supervisor sets the
        limit.
        """
        ...

    def stop_due(self, step: int) -> bool:
        """Return True if the ranks have agreed to stop the job at this `step` or an earlier one.

        All ranks get True at the same step, so that a collective save can follow. The method may
        wait for the agreement.
        """
        ...

    def leave(self, step: int) -> None:
        """End this process for a requested stop; its state at `step` is safe. Never return."""
        ...


class Unsupervised:
    """The link of a process without a supervisor."""

    def watch(self) -> None:
        """See `JobLink.watch`."""

    def take_back_sigterm(self, replaced: Collection[Any]) -> None:
        """See `JobLink.take_back_sigterm`."""

    def step(self, step: int, loss: Number | None, metrics: Mapping[str, Number]) -> None:
        """See `JobLink.step`."""

    def emit(self, kind: str, data: Mapping[str, Any]) -> None:
        """See `JobLink.emit`; without a supervisor, drop the event."""

    def section(self, name: str, *, limit_s: float | None = None) -> AbstractContextManager[None]:  # noqa: ARG002
        """See `JobLink.section`."""
        return nullcontext()

    def stop_due(self, step: int) -> bool:  # noqa: ARG002
        """See `JobLink.stop_due`; without a supervisor, return False."""
        return False

    def leave(self, step: int) -> None:
        """Raise an error: no caller gets here, since `stop_due` is never true."""
        raise AssertionError(f"asked to leave at step {step} without a supervisor")


_link: JobLink = Unsupervised()
_numbers: tuple[int, Mapping[str, Any]] = (-1, {})
_batches: tuple[int, int] | None = None


def accumulation() -> int:
    """Return the micro-batches that a rank accumulates for each one of the job on all its nodes."""
    return int(os.environ.get(ENV_ACCUMULATION, "1"))


def job_link() -> JobLink:
    """Return the link of this process."""
    return _link


def connected_link() -> JobLink:
    """Return the link of this process, and connect it first if a supervisor started the process."""
    connect = os.environ.get(ENV_CONNECT)
    if connect is not None and isinstance(_link, Unsupervised):
        module, _, function = connect.partition(":")
        getattr(importlib.import_module(module), function)()
    return _link


def set_job_link(link: JobLink) -> None:
    """Make `link` the link of this process."""
    global _link  # noqa: PLW0603 - one process is one rank: its link is process-wide by nature
    _link = link


def note_numbers(step: int, numbers: Mapping[str, Any]) -> None:
    """Keep the reported loss and metrics of a step, which may be tensors not read yet."""
    global _numbers  # noqa: PLW0603 - as above
    _numbers = (step, numbers)


def numbers_of(step: int) -> Mapping[str, Any]:
    """Return the reported numbers of the last step if that step is `step`; else nothing."""
    noted, numbers = _numbers
    return numbers if noted == step else {}


def note_batch(number: int) -> None:
    """Extend the range of batches since the last `take_batches` to this batch."""
    global _batches  # noqa: PLW0603 - as above
    _batches = (number if _batches is None else _batches[0], number)


def take_batches() -> tuple[int, int] | None:
    """Return the first and the last batch since the last call; None without a batch."""
    global _batches
    taken, _batches = _batches, None
    return taken
