"""Inject one fault into files at rest: copy a base, damage the copy by a seed, restore, judge."""

import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from checkpoint_faulting.files import DAMAGES, HARMLESS, Scene, damage
from checkpoint_faulting.forgeries import FORGERIES, forge
from checkpoint_faulting.ground import STEPS, Ground
from checkpoint_faulting.oracle import Verdict, judge

KINDS: Final = (*DAMAGES, *HARMLESS, *FORGERIES)


@dataclass(frozen=True)
class Case:
    """A case; `number` distinguishes cases of one kind."""

    kind: str
    number: int
    ground: Ground
    scratch: Path

    def run(self) -> Verdict:
        """Run the case in this process."""
        chance = random.Random(f"{self.ground.seed}/{self.kind}/{self.number}")
        folder = self.scratch / f"{KINDS.index(self.kind)}-{self.number}"
        world_size = chance.choice((1, 1, 2))
        scene = Scene(
            folder=folder / "checkpoints",
            ground=self.ground,
            world_size=world_size,
            chance=chance,
            canary=folder / "executed",
        )
        self.ground.lay_down(world_size, scene.folder)
        try:
            (forge if self.kind in FORGERIES else damage)(scene, self.kind)
            whole = [step for step in STEPS if step not in scene.hit]
            verdict = judge(
                scene.folder,
                self.ground.seed,
                world_size=world_size,
                attested=STEPS,
                least=max(whole, default=None),
                refused=scene.refused,
                may_refuse=scene.may_refuse,
            )
            return (
                Verdict("executed", "a file that only its code makes")
                if scene.canary.exists()
                else verdict
            )
        finally:
            shutil.rmtree(folder)
