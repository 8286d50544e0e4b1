"""Real runs that record a profile: phases of all ranks, and a sampler that is killed."""

import asyncio
import signal
import sys

import pytest

from holdfast.core.paths import RunPaths
from holdfast.profile import Recording
from holdfast.recover.launching import launch
from holdfast.recover.spec import RunSpec

TRAIN = """
import sys, time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
import holdfast

dist.init_process_group("gloo")
run = holdfast.attach()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batches = DataLoader([torch.ones(64)] * 4_000_000, batch_size=4)
with holdfast.Checkpointer(sys.argv[1], every=10) as ckpt:
    for step, batch in enumerate(batches, 1):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with run.section("evaluate"):
            time.sleep(0.01)
        run.step(step)
        ckpt.save(step, {"model": model})
dist.destroy_process_group()
"""


def recording(place):
    folder = place.paths("r").profile
    return Recording.read(folder) if any(folder.glob("samples-*")) else Recording()


def sampled(place):
    """The values recorded of the ranks' memory, and the samplers that recorded them."""
    return sum(len(one.values) for one in recording(place).of("process_memory"))


def sampler(place):
    processes = place.processes()
    found = [one for one in processes if "holdfast.profile.sampler" in place.command(one)]
    return found[0] if len(found) == 1 else None


def test_a_run_is_profiled_and_its_sampler_may_be_killed(place):
    script = place.job(TRAIN)
    checkpoints = str(place.folder / "checkpoints")
    job = place.ranks(2, script, checkpoints)
    with place.start("run", "--name", "r", "--", *job) as process:
        place.wait_for_step("r", 20)
        place.wait_until(lambda: sampled(place) >= 2)
        first = sampler(place)

        first.send_signal(signal.SIGKILL)

        place.wait_until(lambda: sampler(place) not in (None, first))
        before = sampled(place)
        place.wait_until(lambda: sampled(place) > before)
        captures = place.json("profile", "--attach", "r", "--deep")["captures"]
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=240)
    assert process.returncode == 4, err
    place.wait_until(lambda: not place.processes())

    with place.ledger() as ledger:
        assert len(ledger.attempts("r")) == 1
        assert ledger.incidents("r") == []
    assert {(one["kind"], one["state"]) for one in captures} == {("trace", "done")}
    assert 0 in {one["rank"] for one in captures}
    found = recording(place)
    assert found.ranks == [0, 1]
    assert {one.rank for one in found.of("process_memory")} == {0, 1}
    assert list(found.unavailable) == [found.series[0].node]
    for rank in (0, 1):
        mine = [one for one in found.spans if one.rank == rank]
        assert {one.phase for one in mine} == {
            "data",
            "forward",
            "backward",
            "communication",
            "optimizer",
            "evaluation",
            "checkpoint_stall",
        }
        assert {one.node for one in mine} == {found.series[0].node}
        last = max(one.step or 0 for one in mine)
        of_step = [one.phase for one in mine if one.step == last - 1]
        assert [one for one in of_step if one != "checkpoint_stall"] == [
            "data",
            "forward",
            "backward",
            "communication",
            "optimizer",
            "evaluation",
        ]


@pytest.mark.parametrize("is_profiled", [True, False])
def test_only_ranks_of_a_profiled_run_are_given_a_folder(tmp_path, monkeypatch, is_profiled):
    given = {}

    async def start(_words, variables, _spec, **_):
        given.update(variables)

    monkeypatch.setattr(launch, "_start_guard", start)
    spec = RunSpec(command=(sys.executable, "-c", ""), cwd=str(tmp_path), profile=is_profiled)
    paths = RunPaths(tmp_path, "r")
    where = {"address": "127.0.0.1:1", "token": "t", "lock_fd": 0, "environment": {}}
    asyncio.run(launch.launch(spec, paths, 1, **where, echo=False, place=launch.Place()))

    assert given["HOLDFAST_PROFILE"] == (str(paths.profile) if is_profiled else "")
