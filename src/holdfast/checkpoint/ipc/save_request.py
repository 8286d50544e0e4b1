"""Describe one save to the writing processes of all ranks."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from holdfast.checkpoint.catalog.retention import Best, Retention
from holdfast.checkpoint.format.manifest import Save
from holdfast.checkpoint.format.paths import staging_path, step_path


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """A request to write one checkpoint.

    `save` is the unique name of the save. `keep` and `damaged` decide which checkpoints are deleted after the save.
    `metrics` are written into the annotations of the checkpoint, by name. `run` and `lease` are the run and the lease
    token of the writer, see `writer_lease`. The token is empty without a lease, and None where the steps are not those
    of one training: then no step is abandoned. `ancestors` are the earlier saves and the restored one, newest first;
    some may have failed. The newest ancestor that exists is the parent.
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
        """Return the staging folder of the save."""
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
    def of_json(cls, told: dict[str, Any]) -> Self:
        """Read the request from the JSON object of `as_json`."""
        best = tuple(Best(**each) for each in told["keep"]["best"])
        keep = Retention(**{**told["keep"], "best": best})
        folder = Path(told["folder"])
        damaged = tuple(folder / name for name in told["damaged"])
        ancestors = tuple(Save(**each) for each in told["ancestors"])
        return cls(
            **{**told, "folder": folder, "keep": keep, "damaged": damaged, "ancestors": ancestors}
        )


_DAMAGED: Final = 1000
"""The request names the newest damaged checkpoints only, which bounds the length of a message."""
