"""Find which checkpoints are healthy: the training went well for some steps after them.

A loss shows a broken state only after the step that broke it, so the newest checkpoints may hold a
broken state. A rollback goes to healthy checkpoints alone. Retention never deletes the newest
healthy checkpoint. Retention may keep too few steps for a checkpoint to become healthy, so one
candidate at a time is held until then.
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
"""The time after which a hold is over that an ended run has not released."""


@dataclass(kw_only=True)
class CheckpointGate:
    """The checkpoints of one run that are to become healthy next, one a folder."""

    healthy_after: int
    """So many steps with an ordinary loss after a checkpoint make the checkpoint healthy."""
    folders: set[Path] = field(default_factory=set)
    """The folders of the run's own saves; others, such as a pretrained model's, do not count."""
    healthy: dict[Path, int] = field(default_factory=dict)
    """The newest checkpoint that was marked healthy in each folder, by its step."""
    _candidates: dict[Path, tuple[Path, int]] = field(default_factory=dict)

    def saved(self, path: Path, step: int) -> bool:
        """Record a durable checkpoint; return True if it becomes a candidate, to be held."""
        self.folders.add(path.parent)
        if path.parent in self._candidates:
            return False
        self._candidates[path.parent] = path, step
        return True

    def restored(self, step: int) -> list[Path]:
        """Record the step from which an attempt continues; return the candidates beyond it."""
        return self._take(lambda candidate: candidate > step)

    def lost(self, path: Path) -> None:
        """Record that a candidate could not be held; the next checkpoint replaces it."""
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
        """Return whether each folder has a healthy checkpoint below a step."""
        found = [self.healthy.get(folder) for folder in self.folders]
        return bool(found) and all(step is not None and step < before_step for step in found)

    def go_back(self, before_step: int) -> int | None:
        """Abandon the checkpoints of each folder that are newer than a healthy one below a step.

        Returns:
            The step to go on from; None, and nothing is changed, if not every folder has a healthy
            checkpoint.

        Raises:
            NotFound, OSError: see `checkpoint.roll_back`.
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
    """Keep a checkpoint from being deleted; return why that is not possible."""
    return _tried(lambda: want(path, HOLDER, now_s=now_s, until_s=now_s + HELD_FOR_S))


def let_go(path: Path, now_s: float) -> str | None:
    """Let a checkpoint be deleted again; return why that is not possible."""
    return _tried(lambda: release(path, HOLDER, now_s=now_s))


def mark_healthy(path: Path, step: int, now_s: float) -> str | None:
    """Mark a checkpoint as healthy by the steps up to `step`; return the reason if impossible."""
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
