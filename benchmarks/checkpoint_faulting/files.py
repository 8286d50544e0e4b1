"""Damage the files of a checkpoint at rest as a disk, a network or a person does."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from checkpoint_faulting.ground import STEPS, Ground
from holdfast.checkpoint.catalog.annotations import MARKS_NAME
from holdfast.checkpoint.format.checksums import BLOCK_BYTES, SIDECAR_SUFFIX
from holdfast.checkpoint.format.dcp_metadata import METADATA_NAME
from holdfast.checkpoint.format.manifest import MANIFEST_NAME
from holdfast.checkpoint.format.paths import step_path

PAGE_BYTES: Final = 4096


@dataclass(kw_only=True)
class Scene:
    """A folder of checkpoints that may be damaged, and the facts that must hold afterwards.

    `hit`: the steps that need not be restorable any more. `refused`: the steps that must not be
    restored. `may_refuse`: an error in words is right too. `canary`: a file that must not appear.
    """

    folder: Path
    ground: Ground
    world_size: int
    chance: random.Random
    canary: Path
    hit: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)
    may_refuse: bool = False

    def checkpoint(self, step: int) -> Path:
        """Return the folder of one checkpoint."""
        return step_path(self.folder, step)

    def aims(self) -> Sequence[int]:
        """Return the steps to damage: mostly the newest, at times the two newest, or all."""
        return self.chance.choice(
            [STEPS[-1:]] * 14 + [STEPS[-2:-1]] * 2 + [STEPS[-2:]] * 3 + [STEPS]
        )


Damage = Callable[[Scene, Path], None]


def rewrite(path: Path, content: bytes) -> None:
    """Give a file new bytes; files that share its old bytes stay as they are."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def data_files(checkpoint: Path) -> list[Path]:
    """Return the files with the tensors."""
    return sorted(checkpoint.glob("*.distcp"))


def _flip(scene: Scene, path: Path) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(scene.chance.choice((1, 1, 1, 2, 5))):
        content[scene.chance.randrange(len(content))] ^= 1 << scene.chance.randrange(8)
    rewrite(path, bytes(content))


def _flip_data(scene: Scene, checkpoint: Path) -> None:
    _flip(scene, scene.chance.choice(data_files(checkpoint)))


def _flip_sidecar(scene: Scene, checkpoint: Path) -> None:
    _flip(scene, scene.chance.choice(sorted(checkpoint.glob(f"*{SIDECAR_SUFFIX}"))))


def _flip_marks(scene: Scene, checkpoint: Path) -> None:
    path = checkpoint / MARKS_NAME
    if not path.exists():
        path.write_bytes(scene.chance.randbytes(300))
    _flip(scene, path)


def _lose_page(scene: Scene, checkpoint: Path) -> None:
    path = scene.chance.choice([*data_files(checkpoint), checkpoint / METADATA_NAME])
    content = bytearray(path.read_bytes())
    at = scene.chance.randrange(0, len(content), PAGE_BYTES)
    content[at : at + PAGE_BYTES] = bytes(len(content[at : at + PAGE_BYTES]))
    rewrite(path, bytes(content))


