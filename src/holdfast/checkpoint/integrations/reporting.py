"""Report a trainer's steps, and its sections without steps, to the supervisor that started it."""

from contextlib import ExitStack
from typing import Final

from holdfast.core.link import JobLink, Number, Unsupervised, connected_link

END_LIMIT_S: Final = 6 * 3600.0
"""Seconds that a script may run after its training: for an evaluation, an export or an upload."""


class Reporter:
    """Report the progress of one trainer; do nothing without a supervisor."""

    def __init__(self) -> None:
        """Report nothing until `begin`."""
        self._link: JobLink = Unsupervised()
        self._open = ExitStack()
        self._name: str | None = None
        self._has_ended = False
        self.step_reported = 0
        """The last reported step, or the step after which training began."""

    def begin(self, step: int) -> None:
        """Begin to report the steps of a training after `step`; end an open section."""
        self._link = connected_link()
        self._link.watch()
        self.step_reported = step
        self._has_ended = False
        self.leave()

    def step(self, step: int, *, loss: Number | None = None, **metrics: Number | None) -> None:
        """Report that `step` is completed, unless the step was reported already."""
        if step > self.step_reported:
            self.step_reported = step
            self._link.step(
                step, loss, {name: value for name, value in metrics.items() if value is not None}
            )

    def enter(self, name: str, *, limit_s: float | None = None) -> None:
        """Begin a section without steps, in place of an open section of another name.

        After the training, the section has the time limit of the end.
        """
        if name != self._name:
            self._open.close()
            self._name = name
            self._open.enter_context(
                self._link.section(name, limit_s=END_LIMIT_S if self._has_ended else limit_s)
            )

    def leave(self) -> None:
        """End the section; after the training, begin the section `end` again."""
        self._name = None
        self._open.close()
        if self._has_ended:
            self.end()

    def end(self) -> None:
        """Begin the section `end`, which lasts for the rest of the script."""
        self._has_ended = True
        self.enter("end")
