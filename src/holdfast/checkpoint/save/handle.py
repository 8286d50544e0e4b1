"""Define the handle that `save` returns, through which the caller waits for the save's outcome."""

import threading
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Final, NoReturn, SupportsIndex

from holdfast.core.errors import BadUse, HoldfastError
from holdfast.core.link import job_link

_LOOK_IN_S: Final = 5.0


class NotPicklable:
    """Refuse to be pickled or copied, because only the process that made the object can use it."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be pickled or copied.

        Raises:
            BadUse: always.
        """
        raise BadUse(
            f"A {type(self).__name__} cannot be pickled or copied: it belongs to the process that made it. Keep it out "
            "of what spawned processes are given, such as the dataset, collate_fn or worker_init_fn of a DataLoader; "
            "a process that needs checkpoints makes a Checkpointer of its own, with read_only=True."
        )


class SaveHandle(NotPicklable):
    """Report the outcome of one call of `Checkpointer.save`.

    Attributes:
        step: the step that the call saves, or None if no save was due.
    """

    def __init__(self, step: int | None, *unseen: list[HoldfastError]) -> None:
        """Create the handle.

        The lists `unseen` hold failures that no call has raised yet. `result` removes a failure
        from these lists when it raises the failure.
        """
        self.step = step
        self._unseen = unseen
        self._outcome: Future[Path | None] = Future()

    def done(self) -> bool:
        """Return True if the save has ended, durable or failed."""
        return self._outcome.done()

    def result(self, timeout_s: float | None = None) -> Path | None:
        """Wait until the checkpoint is durable, and return its folder.

        A forced save of the step that was saved or restored last returns the folder of that
        checkpoint.

        Args:
            timeout_s: seconds to wait; None waits without a limit.

        Returns:
            The folder, or None if no save was due or the save was skipped.

        Raises:
            SaveFailed: the save failed.
            TimeoutError: the save has not ended within `timeout_s` seconds.
        """
        try:
            # A short poll, or a call in another thread, does not delay the training.
            is_long = timeout_s is None or timeout_s > _LOOK_IN_S
            holds_up = is_long and threading.current_thread() is threading.main_thread()
            with job_link().section("save") if holds_up and not self.done() else nullcontext():
                return self._outcome.result(timeout_s)
        except HoldfastError as error:
            for unseen in self._unseen:
                if error in unseen:
                    unseen.remove(error)
            raise

    def durable_path(self) -> Path | None:
        """Wait until the save has ended; return the checkpoint's folder, or None if it failed.

        A failure is not raised here. The failure stays in the lists `unseen`, so that a later call
        raises it.
        """
        return self._outcome.result() if self._outcome.exception() is None else None

    def complete(self, path: Path | None) -> None:
        """Record that the checkpoint is durable in the folder `path`, or that nothing was saved."""
        self._outcome.set_result(path)

    def fail(self, error: BaseException) -> None:
        """Record that the save has failed; `result` raises `error`."""
        self._outcome.set_exception(error)
