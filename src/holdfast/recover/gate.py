"""Find which checkpoints are healthy: the training went well for some steps after them.

A loss shows a broken state only after the step that broke it, so the newest checkpoints may hold a broken state. A
rollback goes to healthy checkpoints alone. Retention never deletes the newest healthy one, and one candidate at a time
is held until it is healthy, since retention may keep less than the steps that this takes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.checkpoint import note_healthy, release, want
from holdfast.core.errors import HoldfastError

NOT_HEALTHY = (
    "There is no healthy checkpoint to go back to: a checkpoint is healthy after --healthy-after steps with an "
    "ordinary loss."
)


HOLDER = "holdfast run"
HELD_FOR_S = 24 * 3600.0
"""A run that ends without releasing a checkpoint keeps it no longer."""


@dataclass(kw_only=True)
class CheckpointGate:
    """The checkpoint of one run that is to become healthy next."""

    healthy_after: int
    """So many steps with an ordinary loss after a checkpoint make the checkpoint healthy."""
    folders: set[Path] = field(default_factory=set)
    """The folders of all checkpoints."""
    _candidate: tuple[Path, int] | None = None

    def saved(self, path: Path, step: int) -> bool:
        """Take in a checkpoint that is durable; return whether it is the candidate from now on, to be held."""
        self.folders.add(path.parent)
        if self._candidate is not None:
            return False
        self._candidate = path, step
        return True

    def restored(self, path: Path, step: int) -> Path | None:
        """Take in the checkpoint that an attempt goes on from.

        Returns:
            The former candidate, to be released, if the training has left it behind.
        """
        self.folders.add(path.parent)
        former = self._candidate
        if former is not None and former[1] <= step:
            return None
        self._candidate = path, step
        return None if former is None else former[0]

    def lost(self, path: Path) -> None:
        """Take in that a candidate could not be held: the next checkpoint takes its place."""
        if self._candidate is not None and self._candidate[0] == path:
            self._candidate = None

    def passed(self, step: int) -> Path | None:
        """Take in a step with an ordinary loss; return the checkpoint that is healthy with this step."""
        if self._candidate is None or step - self._candidate[1] < self.healthy_after:
            return None
        (path, _), self._candidate = self._candidate, None
        return path


def hold(path: Path, now_s: float) -> str | None:
    """Keep a checkpoint from being deleted; return why that is not possible."""
    return _tried(lambda: want(path, HOLDER, now_s=now_s, until_s=now_s + HELD_FOR_S))


def let_go(path: Path, now_s: float) -> str | None:
    """Let a checkpoint be deleted again; return why that is not possible."""
    return _tried(lambda: release(path, HOLDER, now_s=now_s))


def mark_healthy(path: Path, step: int, now_s: float) -> str | None:
    """Mark a checkpoint as healthy because of the steps up to `step`; return why that is not possible."""
    why = f"the loss was ordinary up to step {step}"
    return _tried(lambda: note_healthy(path, by=HOLDER, now_s=now_s, why=why)) or let_go(
        path, now_s
    )


def _tried(change: Callable[[], object]) -> str | None:
    try:
        change()
    except (HoldfastError, OSError) as error:  # retention may have deleted the checkpoint
        return str(error)
    return None