def _misdirect(scene: Scene, checkpoint: Path) -> None:
    """Write to a wrong place of the same file."""
    path = scene.chance.choice(data_files(checkpoint))
    content = bytearray(path.read_bytes())
    unit = scene.chance.choice((512, PAGE_BYTES, BLOCK_BYTES))
    source, target = (
        scene.chance.randrange(0, len(content) // unit * unit or 1, unit) for _ in range(2)
    )
    moved = content[source : source + unit]
    content[target : target + len(moved)] = moved
    rewrite(path, bytes(content[: path.stat().st_size]))


def _any_file(scene: Scene, checkpoint: Path) -> Path:
    names = (MANIFEST_NAME, METADATA_NAME)
    return scene.chance.choice([*data_files(checkpoint), *(checkpoint / name for name in names)])


def _truncate(scene: Scene, checkpoint: Path) -> None:
    path = _any_file(scene, checkpoint)
    content = path.read_bytes()
    rewrite(
        path,
        content[: scene.chance.choice((0, len(content) - 1, scene.chance.randrange(len(content))))],
    )


def _append(scene: Scene, checkpoint: Path) -> None:
    path = _any_file(scene, checkpoint)
    rewrite(
        path, path.read_bytes() + scene.chance.randbytes(scene.chance.choice((1, 8, PAGE_BYTES)))
    )


def _lose_file(scene: Scene, checkpoint: Path) -> None:
    _any_file(scene, checkpoint).unlink()


def _swap(scene: Scene, checkpoint: Path) -> None:
    one, other = scene.chance.sample(data_files(checkpoint), 2)
    suffixes = ("", SIDECAR_SUFFIX) if scene.chance.random() < 0.5 else ("",)
    for suffix in suffixes:
        paths = [path.with_name(path.name + suffix) for path in (one, other)]
        left, right = (path.read_bytes() for path in paths)
        rewrite(paths[0], right)
        rewrite(paths[1], left)


def _put_other(checkpoint: Path, source: Path, names: Sequence[str]) -> None:
    for name in names:
        if (source / name).exists():  # PyTorch alone writes no sidecars
            rewrite(checkpoint / name, (source / name).read_bytes())


def _shard_names(scene: Scene, checkpoint: Path) -> list[str]:
    name = scene.chance.choice(data_files(checkpoint)).name
    return [name, name + SIDECAR_SUFFIX] if scene.chance.random() < 0.5 else [name]


def _other_run(scene: Scene, checkpoint: Path) -> None:
    source = scene.ground.checkpoint(scene.world_size, _step(checkpoint), other=True)
    _put_other(checkpoint, source, _shard_names(scene, checkpoint))


def _other_step(scene: Scene, checkpoint: Path) -> None:
    step = scene.chance.choice([each for each in STEPS if each != _step(checkpoint)])
    _put_other(
        checkpoint, scene.ground.checkpoint(scene.world_size, step), _shard_names(scene, checkpoint)
    )


def _other_head(scene: Scene, checkpoint: Path) -> None:
    """Take the metadata, the manifest, or both from another step."""
    names = scene.chance.choice(([MANIFEST_NAME], [METADATA_NAME], [MANIFEST_NAME, METADATA_NAME]))
    if MANIFEST_NAME in names:
        step = scene.chance.choice([each for each in STEPS if each != _step(checkpoint)])
        source = scene.ground.checkpoint(scene.world_size, step)
    else:  # that of another step is the same
        source = scene.ground.checkpoint(3 - scene.world_size, _step(checkpoint))
    _put_other(checkpoint, source, names)


def _other_folder(scene: Scene, checkpoint: Path) -> None:
    """Put all files of another step under this step's name."""
    step = scene.chance.choice([each for each in STEPS if each != _step(checkpoint)])
    source = scene.ground.checkpoint(scene.world_size, step)
    for path in list(checkpoint.iterdir()):
        path.unlink()
    _put_other(checkpoint, source, [path.name for path in source.iterdir()])


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


DAMAGES: Final[dict[str, Damage]] = {
    "bit flips in .distcp": _flip_data,
    "bit flips in .metadata": lambda scene, checkpoint: _flip(scene, checkpoint / METADATA_NAME),
    "bit flips in holdfast.json": lambda scene, checkpoint: _flip(
        scene, checkpoint / MANIFEST_NAME
    ),
    "lost pages": _lose_page,
    "misdirected writes": _misdirect,
    "truncated files": _truncate,
    "files with more at their end": _append,
    "missing files": _lose_file,
    "swapped shards": _swap,
    "a shard of another run": _other_run,
    "a shard of another step": _other_step,
    "manifest or metadata of another checkpoint": _other_head,
    "another checkpoint under the name": _other_folder,
}
HARMLESS: Final[dict[str, Damage]] = {
    "bit flips in .xxh3 sidecars": _flip_sidecar,
    "bit flips in marks": _flip_marks,
}
"""The kinds of damage after which every checkpoint must still be restored."""


def damage(scene: Scene, kind: str) -> None:
    """Damage checkpoints at random."""
    steps = scene.aims()
    if kind in DAMAGES:
        scene.hit.update(steps)
    for step in steps:
        (DAMAGES.get(kind) or HARMLESS[kind])(scene, scene.checkpoint(step))
