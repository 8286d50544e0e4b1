"""Run one commit of an image with a fault at a system call: a kill, an error or a delay."""

import errno
import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from checkpoint_faulting.calls import CHANGING, Strike, Traced
from checkpoint_faulting.forks import Failed, Fork
from checkpoint_faulting.ground import NEXT, STEPS, Ground, StagedImage
from checkpoint_faulting.oracle import RIGHT, Verdict, is_sentence, judge, leftovers
from holdfast.checkpoint.catalog.retention import Retention
from holdfast.checkpoint.catalog.staging_dir import remove_leftovers
from holdfast.checkpoint.ipc.save_request import SaveRequest
from holdfast.checkpoint.writer.persist import (
    RankWrite,
    delete_leftovers,
    delete_superfluous,
    persist,
)
from holdfast.checkpoint.writer.process import explain
from holdfast.core.rate_limit import RateLimit

KEEP: Final = 3
"""Few enough that a commit also deletes an old checkpoint."""
LOSING: Final = ("write", "pwrite64", "fsync", "ftruncate")
"""The calls after whose failure the written bytes may not be on the disk."""
STALL_S: Final = 0.05
LOOK_EVERY_S: Final = 0.002
ERRORS: Final = {
    "EIO": errno.EIO,
    "ENOSPC": errno.ENOSPC,
    "EDQUOT": errno.EDQUOT,
    "EROFS": errno.EROFS,
    "ESTALE": errno.ESTALE,
}
KILLED: Final = "kill -9 at a system call of a commit"
KILLED_ONE_OF_TWO: Final = "kill -9 of one of two ranks at a system call of a commit"
SHORT: Final = "short writes"
STALLED: Final = "a system call that hangs for a while"
DEAD: Final = "a disk that fails from some call on (EIO)"
RETURNED: Final = {f"{name} from a system call of a commit": code for name, code in ERRORS.items()}
ANY_ERROR: Final = "EIO from a system call of a commit"
KINDS: Final = (KILLED, KILLED_ONE_OF_TWO, *RETURNED, DEAD, SHORT, STALLED)


def order_of(folder: Path) -> SaveRequest:
    """Return the request to save step NEXT."""
    return SaveRequest(
        folder=folder, step=NEXT, save="save-1", created_at_s=1.0, keep=Retention(last=KEEP)
    )


def write(
    image: StagedImage, order: SaveRequest, memory: bytes | None = None, ends: Path | None = None
) -> str:
    """Write a sealed buffer as the writing process does; return "" if durable, else the reason.

    Args:
        image: the staged image.
        order: the request to save.
        memory: bytes to write instead of the image's.
        ends: waiting for other ranks is over once this file exists.
    """

    def wait() -> None:
        if ends is not None and ends.exists():
            raise TimeoutError("the other ranks had not finished")
        time.sleep(LOOK_EVERY_S)

    part = RankWrite(
        order=order,
        layout=image.layout,
        image=memoryview(memory or image.memory),
        live=image.live,
        await_copy=lambda _count: None,
        wait=wait,
        pace=RateLimit(None),
        progress=lambda _count: None,
    )
    if image.layout.rank == 0:
        delete_leftovers(order)  # as each writing process does with its first save
    try:
        persist(part)
    except Exception as error:
        return explain(order, image.layout.size_bytes, error)
    if image.layout.rank == 0:
        delete_superfluous(order)
    return ""


