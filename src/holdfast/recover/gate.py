"""Find out which checkpoints are healthy, because training went well for some steps after them.

The loss shows a broken state only some steps after the state broke, so the newest checkpoints may
contain a broken state. A rollback goes only to healthy checkpoints, and retention never deletes the
newest healthy checkpoint. Retention could also delete each checkpoint before it becomes healthy. So
one candidate at a time is held, which protects it from deletion until it is healthy. The other
candidates become healthy, too, if they still exist then.
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


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A durable checkpoint that is not healthy yet."""

    path: Path
    step: int
    is_held: bool
    """True if the candidate is protected from deletion."""


@dataclass(kw_only=True)
class CheckpointGate:
    """The checkpoints of one run that can become healthy, and those that are."""

    healthy_after: int
    """A checkpoint is healthy after this number of steps with an ordinary loss."""
    folders: set[Path] = field(default_factory=set)
    """The folders into which the run has saved. Other checkpoints, such as those of a pretrained
    model, do not count.
    """
    healthy: dict[Path, int] = field(default_factory=dict)
    """For each folder, the step of the newest checkpoint that was marked as healthy."""
    _candidates: list[Candidate] = field(default_factory=list)

    def saved(self, path: Path, step: int) -> bool:
        """Record a durable checkpoint; return True if it must be held.

        In each folder, one candidate at a time is held.
        """
        self.folders.add(path.parent)
        must_hold = not any(
            one.is_held and one.path.parent == path.parent for one in self._candidates
        )
        self._candidates.append(Candidate(path=path, step=step, is_held=must_hold))
        return must_hold

    def restored(self, step: int) -> list[Path]:
        """Forget the candidates after `step`, from which an attempt continues.

        Returns:
            The forgotten candidates that are held.
        """
        return [one.path for one in self._take(lambda one: one.step > step) if one.is_held]

    def lost(self, path: Path) -> None:
        """Forget a candidate that could not be held, so that the next checkpoint is held."""
        self._take(lambda one: one.path == path)

    def passed(self, step: int) -> list[Candidate]:
        """Record a step with an ordinary loss; return the candidates to mark as healthy now.

        A candidate that is not held may have been deleted. So such a candidate counts as healthy
        only after `marked`. Of several in a folder, only the newest is returned.
        """
        due = self._take(lambda one: step - one.step >= self.healthy_after)
        for one in due:
            if one.is_held:
                self.marked(one)
        newest = {one.path.parent: one for one in due if not one.is_held}
        return [one for one in due if one.is_held or newest[one.path.parent] is one]

    def marked(self, candidate: Candidate) -> None:
        """Record that a candidate is healthy."""
        folder = candidate.path.parent
        self.healthy[folder] = max(candidate.step, self.healthy.get(folder, candidate.step))

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

    def _take(self, is_due: Callable[[Candidate], bool]) -> list[Candidate]:
        due = [one for one in self._candidates if is_due(one)]
        self._candidates = [one for one in self._candidates if not is_due(one)]
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
