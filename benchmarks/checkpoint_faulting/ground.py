"""Make the ground for faults: real checkpoints of Holdfast, and images of a next step.

`make` runs real ranks. A case takes hard links of a base, so a copy costs nothing; a case that
damages a file replaces the file.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from checkpoint_faulting.forks import Fork
from checkpoint_faulting.state import on_ranks, per_rank_of, state_of
from holdfast.checkpoint import Checkpointer
from holdfast.checkpoint.catalog.annotations import note_verified
from holdfast.checkpoint.distributed.collectives import Ranks
from holdfast.checkpoint.format.paths import step_path
from holdfast.checkpoint.format.rank_layout import Layout
from holdfast.checkpoint.snapshot.copy import ChangeTracker, copy_into, live_digests, sources
from holdfast.checkpoint.snapshot.plan import make_plan
from holdfast.checkpoint.state.capture import collect

STEPS: Final = (10, 20, 30)
NEXT: Final = 40
WORLDS: Final = (1, 2)
SHARD_BYTES: Final = 1 << 20
"""Small enough that each rank has several files."""


@dataclass(frozen=True)
class Ground:
    """Folders of checkpoints of two runs, each with one rank and with two.

    The seeds of the runs are `seed` and `seed` + 1.
    """

    folder: Path
    seed: int

    def base(self, world_size: int, *, other: bool = False) -> Path:
        """Return a folder with the checkpoints of STEPS."""
        return self.folder / f"run-{self.seed + other}-of-{world_size}"

    def checkpoint(self, world_size: int, step: int, *, other: bool = False) -> Path:
        """Return the folder of one checkpoint."""
        return step_path(self.base(world_size, other=other), step)

    def lay_down(self, world_size: int, folder: Path) -> None:
        """Make a separate folder with the checkpoints of a base."""
        shutil.copytree(self.base(world_size), folder, copy_function=os.link)

    def image(self, world_size: int, rank: int, *, other: bool = False) -> "StagedImage":
        """Return the image of step NEXT."""
        return StagedImage.load(self.base(world_size, other=other).with_suffix(f".staged-{rank}"))


@dataclass(frozen=True)
class StagedImage:
    """One rank's part of a save in a sealed buffer; `live` has the digests of the live tensors.

    `slots` and `frames` are the places of plain values and of the bytes around tensors, each an
    offset and a length.
    """

    layout: Layout
    memory: bytes
    live: bytes
    slots: list[tuple[int, int]]
    frames: list[tuple[int, int]]

    def store(self, folder: Path) -> None:
        """Write the image to files."""
        folder.mkdir()
        for name, content in (
            ("layout", self.layout.pack()),
            ("memory", self.memory),
            ("live", self.live),
        ):
            (folder / name).write_bytes(content)
        (folder / "places").write_text(json.dumps((self.slots, self.frames)))

    @classmethod
    def load(cls, folder: Path) -> "StagedImage":
        """Read the files of `store`."""
        layout, memory, live = (
            (folder / name).read_bytes() for name in ("layout", "memory", "live")
        )
        return cls(
            Layout.unpack(layout), memory, live, *json.loads((folder / "places").read_text())
        )


def make(folder: Path, seed: int) -> Ground:
    """Have real ranks write all checkpoints and images.

    Raises:
        Failed: a rank failed.
    """
    ground = Ground(folder, seed)
    ranks = []
    for world_size in WORLDS:
        for other in (False, True):
            base = ground.base(world_size, other=other)
            base.mkdir(parents=True)
            ranks += run_ranks(world_size, write_base, base, seed + other)
    for rank in ranks:
        rank.answer()
    return ground


def run_ranks(
    world_size: int, work: Callable[..., Any], folder: Path, *arguments: Any
) -> list[Fork]:
    """Start `work(rank, world_size, folder, *arguments)` on ranks that meet before."""
    meeting = folder.with_suffix(".meeting")
    return [
        Fork(_meet, rank, world_size, meeting, work, folder, *arguments)
        for rank in range(world_size)
    ]


def _meet(
    rank: int, world_size: int, meeting: Path, work: Callable[..., Any], *arguments: Any
) -> Any:
    if world_size > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size
        )
    answer = work(rank, world_size, *arguments)
    if world_size > 1:
        dist.destroy_process_group()
    return answer


def write_base(rank: int, world_size: int, folder: Path, seed: int) -> None:
    """Write one rank's part of a base."""
    with Checkpointer(folder, keep=None) as ckpt:
        ckpt._engine._shape.shard_bytes = SHARD_BYTES  # no option of the user's
        for step in STEPS:
            state = on_ranks(state_of(seed, step), world_size)
            path = ckpt.save(step, state, per_rank=per_rank_of(seed, step, rank)).result()
    if rank == 0:
        assert path is not None, "every step is due"
        note_verified(path, by="the benchmark", now_s=1.0)
    stage(seed, rank, world_size).store(folder.with_suffix(f".staged-{rank}"))


def stage(seed: int, rank: int, world_size: int) -> StagedImage:
    """Return the image of step NEXT as the engine stages it. Collective."""
    state = on_ranks(state_of(seed, NEXT), world_size)
    contents = collect(rank, state, per_rank_of(seed, NEXT, rank))
    plan = make_plan(Ranks(), contents, shard_bytes=SHARD_BYTES)
    memory = memoryview(bytearray(-(-plan.image.size_bytes // 4096) * 4096))
    plan.image.write_frames(memory)
    live = sources(plan, contents.leaves(plan.structure), ChangeTracker(contents.tensors, {}))
    copy_into(plan, memory, plan.image.views(torch.frombuffer(memory, dtype=torch.uint8)), live)
    slots, frames = list[tuple[int, int]](), list[tuple[int, int]]()
    for blob, source in zip(plan.image.blobs, live, strict=True):
        if isinstance(source, bytes):
            slots.append((blob.offset, len(source)))
        else:
            end = blob.data_offset + blob.data_bytes
            frames += [
                (blob.offset, blob.data_offset - blob.offset),
                (end, blob.offset + blob.length - end),
            ]
    return StagedImage(plan.layout, bytes(memory), live_digests(plan, live), slots, frames)
