"""What a call of `save` gives back: how that save ends."""

from concurrent.futures import Future
from pathlib import Path

from holdfast.core.errors import HoldfastError
from holdfast.core.link import job_link


class SaveHandle:
    """One call of `Checkpointer.save`. `step` is the step it saves, None where nothing was due."""

    def __init__(self, step: int | None, unseen: list[HoldfastError]) -> None:
        self.step = step
        self._unseen = unseen
        self._outcome: Future[Path | None] = Future()

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._outcome.done()

    def result(self, timeout_s: float | None = None) -> Path | None:
        """Wait until the checkpoint is durable; its folder, or None where nothing was due or the save was skipped.

        Raises:
            SaveFailed: it is not durable.
            TimeoutError: it has not ended within `timeout_s` seconds.
        """
        try:
            if not self.done():
                with job_link().section("save"):
                    return self._outcome.result(timeout_s)
            return self._outcome.result()
        except HoldfastError as error:
            if error in self._unseen:
                self._unseen.remove(error)
            raise
