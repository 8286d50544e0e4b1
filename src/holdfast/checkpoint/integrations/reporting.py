"""Report a trainer's progress to the supervisor that started it: the steps, and the stretches without steps."""

from contextlib import ExitStack
from typing import Final

from holdfast.core.link import JobLink, Number, Unsupervised, connected_link

END_LIMIT_S: Final = 6 * 3600.0
"""Seconds that a script may go on after its training: for a last evaluation, an export, an upload."""


class Reporter:
    """Reporter of one trainer's progress. Without a supervisor, a reporter does nothing."""

    def __init__(self) -> None:
        """Report nothing until `begin`."""
        self._link: JobLink = Unsupervised()
        self._open = ExitStack()
        self._name: str | None = None
        self._has_ended = False
        self.step_reported = 0
        """The last step that was reported, or the step after which training began."""

    def begin(self, step: int) -> None:
        """Announce the steps of a training that begins after `step`; end an open section."""
        self._link = connected_link()
        self._link.watch()
        self.step_reported = step
        self._has_ended = False
        self.leave()

    def step(self, step: int, *, loss: Number | None = None, **metrics: Number | None) -> None:
        """Report that `step` is completed, unless the step is reported already."""
        if step > self.step_reported:
            self.step_reported = step
            self._link.step(
                step, loss, {name: value for name, value in metrics.items() if value is not None}
            )

    def enter(self, name: str, *, limit_s: float | None = None) -> None:
        """Mark a stretch without steps from here to `leave`, in place of another stretch.

        A stretch that is marked already goes on. After the training, a stretch replaces the end and has the limit of
        the end.
        """
        if name != self._name:
            self._open.close()
            self._name = name
            self._open.enter_context(
                self._link.section(name, limit_s=END_LIMIT_S if self._has_ended else limit_s)
            )

    def leave(self) -> None:
        """End the stretch without steps; after the training, begin the end again."""
        self._name = None
        self._open.close()
        if self._has_ended:
            self.end()

    def end(self) -> None:
        """Mark all that follows the training."""
        self._has_ended = True
        self.enter("end")
