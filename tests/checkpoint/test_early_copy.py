"""Test that values which forward writes to are saved as they were at the call of `save`."""

import copy
import threading

import pytest
import torch
from checkpoint_training import assert_same
from torch import nn
from waiting import ENDS_S

from holdfast.checkpoint import Checkpointer
from holdfast.checkpoint.save import staging_thread
from holdfast.checkpoint.snapshot.early_copy import SMALL_BYTES, Changes, changes_of, choose_early
from holdfast.checkpoint.snapshot.ownership import OptimizerTensors
from holdfast.checkpoint.state.capture import collect

MIB = 1 << 20


class Norms(nn.Sequential):
    """As many batch norms as a ResNet-50 has."""

    def __init__(self):
        super().__init__(*(nn.BatchNorm1d(64) for _ in range(53)))


class Queue(nn.Module):
    """Keys of former batches, as in MoCo, which are longer than a chunk of the copy."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("queue", torch.zeros(5 * MIB // 64, 64))
        self.at = 0

    def forward(self, x):
        y = self.linear(x)
        self.queue[self.at : self.at + len(x)] = y.detach()
        self.queue[-1].add_(1)
        self.at += len(x)
        return y


class Experts(nn.Module):
    """A balanced router as in DeepSeek-V3: forward writes to two buffers and a tensor."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(64, 8192)
        self.register_buffer("expert_bias", torch.zeros(8192))
        self.register_buffer("tokens_per_expert", torch.zeros(8192))
        self.mean = nn.Parameter(torch.zeros(8192), requires_grad=False)

    def forward(self, x):
        scores = self.gate(x)
        self.tokens_per_expert.add_(scores.detach().gt(0).sum(0))
        self.expert_bias.numpy()[:] += 1  # PyTorch does not count this write
        self.mean.data.mul_(0.9).add_(scores.detach().mean(0))
        return scores


