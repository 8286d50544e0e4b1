"""Put wrong bytes into memory before they reach a file: in an image or in live weights."""

import ctypes
import itertools
import os
import random
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from checkpoint_faulting.commits import order_of, write
from checkpoint_faulting.ground import NEXT, STEPS, Ground, StagedImage
from checkpoint_faulting.oracle import RIGHT, Verdict, is_sentence, judge, leftovers
from holdfast.checkpoint import Checkpointer
from holdfast.core.errors import SaveFailed

TENSORS: Final = "a bit that flips in a staged tensor"
PLAIN: Final = "a bit that flips in a staged plain value"
FRAMES: Final = "a bit that flips in what is around a staged tensor"
STALE: Final = "staged bytes of another step"
HELD: Final = "a bit that flips in the arena while the writing process is stopped"
KINDS: Final = (TENSORS, PLAIN, FRAMES, STALE)
IN_PLACE: Final = "weights changed during the copy, in place"
RAW: Final = "weights changed during the copy, in memory"
CHANGES: Final = (IN_PLACE, RAW)
TENSOR_COUNT: Final = 96
ELEMENTS: Final = 65_536


@dataclass(frozen=True)
class Staged:
    """An image that is wrong after staging, and written so."""

    kind: str
    number: int
    ground: Ground
    scratch: Path

    def run(self) -> Verdict:
        """Run the case in this process."""
        folder = self.scratch / f"staged-{KINDS.index(self.kind)}-{self.number}"
        self.ground.lay_down(1, folder)
        try:
            return self._run(folder)
        finally:
            shutil.rmtree(folder)

    def _run(self, folder: Path) -> Verdict:
        image = self.ground.image(1, 0)
        memory = bytearray(image.memory)
        self._spoil(image, memory, random.Random(f"{self.ground.seed}/{self.kind}/{self.number}"))
        why = write(image, order_of(folder), bytes(memory))
        if why and not is_sentence(why):
            return Verdict("crash", why)
        if not why and self.kind in (TENSORS, STALE) and memory != image.memory:
            return Verdict("silent", "it was committed")
        attested = STEPS if why else (*STEPS, NEXT)
        verdict = judge(folder, self.ground.seed, world_size=1, attested=attested, least=STEPS[-1])
        return (
            Verdict("left", str(leftovers(folder)))
            if verdict.is_right and leftovers(folder)
            else verdict
        )

    def _spoil(self, image: StagedImage, memory: bytearray, chance: random.Random) -> None:
        if self.kind == STALE:
            other = self.ground.image(1, 0, other=True).memory
            pieces = chance.sample(
                image.layout.pieces, chance.choice((1, 3, len(image.layout.pieces)))
            )
            for begin, length in pieces:
                page = slice(begin, begin + chance.choice((length, min(length, 4096))))
                memory[page] = other[page]
            return
        begin, length = chance.choice(
            {TENSORS: image.layout.pieces, PLAIN: image.slots, FRAMES: image.frames}[self.kind]
        )
        memory[begin + chance.randrange(length)] ^= 1 << chance.randrange(8)


def flip_in_arena(folder: Path, seed: int, count: int) -> list[Verdict]:
    """Flip a bit in the buffer of a real trainer while its writing process is stopped."""
    chance, verdicts = random.Random(seed), []
    with Checkpointer(folder, keep=None, on_failure="warn") as ckpt:
        ckpt.save(1, {"weights": weights(seed, 1)}).result()
        writer, seats = ckpt._engine._writer.pid, ckpt._engine._seats
        assert writer is not None, "it has saved"
        live = torch.empty(TENSOR_COUNT, ELEMENTS)
        for step in range(2, count + 2):
            live.copy_(weights(seed, step))
            os.kill(writer, signal.SIGSTOP)
            handle = ckpt.save(step, {"weights": live})
            ckpt.before_update()
            arena = next(each.arena for each in seats._seats if each.arena.step == step)
            plan = ckpt._engine._shape.agreed
            begin, length = chance.choice(plan.layout.pieces)
            arena.image[begin + chance.randrange(length)] ^= 1 << chance.randrange(8)
            os.kill(writer, signal.SIGCONT)
            try:
                handle.result()
            except SaveFailed as error:
                verdicts.append(RIGHT if is_sentence(str(error)) else Verdict("crash", str(error)))
            else:
                verdicts.append(Verdict("silent", f"step {step} was committed"))
    return verdicts


def weights(seed: int, step: int) -> torch.Tensor:
    """Return many tensors in one, to be split."""
    return torch.rand(
        TENSOR_COUNT, ELEMENTS, generator=torch.Generator().manual_seed(seed * 1009 + step)
    )


def change_during_copy(folder: Path, seed: int, kind: str, count: int) -> list[Verdict]:
    """Save repeatedly, and write to a tensor during its copy or just before."""
    chance, verdicts = random.Random(f"{seed}/{kind}"), list[Verdict]()
    numbers = itertools.count()
    while len(verdicts) < count:
        place = folder / str(next(numbers))
        with Checkpointer(place, keep=2, on_failure="warn") as ckpt:
            names = [f"layer-{number:03}" for number in range(TENSOR_COUNT)]
            state = dict(zip(names, weights(seed, 0).clone().unbind(), strict=True))
            state = {name: tensor.clone() for name, tensor in state.items()}
            ckpt.save(1, state).result()
            # One that was found out is copied in the call from then on, so each is changed once.
            for step, name in enumerate(
                chance.sample(names, min(TENSOR_COUNT // 2, count - len(verdicts))), start=2
            ):
                before = {each: tensor.clone() for each, tensor in state.items()}
                handle = ckpt.save(step, state)
                _change(state[name], kind, chance)
                ckpt.before_update()
                verdicts.append(_judge_change(ckpt, step, handle, before, name))
                state[name].copy_(before[name])
        shutil.rmtree(place)
    return verdicts


def _change(tensor: torch.Tensor, kind: str, chance: random.Random) -> None:
    at = chance.randrange(ELEMENTS)
    if kind == IN_PLACE:
        tensor[at:].add_(1.0)
    else:  # no version counter sees it
        ctypes.memset(tensor.data_ptr() + 4 * at, 0x41, 4 * (ELEMENTS - at))


def _judge_change(
    ckpt: Checkpointer, step: int, handle: object, before: dict[str, torch.Tensor], name: str
) -> Verdict:
    """Judge a save: it must fail and name the tensor, or hold the state live at its call."""
    try:
        handle.result()  # type: ignore[attr-defined]
    except SaveFailed as error:
        return (
            RIGHT
            if is_sentence(str(error)) and name in str(error)
            else Verdict("crash", str(error))
        )
    found = {each: torch.zeros_like(tensor) for each, tensor in before.items()}
    if ckpt.restore(found) != step:
        return Verdict("older", f"step {step} is said to be durable")
    differs = [each for each in before if not torch.equal(before[each], found[each])]
    return Verdict("silent", f"{differs} of step {step}") if differs else RIGHT
