"""Find which checkpoints are healthy: the training went well for some steps after them.

A loss shows a broken state only after the step that broke it, so the newest checkpoints may hold a broken state. A
rollback goes to healthy checkpoints alone, and retention never deletes the newest one.
"""

from dataclasses import dataclass, field
from pathlib import Path

from holdfast.checkpoint import note_healthy
from holdfast.core.errors import HoldfastError

NOT_HEALTHY = (
    "There is no healthy checkpoint to go back to: a checkpoint is healthy after --healthy-after steps with an "
    "ordinary loss."
)


def mark_healthy(path: Path, step: int, now_s: float) -> str | None:
    """Mark a checkpoint as healthy because of the steps up to `step`; return what kept it from being marked.

    Retention may have deleted the checkpoint meanwhile.
    """
    why = f"the loss was ordinary up to step {step}"
    try:
        note_healthy(path, by="holdfast run", now_s=now_s, why=why)
    except (HoldfastError, OSError) as error:
        return str(error)
    return None


@dataclass(kw_only=True)
class CheckpointGate:
    """The checkpoints of one run that are not healthy yet."""

    healthy_after: int
    """So many steps with an ordinary loss after a checkpoint make the checkpoint healthy."""
    folders: set[Path] = field(default_factory=set)
    """The folders of all checkpoints."""
    _waiting: dict[Path, int] = field(default_factory=dict)

    def restarted(self) -> None:
        """Forget what waits: the attempt that follows saves again what it needs."""
        self._waiting.clear()

    def saved(self, path: Path, step: int) -> None:
        """Take in a checkpoint that is durable, or that an attempt has begun from."""
        self.folders.add(path.parent)
        self._waiting[path] = step

    def passed(self, step: int) -> list[Path]:
        """Take in a step with an ordinary loss; return the checkpoints that are healthy with this step."""
        healthy = [
            path for path, saved in self._waiting.items() if step - saved >= self.healthy_after
        ]
        for path in healthy:
            del self._waiting[path]
        return healthy
