"""Test that a Checkpointer does not keep its process group alive."""

from started_ranks import run_program

SCRIPT = """
import gc, weakref
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
world = dist.group.WORLD
import holdfast
with holdfast.Checkpointer({folder!r}) as ckpt:
    assert dist.group.WORLD is world, "the group is in its place again"
    ckpt.save(1, {{"a": 1}})
alive = weakref.ref(world)
del world
dist.destroy_process_group()
gc.collect()
print("kept alive by", [type(one).__name__ for one in gc.get_referrers(alive())] if alive() else None)
"""


def test_the_group_ends_when_it_is_destroyed(tmp_path):
    script = SCRIPT.format(folder=str(tmp_path / "checkpoints"))
    done = run_program(script)
    assert (done.returncode, done.stdout) == (0, "kept alive by None\n"), done.stderr
