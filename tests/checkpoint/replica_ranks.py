"""Run one rank: `replica_ranks.py FOLDER RANK WORLD_SIZE SCENARIO…`. Exit with 0 if all is well.

The ranks train a model with DDP and unsynchronized batch norm, so that buffers, averages and
metrics differ by rank.
"""

import copy
import logging
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from waiting import until

from holdfast.checkpoint import Checkpointer
from holdfast.checkpoint.format.dcp_metadata import read_dcp_metadata
from holdfast.core.errors import SaveFailed
from holdfast.core.link import Unsupervised, set_job_link


class Training:
    """A model that trains on each rank's own data, and an average of its parameters and buffers."""

    def __init__(self, rank):
        torch.manual_seed(0)
        self.rank = rank
        self.model = nn.Sequential(
            nn.Linear(8, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Linear(16, 16),
            nn.BatchNorm1d(16),
            nn.Linear(16, 4),
        )
        self.ddp = nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.ema = copy.deepcopy(self.model)
        self.loss = 0.0

    def run(self, first, last):
        for step in range(first, last):
            generator = torch.Generator().manual_seed(1000 * step + self.rank)
            loss = self.ddp(torch.randn(8, 8, generator=generator)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.loss = loss.item()
            with torch.no_grad():
                for mine, now in zip(
                    self.ema.state_dict().values(), self.model.state_dict().values(), strict=True
                ):
                    mine.copy_(mine * 0.9 + now * 0.1)
        return self

    @property
    def state(self):
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "ema": self.ema,
            "metrics": {"loss": self.loss},
        }

    def copy(self):
        """Return a copy of the state that torch.save would write."""
        parts = (
            self.model.state_dict(),
            self.optimizer.state_dict(),
            self.ema.state_dict(),
            self.loss,
        )
        return copy.deepcopy(parts)


def same(left, right):
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def writers(path):
    """Return for each flat name the ranks that have written it."""
    found = {}
    for index, place in read_dcp_metadata(path).storage_data.items():
        found.setdefault(index.fqn, set()).add(int(place.relative_path.split("_")[2]))
    return found


def saved_and_resumed(folder, rank, **options):
    """Save, restore into a fresh training and go on with both; return the writers of the entries."""
    training = Training(rank).run(1, 4)
    with Checkpointer(folder, **options) as ckpt:
        path = ckpt.save(3, training.state).result()
    mine = [None] * dist.get_world_size()
    dist.all_gather_object(mine, training.copy())
    assert not same(mine[0], mine[1]), "the ranks differ"
    fresh = Training(rank)
    state = fresh.state
    with Checkpointer(folder, **options) as ckpt:
        assert ckpt.restore(state) == 3
    fresh.loss = state["metrics"]["loss"]
    assert same(fresh.copy(), mine[0]), "what is restored is what rank 0 had"
    # DDP copies the buffers of rank 0 at each forward.
    training.run(4, 6)
    fresh.run(4, 6)
    assert same(fresh.model.state_dict(), training.model.state_dict())
    return writers(path)


def what_differs_comes_from_rank_0(folder, rank, world_size):
    for attest in (True, False):
        found = saved_and_resumed(folder / str(attest), rank, attest=attest)
        owned = {name for name in found if name.startswith("optimizer.state")} | {
            f"model.{name}" for name, _ in Training(rank).model.named_parameters()
        }
        assert set().union(*(found[name] for name in owned)) == set(range(world_size)), (
            "they are spread"
        )
        others = {
            name: ranks
            for name, ranks in found.items()
            if name not in owned and ".rank-" not in name
        }
        assert len(others) > 20
        assert all(ranks == {0} for ranks in others.values()), others


def rank_0_writes_all(folder, rank, world_size):
    found = saved_and_resumed(folder, rank, replicas="rank0")
    assert all(ranks == {0} for name, ranks in found.items() if ".rank-" not in name)


def the_lowest_rank_that_has_it_writes_it(folder, rank, world_size):
    """Each rank but the first has another part of the state, as in a pipeline."""
    state = (
        {"own": {"bias": torch.full((2,), float(rank)), "count": rank}} if rank else {"first": 1}
    )
    with Checkpointer(folder) as ckpt:
        path = ckpt.save(1, state).result()
    assert {
        name: ranks for name, ranks in writers(path).items() if not name.startswith("holdfast")
    } == {
        "own.bias": {1},
        "own.count": {1},
        "first": {0},
    }
    state = {"own": {"bias": torch.zeros(2), "count": 0}}
    with Checkpointer(folder, read_only=True) as ckpt:
        ckpt.restore(state)
    assert state["own"]["bias"].tolist() == [1, 1]
    assert state["own"]["count"] == 1


class Heard(logging.Handler, Unsupervised):
    """Record log messages and events to the supervisor."""

    def __init__(self):
        super().__init__()
        self.warnings, self.events = [], []

    def emit(self, *told):
        if len(told) == 2:
            self.events += [told[1]] if told[0] == "replicas_differ" else []
        elif "differs by rank" in told[0].getMessage():
            self.warnings.append(told[0].getMessage())


def what_differs_is_named_once(folder, rank, world_size):
    heard = Heard()
    logging.getLogger("holdfast").addHandler(heard)
    set_job_link(heard)
    late = torch.zeros(3)
    state = {
        "own": rank,
        "deep": [{"rate": 0.1 * rank}],
        "same": torch.full((4,), float("nan")),
        "words": {"a", "b", "c", "d", "e"},
        "late": late,
    }
    with Checkpointer(folder) as ckpt:
        for step in range(1, 22):
            if step == 12:
                late += rank
            ckpt.save(step, state).result()
    logging.getLogger("holdfast").removeHandler(heard)
    set_job_link(Unsupervised())
    if rank:
        assert (heard.warnings, heard.events) == ([], [])
        return
    first, second = heard.warnings  # of saves 1, 11 and 21
    assert "step 1 holds" in first
    assert "'deep.0.rate' (rank 1), 'own' (rank 1). Put" in first
    assert "per_rank" in first
    assert "step 21 holds" in second
    assert "'deep.0.rate' (rank 1), 'late' (rank 1), 'own' (rank 1). Put" in second
    assert [event["count"] for event in heard.events] == [2, 3]
    assert [list(each) for each in heard.events[0]["entries"]] == [
        ["deep.0.rate", "rank 1"],
        ["own", "rank 1"],
    ]


def what_differs_is_refused(folder, rank, world_size):
    with Checkpointer(folder, replicas="check", on_failure="warn") as ckpt:
        for step in (1, 2):
            try:
                ckpt.save(step, {"same": torch.ones(3), "own": rank}).result()
            except SaveFailed as error:
                message = str(error)
            else:
                raise AssertionError("it is saved")
            assert (
                f"Step {step} was not saved: the state differs by rank: 'own' (rank 1)" in message
            )
            assert "per_rank" in message
            assert "storage" not in message
        assert not list(folder.glob("step-*"))
        path = ckpt.save(3, {"same": torch.ones(3), "own": 1}, per_rank={"own": rank}).result()
    assert sorted(
        each.name for each in path.parent.glob("*step*") if not each.name.endswith(".failed")
    ) == [path.name]
    assert not [*path.glob("*rank-*"), *path.glob(".*.tmp")]


def a_refusal_is_raised(folder, rank, world_size):
    """This also holds by default, since no later save can succeed."""
    with Checkpointer(folder, replicas="check") as ckpt:
        refused = ckpt.save(1, {"own": rank})
        until(refused.done)
        with pytest.raises(SaveFailed, match="the state differs by rank"):
            ckpt.save(2, {"own": rank})
        assert ckpt.save(3, {"own": 1}).result() is not None


SCENARIOS = {
    each.__name__: each
    for each in (
        what_differs_comes_from_rank_0,
        rank_0_writes_all,
        the_lowest_rank_that_has_it_writes_it,
        what_differs_is_named_once,
        what_differs_is_refused,
        a_refusal_is_raised,
    )
}


def main(folder, rank, world_size, *names):
    torch.set_num_threads(1)
    logging.basicConfig(format="%(name)s %(levelname)s %(message)s", stream=sys.stdout)
    timeout = timedelta(seconds=600)
    init_method = f"file://{folder}/store-{world_size}-{names[0]}"
    dist.init_process_group(
        "gloo", init_method=init_method, rank=rank, world_size=world_size, timeout=timeout
    )
    for name in names:
        SCENARIOS[name](Path(folder) / name, rank, world_size)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
