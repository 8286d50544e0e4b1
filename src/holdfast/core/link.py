"""The seam between a rank's code and whoever supervises it.

`holdfast.attach()` sets the process's link; the checkpoint room reads it. A Checkpointer and the integrations connect
by `connected_link`, so that a supervisor also hears from a script that does not attach. Where no supervisor started
the process, the link is `Unsupervised`: it records nothing and never asks for a stop.
"""

import importlib
import os
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Protocol, SupportsFloat

ENV_RUN: Final = "HOLDFAST_RUN"
"""The id of the run that a supervised rank belongs to."""
ENV_ATTEMPT: Final = "HOLDFAST_ATTEMPT"
"""Which start of that run it belongs to."""
ENV_ACCUMULATION: Final = "HOLDFAST_ACCUMULATION"
"""How many micro-batches a rank accumulates where the job as launched at first has one."""
ENV_FRESH: Final = "HOLDFAST_FRESH"
"""Set to 1 where checkpoints of other runs are to be set aside."""
ENV_CONNECT: Final = "HOLDFAST_CONNECT"
"""`MODULE:FUNCTION`, which sets the link of this process; a supervisor sets this variable for its ranks."""
Number = float | SupportsFloat
"""A number, or a tensor of one element."""


class JobLink(Protocol):
    """What a rank tells its supervisor and hears from it. Every method returns at once but where it says so."""

    def watch(self) -> None:
        """Announce that this process will report its steps, so that the supervisor finds a hang by their absence."""
        ...

    def take_back_sigterm(self, replaced: Collection[Any]) -> None:
        """Have SIGTERM wait for the supervisor again.

        `replaced` are the handlers in whose place a trainer has put its own; nothing is done where this one is not
        among them.
        """
        ...

    def step(self, step: int, loss: Number | None, metrics: Mapping[str, Number]) -> None:
        """Report that `step` steps are completed, with this one's loss and other numbers."""
        ...

    def emit(self, kind: str, data: Mapping[str, Any]) -> None:
        """Send an event of plain JSON values. Never blocks, never raises."""
        ...

    def section(self, name: str, *, limit_s: float | None = None) -> AbstractContextManager[None]:
        """Mark a stretch without steps (save, restore, evaluate), so that it is not taken for a hang.

        `limit_s` is how long it may last before it counts as one; None leaves that to the supervisor.
        """
        ...

    def stop_due(self, step: int) -> bool:
        """Whether the job was asked to stop and every rank agreed to do so at this `step` or an earlier one.

        True on all ranks at the same step, so that a collective save can follow. May wait for the agreement.
        """
        ...

    def leave(self, step: int) -> None:
        """End this process because a stop was asked for and its state at `step` is safe. Does not return."""
        ...


class Unsupervised:
    """The link of a process that nobody supervises."""

    def watch(self) -> None:
        """See `JobLink.watch`."""

    def take_back_sigterm(self, replaced: Collection[Any]) -> None:
        """See `JobLink.take_back_sigterm`."""

    def step(self, step: int, loss: Number | None, metrics: Mapping[str, Number]) -> None:
        """See `JobLink.step`."""

    def emit(self, kind: str, data: Mapping[str, Any]) -> None:
        """See `JobLink.emit`: nobody listens."""

    def section(self, name: str, *, limit_s: float | None = None) -> AbstractContextManager[None]:  # noqa: ARG002
        """See `JobLink.section`."""
        return nullcontext()

    def stop_due(self, step: int) -> bool:  # noqa: ARG002
        """See `JobLink.stop_due`: nobody asks."""
        return False

    def leave(self, step: int) -> None:
        """Cannot happen: `stop_due` is never true."""
        raise AssertionError(f"asked to leave at step {step} without a supervisor")


_link: JobLink = Unsupervised()
_numbers: tuple[int, Mapping[str, Any]] = (-1, {})
_batches: tuple[int, int] | None = None


def accumulation() -> int:
    """Return how many micro-batches a rank accumulates where the job on all of its nodes has one."""
    return int(os.environ.get(ENV_ACCUMULATION, "1"))


def job_link() -> JobLink:
    """The link of this process."""
    return _link


def connected_link() -> JobLink:
    """Return the link of this process, which is connected first where a supervisor started the process."""
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
    """Remember what a step was reported with: its loss and metrics, which may be tensors that nobody has read yet."""
    global _numbers  # noqa: PLW0603 - as above
    _numbers = (step, numbers)


def numbers_of(step: int) -> Mapping[str, Any]:
    """What the last step was reported with, if it is `step`; else nothing."""
    noted, numbers = _numbers
    return numbers if noted == step else {}


def note_batch(number: int) -> None:
    """Remember the number of the batch that the training was given last."""
    global _batches  # noqa: PLW0603 - as above
    _batches = (number if _batches is None else _batches[0], number)


def take_batches() -> tuple[int, int] | None:
    """Return the first and the last of the batches since the last call; None where there is none."""
    global _batches
    taken, _batches = _batches, None
    return taken
