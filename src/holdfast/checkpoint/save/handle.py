"""What a call of `save` gives back: how that save ends."""

import threading
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Final, NoReturn, SupportsIndex

from holdfast.core.errors import BadUse, HoldfastError
from holdfast.core.link import job_link

_LOOK_IN_S: Final = 5.0


class StaysHere:
    """What belongs to the process that made it."""

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


class SaveHandle(StaysHere):
    """One call of `Checkpointer.save`. `step` is the step it saves, None where nothing was due."""

    def __init__(self, step: int | None, *unseen: list[HoldfastError]) -> None:
        """A failure that `result` raises is taken out of the lists `unseen`."""
        self.step = step
        self._unseen = unseen
        self._outcome: Future[Path | None] = Future()

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._outcome.done()

    def result(self, timeout_s: float | None = None) -> Path | None:
        """Wait until the checkpoint is durable; its folder, or None where nothing was due or the save was skipped.

        A forced save of a step that was saved or restored just before has the folder of that.

        Raises:
            SaveFailed: it is not durable.
            TimeoutError: it has not ended within `timeout_s` seconds.
        """
        try:
            # Who looks in from time to time, or beside the training, does not hold it up.
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
        """Wait until the save has ended, and return the folder of the durable checkpoint, else None.

        A failure stays in the lists of failures that no call has raised yet.
        """
        return self._outcome.result() if self._outcome.exception() is None else None

    def complete(self, path: Path | None) -> None:
        """Record that the checkpoint is durable in the folder `path`, or that nothing was saved."""
        self._outcome.set_result(path)

    def fail(self, error: BaseException) -> None:
        """Record that the save has failed; `result` raises `error`."""
        self._outcome.set_exception(error)
