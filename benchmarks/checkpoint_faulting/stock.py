"""Put the same damage into files that stock PyTorch wrote and reads."""

import logging
import random
import shutil
import warnings
from pathlib import Path
from typing import Final

import torch.distributed.checkpoint as dcp

from checkpoint_faulting.files import DAMAGES, Scene
from checkpoint_faulting.ground import STEPS, Ground
from checkpoint_faulting.state import blank, difference, state_of

KINDS: Final = (
    "bit flips in .distcp",
    "lost pages",
    "misdirected writes",
    "a shard of another run",
    "a shard of another step",
)


class StockGround(Ground):
    """Checkpoints of the same states that `dcp.save` wrote."""

    def base(self, world_size: int, *, other: bool = False) -> Path:  # noqa: ARG002 - one process has written all
        """Return a folder with the checkpoints of STEPS."""
        return self.folder / f"stock-{self.seed + other}"

    def make(self) -> None:
        """Write the checkpoints, in two files each."""
        with warnings.catch_warnings(action="ignore"):
            for other in (False, True):
                for step in STEPS:
                    path = self.checkpoint(1, step, other=other)
                    writer = dcp.FileSystemWriter(path, thread_count=2)
                    dcp.save(state_of(self.seed + other, step), storage_writer=writer)


def silently_wrong(folder: Path, seed: int, count: int) -> dict[str, int]:
    """Count, for each kind of damage, the silent loads of wrong tensors in `count` tries."""
    logging.disable()  # it logs tracebacks
    ground = StockGround(folder, seed)
    ground.make()
    found = dict.fromkeys(KINDS, 0)
    for kind in KINDS:
        for number in range(count):
            chance = random.Random(f"{seed}/{kind}/{number}")
            scene = Scene(
                folder=folder / "stock",
                ground=ground,
                world_size=1,
                chance=chance,
                canary=folder / "none",
            )
            ground.lay_down(1, scene.folder)
            path = scene.checkpoint(STEPS[-1])
            DAMAGES[kind](scene, path)
            found[kind] += _loads_wrong(path, state_of(seed, STEPS[-1]))
            shutil.rmtree(scene.folder)
    return found


def _loads_wrong(path: Path, right: dict[str, object]) -> bool:
    state = blank(right)
    try:
        with warnings.catch_warnings(action="ignore"):
            dcp.load(state, checkpoint_id=path)
    except BaseException:  # DCP's own is no Exception; whatever it says, it says something
        return False
    return bool(difference(state, right))