class Scaled(nn.Module):
    """Scales of fp8 in a module's extra state, as Transformer Engine keeps them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.amax_history = torch.zeros(1024, 64)

    def forward(self, x):
        self.amax_history.numpy()[:] += 1
        return self.linear(x)

    def get_extra_state(self):
        return {"amax_history": self.amax_history}

    def set_extra_state(self, state):
        self.amax_history.copy_(state["amax_history"])


@pytest.mark.parametrize("attest", [True, False])
@pytest.mark.parametrize("make", [Norms, Queue, Experts, Scaled])
def test_each_checkpoint_is_the_state_of_its_call_whatever_forward_writes_to(
    tmp_path, monkeypatch, make, attest
):
    forward_ended, copy_into = threading.Event(), staging_thread.copy_into

    def later(*arguments, **named):
        assert forward_ended.wait(ENDS_S)
        copy_into(*arguments, **named)

    monkeypatch.setattr(staging_thread, "copy_into", later)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    expected, handles = {}, []
    with Checkpointer(tmp_path, keep=None, attest=attest) as ckpt:
        for step in range(1, 4):
            if step > 2:  # the first save plans; at the second, no optimizer step has waited yet
                forward_ended.clear()
            else:
                forward_ended.set()
            expected[step] = copy.deepcopy(model.state_dict())
            handles.append(ckpt.save(step, {"model": model, "optimizer": optimizer}))
            model(torch.randn(8, 64)).square().mean().backward()
            forward_ended.set()
            optimizer.step()
    assert all(handle.result() for handle in handles)
    for step in range(3, 0, -1):
        fresh = make()
        assert Checkpointer(tmp_path).restore({"model": fresh}) == step
        assert_same(fresh.state_dict(), expected[step], str(step))
        (tmp_path / f"step-{step:010d}").rename(tmp_path / f"seen-{step}")


@pytest.fixture
def optimizers():
    seen = OptimizerTensors()
    yield seen
    seen.close()


def test_what_may_write_to_a_tensor_is_seen_by_its_memory(optimizers):
    model, frozen = nn.BatchNorm1d(4), nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    state = {
        "model": model,
        "again": model.state_dict(),
        "frozen": frozen,
        "optimizer": optimizer,
        "average": {"weight": torch.zeros(4)},
        "learnt": torch.zeros(4),
    }
    contents = collect(0, state, {"mine": torch.zeros(4)})
    changes = dict(
        zip(
            map(id, contents.tensors),
            changes_of(contents, optimizers, {"learnt", "gone"}),
            strict=True,
        )
    )
    found = {
        name: changes[id(leaf)]
        for name, leaf in contents.leaves(None).items()
        if id(leaf) in changes
    }
    by_kind = {kind: {name for name, each in found.items() if each is kind} for kind in Changes}
    buffers = {
        f"{entry}.{name}" for entry in ("model", "again") for name, _ in model.named_buffers()
    }
    assert by_kind[Changes.FORWARD] == buffers | {"learnt"}
    assert by_kind[Changes.UNKNOWN] == {"average.weight", "holdfast.rank-0.user.mine"}
    assert by_kind[Changes.LOOSE] == {"frozen.weight", "frozen.bias"}
    owned = {f"{entry}.{name}" for entry in ("model", "again") for name in ("weight", "bias")}
    assert by_kind[Changes.NOTHING] >= owned | {
        "optimizer.state.0.exp_avg",
        "optimizer.state.1.step",
    }


def large(count):
    """Return a tensor of `count` times one byte more than the largest small tensor."""
    return torch.zeros(count * (SMALL_BYTES + 1), dtype=torch.uint8)


EACH = SMALL_BYTES + 1


@pytest.mark.parametrize(
    ("budget", "attest", "expected"),
    [
        (3, True, ([1, 2, 3], False)),
        (3, False, ([1, 2, 3], False)),
        (2, True, ([1, 2], False)),
        (2, False, ([1, 2], False)),
        (1, True, ([1], False)),
        (1, False, ([], True)),
        (0, True, ([], True)),
    ],
)
def test_what_must_be_copied_comes_first_and_above_the_budget_the_call_waits(
    budget, attest, expected
):
    tensors = [large(1) for _ in range(4)]
    changes = [Changes.NOTHING, Changes.FORWARD, Changes.UNKNOWN, Changes.LOOSE]
    assert choose_early(tensors, changes, attest=attest, budget_bytes=budget * EACH) == expected


def test_on_gpus_that_take_snapshots_only_what_must_be_is_copied_in_the_call_unless_it_is_packed():
    tensors = [large(1) for _ in range(5)]
    changes = [Changes.FORWARD, Changes.FORWARD, Changes.UNKNOWN, Changes.LOOSE, Changes.NOTHING]
    on = {"but_on": [tensors[0].device], "packed": {1}, "budget_bytes": MIB}
    assert choose_early(tensors, changes, attest=True, **on) == ([0], False)
    assert choose_early(tensors, changes, attest=False, **on) == ([0, 2], False)


def test_an_optimizer_that_steps_later_is_found_and_its_parameters_are_not_copied_in_the_call(
    tmp_path,
):
    weight = nn.Parameter(torch.zeros(10_000))
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"weights": {"w": weight}}).result()
        early = ckpt._engine._shape._early
        assert early == ([0], False)
        weight.grad = torch.ones_like(weight)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        optimizer.step()
        ckpt.save(2, {"weights": {"w": weight}}).result()
        assert ckpt._engine._shape._early == ([], False)


def test_without_attestation_a_state_of_another_shape_is_planned_for_in_the_call(
    tmp_path, monkeypatch
):
    """The tensors to copy are known only by their place in the state."""
    tensors = {"a": torch.zeros(10_000), "b": torch.zeros(10_000)}
    with Checkpointer(tmp_path, attest=False) as ckpt:
        ckpt.before_update()
        ckpt.save(1, {"a": tensors["a"]}).result()
        ckpt.save(2, tensors)
        tensors["a"].numpy().fill(7)
        tensors["b"].numpy().fill(7)
    found = {"a": torch.ones(10_000), "b": torch.ones(10_000)}
    Checkpointer(tmp_path).restore(found)
    assert_same(found, {"a": torch.zeros(10_000), "b": torch.zeros(10_000)})
