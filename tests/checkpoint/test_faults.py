"""Test one of each fault that only `benchmarks/checkpoint_faults.py` injects, by the thousand."""

import json
import mmap
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_training import assert_same
from images import order_of

from holdfast.checkpoint import Checkpointer, scan
from holdfast.checkpoint.distributed.collectives import Ranks
from holdfast.checkpoint.format.checksums import BLOCK_BYTES, SIDECAR_SUFFIX
from holdfast.checkpoint.format.paths import step_path
from holdfast.checkpoint.snapshot.copy import ChangeTracker, copy_into, live_digests, sources
from holdfast.checkpoint.snapshot.plan import make_plan
from holdfast.checkpoint.state.capture import collect
from holdfast.checkpoint.writer.persist import NotAttested, RankWrite, persist
from holdfast.core.rate_limit import RateLimit

COUNT = 50_000
SHARD_BYTES = 4 * COUNT


def state_of(step, run=0):
    """Return tensors of one shape, so that a tensor's file could be mistaken for another's."""
    generator = torch.Generator().manual_seed(100 * run + step)
    return {
        **{name: torch.rand(COUNT, generator=generator) for name in "abc"},
        "n": 1000 * run + step,
    }


def save(folder, run=0):
    with Checkpointer(folder, keep=None) as ckpt:
        ckpt._engine._shape.shard_bytes = SHARD_BYTES
        for step in (1, 2):
            ckpt.save(step, state_of(step, run)).result()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a folder with two runs of two steps each, of several files."""
    folder = tmp_path_factory.mktemp("saved")
    for run in (0, 1):
        save(folder / str(run), run)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """Return a copy of the first run."""
    subprocess.run(["cp", "-r", saved / "0", tmp_path / "checkpoints"], check=True)
    return tmp_path / "checkpoints"


def assert_restores(folder, step):
    state = {**{name: torch.zeros(COUNT) for name in "abc"}, "n": -1}
    with Checkpointer(folder) as ckpt:
        assert ckpt.restore(state) == step
    assert_same(state, state_of(step))


def files_of(checkpoint):
    return sorted(checkpoint.glob("*.distcp"))


def with_sidecar(path, is_with):
    return [path, path.with_name(path.name + SIDECAR_SUFFIX)] if is_with else [path]


@pytest.mark.parametrize("sidecars", [False, True])
def test_two_shards_of_a_checkpoint_that_were_swapped(folder, sidecars):
    one, other = files_of(step_path(folder, 2))[:2]
    assert one.stat().st_size == other.stat().st_size
    for left, right in zip(with_sidecar(one, sidecars), with_sidecar(other, sidecars), strict=True):
        aside = left.rename(folder / "aside")
        right.rename(left)
        aside.rename(right)
    assert_restores(folder, 1)


@pytest.mark.parametrize("sidecars", [False, True])
@pytest.mark.parametrize(("run", "step"), [(0, 1), (1, 2)])
def test_a_shard_of_another_step_or_run(folder, saved, run, step, sidecars):
    for mine in with_sidecar(files_of(step_path(folder, 2))[0], sidecars):
        mine.write_bytes((step_path(saved / str(run), step) / mine.name).read_bytes())
    assert_restores(folder, 1)


@pytest.mark.parametrize("unit", [512, 4096, BLOCK_BYTES])
def test_a_write_that_went_to_another_place(folder, unit):
    path = files_of(step_path(folder, 2))[0]
    content = bytearray(path.read_bytes())
    content[2 * unit : 3 * unit] = content[:unit]
    path.write_bytes(content)
    assert_restores(folder, 1)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        Path.mkdir,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to(path),
    ],
    ids=["pipe", "folder", "device", "circle"],
)
def test_something_else_in_the_place_of_a_file(folder, make, name):
    path = step_path(folder, 2) / name
    path.unlink()
    make(path)
    assert_restores(folder, 1)


@pytest.mark.parametrize("where", ["plain value", "head", "tail"])
def test_a_bit_that_flips_beside_the_tensors_of_a_snapshot_fails_the_save(tmp_path, where):
    contents = collect(0, state_of(2), None)
    plan = make_plan(Ranks(), contents, shard_bytes=1 << 30)
    memory = memoryview(mmap.mmap(-1, -(-plan.image.size_bytes // 4096) * 4096))
    plan.image.write_frames(memory)
    live = sources(plan, contents.leaves(plan.structure), ChangeTracker(contents.tensors, {}))
    copy_into(plan, memory, plan.image.views(torch.frombuffer(memory, dtype=torch.uint8)), live)
    digests = live_digests(plan, live)
    blob = next(
        each for each in plan.image.blobs if (each.need.dtype is None) == (where == "plain value")
    )
    at = {
        "plain value": blob.offset + 20,
        "head": blob.offset + 100,
        "tail": blob.offset + blob.length - 30,
    }[where]
    memory[at] ^= 1
    with pytest.raises(NotAttested):
        persist(
            RankWrite(
                order=order_of(tmp_path, 2),
                layout=plan.layout,
                image=memory,
                live=digests,
                await_copy=lambda _count: None,
                wait=lambda: None,
                pace=RateLimit(None),
                progress=lambda _count: None,
            )
        )
    assert not scan(tmp_path)


@pytest.mark.parametrize("how", ["kill", "EIO", "short", "dead"])
def test_a_commit_with_faults_injected_at_its_system_calls(tmp_path, how):
    """ptrace stops the process at each call: the process is killed there, or the call fails."""
    if platform.machine() != "x86_64":
        pytest.skip("processes are stopped at their calls on x86-64 only")
    command = [sys.executable, Path(__file__).with_name("fault_injected_commits.py"), tmp_path, how]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if "PermissionError" in ended.stderr and "ptrace" in ended.stderr:
        pytest.skip("processes cannot be traced here")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    least = 3 if how == "short" else 30
    assert found["injected"] >= least, found
    assert found[{"short": "saved", "kill": "taken_up"}.get(how, "failed")] >= least // 3, found
