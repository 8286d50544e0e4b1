"""Describe one save to the writing processes of all ranks."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from holdfast.checkpoint.catalog.retention import Best, Retention
from holdfast.checkpoint.format.manifest import Save
from holdfast.checkpoint.format.paths import staging_path, step_path


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """Describe one checkpoint to write.

    Attributes:
        folder: the folder of the checkpoints.
        step: the step of the save.
        save: the unique name of the save.
        created_at_s: the time of the call of `save`, in seconds since 1970.
        keep: the retention policy, which selects the checkpoints that stay after the save.
        damaged: the folders of checkpoints that are known to be damaged.
        metrics: numbers to record in the checkpoint's annotations, by name.
        run: the name of the run that saves.
        lease: the token that proves the right to write into the folder, see `writer_lease`. Empty
            if the right could not be acquired. None if the folder's steps do not belong to a single
            training, so that a save never abandons other steps.
        ancestors: the earlier saves of this training and the save that it restored, newest first.
            Some of them may have failed. The newest one whose checkpoint exists becomes the parent.
    """

    folder: Path
    step: int
    save: str
    created_at_s: float
    keep: Retention
    damaged: tuple[Path, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    run: str = ""
    lease: str | None = None
    ancestors: tuple[Save, ...] = ()

    @property
    def session(self) -> str:
        """Return the id of the trainer's session: the part of `save` before the last hyphen."""
        return self.save.rpartition("-")[0]

    @property
    def staging(self) -> Path:
        """Return the folder into which the ranks write before the commit."""
        return staging_path(self.folder, self.step, self.save)

    @property
    def final(self) -> Path:
        """Return the folder of the finished checkpoint."""
        return step_path(self.folder, self.step)

    def as_json(self) -> dict[str, Any]:
        """Return the request as a JSON object."""
        damaged = sorted(path.name for path in self.damaged)[-_DAMAGED:]
        return {**asdict(self), "folder": str(self.folder), "damaged": damaged}

    @classmethod
    def of_json(cls, content: dict[str, Any]) -> Self:
        """Read the request from the JSON object of `as_json`."""
        best = tuple(Best(**each) for each in content["keep"]["best"])
        keep = Retention(**{**content["keep"], "best": best})
        folder = Path(content["folder"])
        damaged = tuple(folder / name for name in content["damaged"])
        ancestors = tuple(Save(**each) for each in content["ancestors"])
        return cls(
            **{
                **content,
                "folder": folder,
                "keep": keep,
                "damaged": damaged,
                "ancestors": ancestors,
            }
        )


_DAMAGED: Final = 1000
"""The limit on damaged checkpoints named in a request, newest first; messages have a size limit."""
