"""Run one rank of a test: `rank_script.py FOLDER RANK WORLD_SIZE`. Exit with 0 if all is well.

Each scenario has a folder of its own in FOLDER. All scenarios run in one process, so that torch is
imported once. The ranks meet through a file in FOLDER, so that no port is needed.
"""

import json
import logging
import random
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checkpoint_training import Training, assert_same
from waiting import until

from holdfast.checkpoint import Checkpointer, scan
from holdfast.checkpoint.distributed import collectives
from holdfast.checkpoint.restore import open as opening
from holdfast.checkpoint.restore import select as restore
from holdfast.checkpoint.save import results as outcomes
from holdfast.core.errors import BadUse, CheckpointError, SaveFailed, StateMismatch


def draws():
    return random.random(), float(np.random.rand()), torch.rand(2).tolist()


def expect(kind, text, work):
    with pytest.raises(kind) as raised:
        work()
    assert text in str(raised.value)


def round_trip(folder, rank, world_size):
    """Write equal values once; return values and generators that differ by rank to their rank."""
    training = Training().run(2)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(100 + rank)
    state = {**training.objects, "note": "the same"}
    path = (
        Checkpointer(folder)
        .save(2, state, per_rank={"position": 1000 + rank, "t": torch.tensor(rank)})
        .result()
    )
    expected = draws()

    fresh = Training(seed=5)
    mine = {"position": 0, "t": torch.tensor(-1)}
    assert Checkpointer(folder).restore({**fresh.objects, "note": ""}, per_rank=mine) == 2
    assert draws() == expected
    assert (mine["position"], mine["t"].item()) == (1000 + rank, rank)
    for name, value in training.objects.items():
        assert_same(fresh.objects[name].state_dict(), value.state_dict(), name)
    manifest = json.loads((path / "holdfast.json").read_text())
    assert manifest["world_size"] == world_size
    theirs = Checkpointer(folder).per_rank_states(2)
    assert [each["position"] for each in theirs] == [1000 + each for each in range(world_size)]


def fallback(folder, rank, world_size):
    """Each rank reads only its share of the files, and all ranks select the same step."""
    for step in (1, 2):
        Checkpointer(folder).save(step, {"a": step}, per_rank={"r": rank}).result()
    dist.barrier()
    if rank == 0:
        # A file that only one rank will read.
        data = scan(folder)[0].path / "__1_0.distcp"
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 4
        data.write_bytes(content)
    dist.barrier()
    state, mine = {"a": 0}, {"r": -1}
    assert Checkpointer(folder).restore(state, per_rank=mine) == 1
    assert (state, mine) == ({"a": 1}, {"r": rank})


def errors_are_shared(folder, rank, world_size):
    """An error on one rank ends the call on all ranks, with one message, and without a change."""
    ckpt = Checkpointer(folder)
    expect(BadUse, "'bad'", lambda: ckpt.save(1, {"ok": 1} if rank == 0 else {"bad": object()}))
    expect(
        BadUse,
        "Ranks make different calls: rank 0 calls save at step 1 and rank 1 calls save at step 2",
        lambda: ckpt.save(1 + rank, {"ok": 1}),
    )
    assert list(Path(folder).glob("*step*")) == []
    ckpt.save(1, {"t": torch.ones(2)}).result()
    target = torch.zeros(2 + rank)
    expect(StateMismatch, "'t' is float32[3]", lambda: ckpt.restore({"t": target}))
    assert target.eq(0).all()

    def fails_on_rank_1():
        if rank == 1:  # its writing process fails
            resource.prlimit(ckpt._engine._writer.pid, resource.RLIMIT_FSIZE, (100, 100))
        ckpt.save(2, {"t": torch.ones(2)}).result()

    expect(SaveFailed, "File too large", fails_on_rank_1)
    dist.barrier()
    assert [info.step for info in scan(folder)] == [1]
    assert [path.suffix for path in Path(folder).glob(".step*")] == [".failed"]
    assert ckpt.restore({"t": torch.zeros(2)}) == 1


