"""Report a trainer's progress to the supervisor that started it.

The reports are completed steps, and sections without steps, such as an evaluation.
"""

from contextlib import ExitStack
from typing import Final

from holdfast.core.link import JobLink, Number, Unsupervised, connected_link

END_LIMIT_S: Final = 6 * 3600.0
"""Seconds that a script may continue after training, for an evaluation, an export or an upload."""


class Reporter:
    """Report the progress of one trainer. Without a supervisor, do nothing."""

    def __init__(self) -> None:
        """Create the object; `begin` starts the reports."""
        self._link: JobLink = Unsupervised()
        self._open = ExitStack()
        self._name: str | None = None
        self._has_ended = False
        self.step_reported = 0
        """The last reported step, or the step after which training began."""

    def begin(self, step: int) -> None:
        """Start to report the steps of training after `step`; end any open section."""
        self._link = connected_link()
        self._link.watch()
        self.step_reported = step
        self._has_ended = False
        self.leave()

    def step(self, step: int, *, loss: Number | None = None, **metrics: Number | None) -> None:
        """Report that `step` is completed, unless this was reported before."""
        if step > self.step_reported:
            self.step_reported = step
            self._link.step(
                step, loss, {name: value for name, value in metrics.items() if value is not None}
            )

    def enter(self, name: str, *, limit_s: float | None = None) -> None:
        """Begin a section without steps; end an open section of another name.

        `limit_s` is the section's time limit in seconds. After `end`, the limit is `END_LIMIT_S`.
        """
        if name != self._name:
            self._open.close()
            self._name = name
            self._open.enter_context(
                self._link.section(name, limit_s=END_LIMIT_S if self._has_ended else limit_s)
            )

    def leave(self) -> None:
        """End the open section. After `end`, the section `end` begins again."""
        self._name = None
        self._open.close()
        if self._has_ended:
            self.end()

    def end(self) -> None:
        """Begin the section `end`, after training; it lasts for the rest of the script."""
        self._has_ended = True
        self.enter("end")