@dataclass(frozen=True)
class Commit:
    """A commit; `number` distinguishes commits of one kind, `call` is the place of the fault."""

    kind: str
    number: int
    call: int
    ground: Ground
    scratch: Path

    def run(self) -> tuple[Verdict, bool]:
        """Run the commit in this process; also return whether the call came."""
        folder = self.scratch / f"commit-{KINDS.index(self.kind)}-{self.number}"
        world_size = 2 if self.kind == KILLED_ONE_OF_TWO else 1
        self.ground.lay_down(world_size, folder / "checkpoints")
        try:
            return self._run(
                folder / "checkpoints",
                world_size,
                random.Random(f"{self.ground.seed}/{self.number}"),
            )
        except Failed as error:
            return Verdict("stuck", str(error)), True
        finally:
            shutil.rmtree(folder)

    def _run(self, folder: Path, world_size: int, chance: random.Random) -> tuple[Verdict, bool]:
        order, ends = order_of(folder), folder.parent / "ends"
        images = [self.ground.image(world_size, rank) for rank in range(world_size)]
        victim = chance.randrange(world_size)
        forks = [
            Fork(write, image, order, None, ends, held=rank == victim)
            for rank, image in enumerate(images)
        ]
        lost: list[str] = []
        traced = Traced.seize(
            forks[victim].pid, lambda *call: self._strike(*call, order.final, lost, traced.injected)
        )
        forks[victim].release()
        traced.run()
        if not traced.injected:
            for fork in forks:  # the other one may still be deleting
                fork.answer()
            return RIGHT, False
        is_taken_up = False
        if self.is_kill:
            is_taken_up = chance.random() < 0.5
            if is_taken_up:  # by the next process, which is given the same order
                forks[victim] = Fork(write, images[victim], order, None, ends)
            else:
                ends.touch()
                forks.pop(victim)
        said = [fork.answer() for fork in forks]
        return self._judge(
            folder, world_size, said, lost, must=is_taken_up or self.kind in (SHORT, STALLED)
        ), True

    @property
    def is_kill(self) -> bool:
        """True if the process dies."""
        return self.kind in (KILLED, KILLED_ONE_OF_TWO)

    def _strike(
        self, count: int, name: str, final: Path, lost: list[str], injected: list[str]
    ) -> Strike | None:
        if self.kind == SHORT:
            is_here = not injected and count >= self.call and name in ("write", "pwrite64")
            return Strike("short") if is_here else None
        if count != self.call and not (
            self.kind == DEAD and count > self.call and name in CHANGING
        ):
            return None
        if self.is_kill:
            return Strike("kill")
        if self.kind == STALLED:
            return Strike("stall", seconds=STALL_S)
        if name in LOSING and not final.exists():
            lost.append(name)
        return Strike("error", error=RETURNED.get(self.kind, errno.EIO))

    def _judge(
        self, folder: Path, world_size: int, said: list[str], lost: list[str], *, must: bool
    ) -> Verdict:
        """Restore and judge; with `must`, the save has to succeed."""
        is_durable = bool(said) and not any(said)
        if not all(map(is_sentence, filter(None, said))):
            return Verdict("crash", f"not a sentence: {said}")
        if must and not is_durable:
            return Verdict("stuck", f"{said}")
        if is_durable and lost:
            return Verdict("silent", f"{lost} failed, and the save is said to be durable")
        verdict = judge(
            folder,
            self.ground.seed,
            world_size=world_size,
            attested=(*STEPS, NEXT),
            least=NEXT if is_durable else STEPS[-1],
        )
        if not verdict.is_right:
            return verdict
        if must and leftovers(folder):
            return Verdict("left", f"{leftovers(folder)}")
        remove_leftovers(folder)  # as the first save of the next process does
        left = [name for name in leftovers(folder) if not name.endswith(".replaced")]
        return Verdict("left", f"{left}") if left else RIGHT


def calls_of(ground: Ground, scratch: Path, world_size: int) -> list[str]:
    """Return the names of rank 0's system calls, at which a fault can strike.

    The folder is as deep as that of a `Commit`: each level costs calls, and a shallower folder
    would leave out the last calls.
    """
    folder = scratch / f"counted-{world_size}" / "checkpoints"
    ground.lay_down(world_size, folder)
    images = [ground.image(world_size, rank) for rank in range(world_size)]
    forks = [
        Fork(write, image, order_of(folder), held=rank == 0) for rank, image in enumerate(images)
    ]
    traced = Traced.seize(forks[0].pid, lambda _count, _name: None)
    forks[0].release()
    traced.run()
    for fork in forks:
        if why := fork.answer():
            raise Failed(why)
    shutil.rmtree(folder.parent)
    return traced.names