def different_parts(folder, rank, world_size):
    """Ranks may hold different parts of a state (pipeline parallelism), and shards of a tensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    full = torch.arange(12.0).view(6, 2)
    sharded = distribute_tensor(full, mesh, [Shard(0)])
    part = {"layers": {rank: torch.full((2,), float(rank))}, "sharded": sharded}
    Checkpointer(folder).save(1, part).result()
    target = {
        "layers": {rank: torch.zeros(2)},
        "sharded": distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0)]),
    }
    Checkpointer(folder).restore(target)
    assert torch.equal(target["sharded"].full_tensor(), full)
    assert {key: value.tolist() for key, value in target["layers"].items()} == {
        0: [0, 0],
        1: [1, 1],
    }


def what_one_rank_does_at_length_is_waited_for(folder, rank, world_size):
    """The work may last longer than a collective's limit, for example a fetch from storage."""
    collectives._LOOK_EVERY_S = 0.1
    ranks, ended = collectives.Ranks(), []
    gather = ranks._gather

    def counted(own):
        gathered = gather(own)
        ended.append(1)
        return gathered

    ranks._gather = counted

    def work():
        """Outlast three collectives: none of them may last as long as the work."""
        before = len(ended)
        until(lambda: len(ended) >= before + 3)
        return rank

    assert ranks.first_at_length(work) == 0
    assert ranks.together_at_length(work if rank else lambda: rank) == list(range(world_size))

    def fail():
        raise CheckpointError("no room")

    expect(CheckpointError, "no room", lambda: ranks.first_at_length(fail))


def writing_may_take_longer_than_waiting(folder, rank, world_size):
    """`timeout_s` limits a standstill, not the time of writing."""
    state = {f"{rank}-{number}": torch.ones(1 << 18) for number in range(24)}
    with Checkpointer(folder, timeout_s=5, max_write_mib_s=4) as ckpt:
        ckpt._engine._shape.shard_bytes = 1 << 20  # a file each 0.25 s, the last after 5.75 s
        began_s = time.monotonic()
        ckpt.save(1, state).result()
        assert time.monotonic() - began_s > 5
    assert [info.state for info in scan(folder)] == ["written"]


def a_failure_that_only_warns_ends_no_rank(folder, rank, world_size):
    """The error may be of any class."""
    with Checkpointer(folder, on_failure="warn") as ckpt:

        def state():
            if rank == 1:
                raise RuntimeError("a kernel failed")
            return {"t": torch.ones(2)}

        expect(SaveFailed, "a kernel failed", ckpt.save(1, state).result)
        ckpt.save(2, {"t": torch.ones(2)}).result()
    assert [info.step for info in scan(folder)] == [2]


def one_rank_tells_of_a_save(folder, rank, world_size):
    """The other ranks also do not read the manifest."""
    told, before = [], outcomes.saved_event
    outcomes.saved_event = lambda saved, **options: (
        told.append(saved.step) or before(saved, **options)
    )
    try:
        with Checkpointer(folder) as ckpt:
            ckpt.save(1, {"t": torch.ones(2)}).result()
    finally:
        outcomes.saved_event = before
    assert told == ([1] if rank == 0 else [])


def ranks_open_the_same_save(folder, rank, world_size):
    """A step that is saved again during opening is opened again, and skipped after too many tries."""
    for step in (1, 2):
        Checkpointer(folder).save(step, {"a": step}).result()
    for times, taken in ((1, 2), (100, 1)):
        read, left = restore.read_manifest, iter(range(times))

        def another(path, *, step, read=read, left=left):
            found = read(path, step=step)
            is_other = rank == 1 and step == 2 and next(left, None) is not None
            return replace(found, created_at_s=0.0) if is_other else found

        opening.read_manifest = restore.read_manifest = another
        try:
            state = {"a": 0}
            assert Checkpointer(folder).restore(state) == state["a"] == taken
        finally:
            opening.read_manifest = restore.read_manifest = read
        dist.barrier()


def what_fails_on_one_rank_in_a_restore_fails_on_all(folder, rank, world_size):
    class Part:
        def state_dict(self):
            return {"t": torch.ones(2)}

        def load_state_dict(self, _):
            if rank == 1:
                raise RuntimeError("of another kind")

    Checkpointer(folder).save(1, {"part": Part()}).result()
    expect(StateMismatch, "of another kind", lambda: Checkpointer(folder).restore({"part": Part()}))

    def refuse(*_):
        raise OSError("too many open files")

    before = restore.PreviousRanks
    restore.PreviousRanks = refuse if rank == 1 else before
    try:
        expect(
            OSError,
            "too many open files",
            lambda: Checkpointer(folder).restore({"t": torch.ones(2)}),
        )
    finally:
        restore.PreviousRanks = before


def main(folder, rank, world_size):
    torch.set_num_threads(1)
    logging.getLogger("holdfast").setLevel(logging.ERROR)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    for scenario in (
        round_trip,
        fallback,
        errors_are_shared,
        different_parts,
        what_one_rank_does_at_length_is_waited_for,
        writing_may_take_longer_than_waiting,
        a_failure_that_only_warns_ends_no_rank,
        ranks_open_the_same_save,
        one_rank_tells_of_a_save,
        what_fails_on_one_rank_in_a_restore_fails_on_all,
    ):
        scenario(f"{folder}/{scenario.__name__}", rank, world_size)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
