"""Connect a rank's code with the rank's supervisor.

`holdfast.attach()` sets the link of the process, which the checkpoint room uses. A Checkpointer and
the integrations call `connected_link`, so a script that never calls `attach` sends reports as well.
Without a supervisor the link is `Unsupervised`, which records nothing and never requests a stop.
"""

import importlib
import os
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Protocol, SupportsFloat

ENV_RUN: Final = "HOLDFAST_RUN"
"""The environment variable with the id of the run that a supervised rank belongs to."""
ENV_ATTEMPT: Final = "HOLDFAST_ATTEMPT"
"""The environment variable with the number of the current attempt."""
ENV_ACCUMULATION: Final = "HOLDFAST_ACCUMULATION"
"""The environment variable with the result of `accumulation`."""
ENV_FRESH: Final = "HOLDFAST_FRESH"
"""The environment variable that is 1 if checkpoints of other runs are to be moved aside."""
ENV_CONNECT: Final = "HOLDFAST_CONNECT"
"""The environment variable with the function that sets the link, as `MODULE:FUNCTION`.

The supervisor sets the variable for its ranks.
"""
Number = float | SupportsFloat
"""A number, or a tensor with one element."""


class JobLink(Protocol):
    """Exchange reports and requests between a rank and its supervisor.

    Every method returns at once unless its documentation states otherwise.
    """

    def watch(self) -> None:
        """Announce that this process will report steps, so that missing reports indicate a hang."""
        ...

    def take_back_sigterm(self, replaced: Collection[Any]) -> None:
        """Install the supervisor link's handler of SIGTERM again, after a trainer replaced it.

        `replaced` holds the handlers that the trainer has replaced by its own. If the link's
        handler is not among them, the method does nothing.
        """
        ...

    def step(self, step: int, loss: Number | None, metrics: Mapping[str, Number]) -> None:
        """Report that `step` steps are completed, with the loss and metrics of the last step."""
        ...

    def emit(self, kind: str, data: Mapping[str, Any]) -> None:
        """Send an event with plain JSON values as data. Never block, never raise."""
        ...

    def section(self, name: str, *, limit_s: float | None = None) -> AbstractContextManager[None]:
        """Mark a period without steps, such as a save, so that it does not count as a hang.

        A period longer than `limit_s` seconds does count as a hang. If `limit_s` is None, the
        supervisor sets the limit.
        """
        ...

    def stop_due(self, step: int) -> bool:
        """Return True if the ranks have agreed to stop the job at `step` or an earlier step.

        All ranks get True at the same step, so that they can save together. The method may wait for
        the agreement.
        """
        ...

    def leave(self, step: int) -> None:
        """End this process because of a requested stop. Never return.

        The caller has saved the state of `step` before.
        """
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
        """Raise an error; no caller gets here, because `stop_due` is never True."""
        raise AssertionError(f"asked to leave at step {step} without a supervisor")


_link: JobLink = Unsupervised()
_numbers: tuple[int, Mapping[str, Any]] = (-1, {})
_batches: tuple[int, int] | None = None


def accumulation() -> int:
    """Return the factor by which a rank must multiply its gradient accumulation steps.

    The factor is above 1 if the job runs on fewer nodes than at its launch, so that the global
    batch keeps its size.
    """
    return int(os.environ.get(ENV_ACCUMULATION, "1"))


def job_link() -> JobLink:
    """Return the link of this process."""
    return _link


def connected_link() -> JobLink:
    """Return the link of this process; connect it first if a supervisor started the process."""
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
    """Store the reported loss and metrics of a step; tensors among the values are not read yet."""
    global _numbers  # noqa: PLW0603 - as above
    _numbers = (step, numbers)


def numbers_of(step: int) -> Mapping[str, Any]:
    """Return the loss and metrics of `step`, or nothing if another step was reported last."""
    noted, numbers = _numbers
    return numbers if noted == step else {}


def note_batch(number: int) -> None:
    """Record that the training has reached batch `number`, for the next `take_batches`."""
    global _batches  # noqa: PLW0603 - as above
    _batches = (number if _batches is None else _batches[0], number)


def take_batches() -> tuple[int, int] | None:
    """Return the first and the last batch since the previous call; None if there was none."""
    global _batches
    taken, _batches = _batches, None
    return taken
