"""Find out which checkpoints are healthy, because training went well for some steps after them.

The loss shows a broken state only some steps after the state broke, so the newest checkpoints may
contain a broken state. A rollback goes only to healthy checkpoints, and retention never deletes the
newest healthy checkpoint. Retention could also delete each checkpoint before it becomes healthy. So
one candidate at a time is held, which protects it from deletion until it is healthy.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.checkpoint import newest_healthy, note_healthy, release, roll_back, want
from holdfast.core.errors import HoldfastError

NOT_HEALTHY = (
    "There is no healthy checkpoint to go back to: a checkpoint is healthy after --healthy-after steps with an "
    "ordinary loss."
)


HOLDER = "holdfast run"
HELD_FOR_S = 24 * 3600.0
"""A hold expires after this time, in case a run has ended without releasing it."""


@dataclass(kw_only=True)
class CheckpointGate:
    """The candidates of one run, one per folder, that can become healthy next."""

    healthy_after: int
    """A checkpoint is healthy after this number of steps with an ordinary loss."""
    folders: set[Path] = field(default_factory=set)
    """The folders into which the run has saved. Other checkpoints, such as those of a pretrained
    model, do not count.
    """
    healthy: dict[Path, int] = field(default_factory=dict)
    """For each folder, the step of the newest checkpoint that was marked as healthy."""
    _candidates: dict[Path, tuple[Path, int]] = field(default_factory=dict)

    def saved(self, path: Path, step: int) -> bool:
        """Record a durable checkpoint; return True if it becomes a candidate and must be held."""
        self.folders.add(path.parent)
        if path.parent in self._candidates:
            return False
        self._candidates[path.parent] = path, step
        return True

    def restored(self, step: int) -> list[Path]:
        """Record the step from which an attempt continues; return the candidates that are newer."""
        return self._take(lambda candidate: candidate > step)

    def lost(self, path: Path) -> None:
        """Record that a candidate could not be held, so that the next checkpoint replaces it."""
        if self._candidates.get(path.parent, (None, 0))[0] == path:
            del self._candidates[path.parent]

    def passed(self, step: int) -> list[Path]:
        """Record a step with an ordinary loss; return the checkpoints that became healthy."""
        healthy = {
            path: candidate
            for path, candidate in self._candidates.values()
            if step - candidate >= self.healthy_after
        }
        self.healthy |= {path.parent: candidate for path, candidate in healthy.items()}
        return self._take(lambda candidate: step - candidate >= self.healthy_after)

    def can_go_back(self, before_step: int) -> bool:
        """Return True if each folder has a healthy checkpoint with a lower step than `before_step`."""
        found = [self.healthy.get(folder) for folder in self.folders]
        return bool(found) and all(step is not None and step < before_step for step in found)

    def go_back(self, before_step: int) -> int | None:
        """Roll each folder back to its newest healthy checkpoint with a step below `before_step`.

        Returns:
            The step from which the next attempt continues. If not every folder has such a
            checkpoint, the result is None and nothing is changed.

        Raises:
            NotFound: see `checkpoint.roll_back`.
            OSError: see `checkpoint.roll_back`.
        """
        found = [newest_healthy(folder, before_step=before_step) for folder in self.folders]
        healthy = [step for step in found if step is not None]
        if not healthy or len(healthy) < len(found):
            return None
        for folder in self.folders:
            roll_back(folder, to_step=min(healthy))
        self.healthy = dict.fromkeys(self.folders, min(healthy))
        return min(healthy)

    def _take(self, is_due: Callable[[int], bool]) -> list[Path]:
        due = [path for path, step in self._candidates.values() if is_due(step)]
        for path in due:
            del self._candidates[path.parent]
        return due


def hold(path: Path, now_s: float) -> str | None:
    """Protect a checkpoint from deletion; return the reason if this is not possible."""
    return _tried(lambda: want(path, HOLDER, now_s=now_s, until_s=now_s + HELD_FOR_S))


def let_go(path: Path, now_s: float) -> str | None:
    """End the protection of a checkpoint; return the reason if this is not possible."""
    return _tried(lambda: release(path, HOLDER, now_s=now_s))


def mark_healthy(path: Path, step: int, now_s: float) -> str | None:
    """Mark a checkpoint as healthy, due to the steps up to `step`; return the reason if impossible."""
    why = f"the loss was ordinary up to step {step}"
    return _tried(lambda: note_healthy(path, by=HOLDER, now_s=now_s, why=why)) or let_go(
        path, now_s
    )


def _tried(change: Callable[[], object]) -> str | None:
    try:
        change()
    except (HoldfastError, OSError) as error:  # retention may have deleted it
        return str(error)
    return None
