"""Show that a tensor that changes while it is copied never reaches a checkpoint unnoticed."""

import threading

import pytest
import torch
from overlapping_saves import overlapping, restored, steps_in
from waiting import ENDS_S, contents, until

from holdfast.checkpoint import Checkpointer
from holdfast.checkpoint.save import plan_cache
from holdfast.core.errors import SaveFailed


@pytest.fixture
def room_for_one(monkeypatch):
    """Only one of two tensors of 10,000 elements fits into the call's budget.

    So no tensor is copied in the call before a tensor was found to change.
    """
    monkeypatch.setattr(plan_cache, "BUDGET_BYTES", 60_000)


def seeing(size):
    """Return a model whose forward pass counts in a buffer of `size` elements."""
    model = torch.nn.Linear(200, 200)
    model.register_buffer("seen", torch.zeros(size))

    def see(module, _inputs):
        module.seen.add_(1)

    model.register_forward_pre_hook(see)
    return model


UNSEEN = {
    "data": lambda tensor: tensor.data.fill_(7),
    "numpy": lambda tensor: tensor.numpy().fill(7),
}


def test_a_tensor_that_changed_while_it_was_copied_fails_the_save_by_name_and_is_copied_early_from_then_on(
    tmp_path, held, room_for_one
):
    state = {"weights": torch.zeros(10_000), "average": torch.zeros(10_000)}
    ckpt = overlapping(tmp_path, on_failure="warn")
    ckpt.save(1, state).result(ENDS_S)
    for step in (2, 3):
        held.clear()
        state["weights"].fill_(step)
        state["average"].fill_(step)
        handle = ckpt.save(step, state)
        state["average"].add_(100)
        held.set()
        if step == 2:
            with pytest.raises(
                SaveFailed, match=r"Step 2 was not saved: 'average' changed while it was copied"
            ) as told:
                handle.result(ENDS_S)
            assert "'weights'" not in str(told.value)
            assert steps_in(tmp_path) == [1]
    handle.result(ENDS_S)
    found = restored(tmp_path, {"weights": torch.zeros(10_000), "average": torch.zeros(10_000)})
    assert found["average"].eq(3).all()
    assert found["weights"].eq(3).all()


def test_a_tensor_that_changed_is_saved_again_at_the_next_step(tmp_path, held, room_for_one):
    state = {"weights": torch.zeros(10_000), "average": torch.zeros(10_000)}
    with overlapping(tmp_path, every=10) as ckpt:
        ckpt.save(10, state).result(ENDS_S)
        held.clear()
        handle = ckpt.save(20, state)
        state["average"].add_(1)
        held.set()
        until(handle.done)
        held.clear()
        handle = ckpt.save(21, state)
        state["average"].add_(1)
        held.set()
        assert handle.result(ENDS_S) == tmp_path / "step-0000000021"
    assert restored(tmp_path, {"average": torch.zeros(10_000)})["average"].eq(1).all()


@pytest.mark.parametrize("attest", [True, False])
@pytest.mark.parametrize("size", [10_000, 16 << 20], ids=["", "64 MiB"])
def test_a_buffer_that_forward_changes_is_that_of_the_call_whatever_its_size(
    tmp_path, held, size, attest
):
    model = seeing(size)
    with overlapping(tmp_path, attest=attest) as ckpt:
        ckpt.save(1, {"model": model}).result(ENDS_S)
        held.clear()
        handle = ckpt.save(2, {"model": model})
        expected = model.seen[0].item()
        model(torch.ones(200))
        held.set()
        handle.result(ENDS_S)
    fresh = seeing(size)
    restored(tmp_path, {"model": fresh})
    assert fresh.seen.eq(expected).all()


def test_what_forward_has_changed_after_the_first_save_is_copied_in_the_call_of_the_second(
    tmp_path, held
):
    model = seeing(5_000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = Checkpointer(tmp_path, keep=None)
    for step in (1, 2, 3):
        if step > 1:
            held.clear()
        handle = ckpt.save(step, {"model": model})
        model(torch.ones(200)).sum().backward()
        held.set()
        optimizer.step()
        handle.result(ENDS_S)
        (tmp_path / f"step-{step:010d}").rename(tmp_path / f"seen-{step}")
    for step in (1, 2, 3):
        (tmp_path / f"seen-{step}").rename(tmp_path / f"step-{step:010d}")
        fresh = seeing(5_000)
        restored(tmp_path, {"model": fresh})
        assert fresh.seen.eq(step - 1).all()
    assert ckpt._engine._shape._unsteady == {"model.seen"}


def test_a_state_that_is_loaded_after_the_first_save_is_no_buffer(tmp_path):
    """Otherwise each later save would copy the whole state in the call."""
    model = seeing(5_000)
    ckpt = Checkpointer(tmp_path)
    ckpt.save(1, {"model": model})
    model.load_state_dict(seeing(5_000).state_dict())
    ckpt.before_update()
    ckpt.save(2, {"model": model}).result(ENDS_S)
    assert not ckpt._engine._shape._unsteady


def test_what_one_optimizer_has_changed_is_no_buffer_to_the_next_one(tmp_path):
    first, second = torch.nn.Linear(200, 200), torch.nn.Linear(20, 20)
    ckpt = Checkpointer(tmp_path)
    ckpt.save(1, {"first": first, "second": second})
    for model in (second, first):
        model.weight.grad = torch.ones_like(model.weight)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    ckpt.save(2, {"first": first, "second": second}).result(ENDS_S)
    assert not ckpt._engine._shape._unsteady


@pytest.mark.parametrize("how", UNSEEN)
def test_a_change_that_pytorch_does_not_count_is_found_by_the_attestation(
    tmp_path, held, how, room_for_one
):
    state = {"a": torch.zeros(10_000), "b": torch.zeros(10_000)}
    ckpt = overlapping(tmp_path, on_failure="warn")
    ckpt.save(1, state).result(ENDS_S)
    held.clear()
    handle = ckpt.save(2, state)
    UNSEEN[how](state["b"])
    held.set()
    with pytest.raises(
        SaveFailed, match=r"Step 2 was not saved: the staged copy of 'b' differs"
    ) as told:
        handle.result(ENDS_S)
    assert "'a'" not in str(told.value)
    assert [path.name for path in contents(tmp_path)] == ["step-0000000001"]

    # The buffer is known now, and copied in the call.
    held.clear()
    state["b"].fill_(3)
    handle = ckpt.save(3, state)
    UNSEEN[how](state["b"])
    held.set()
    handle.result(ENDS_S)
    assert restored(tmp_path, {"b": torch.zeros(10_000)})["b"].eq(3).all()


@pytest.mark.parametrize("budget_bytes", [0, 1 << 20])
def test_without_attestation_what_no_optimizer_has_is_that_of_the_call(
    tmp_path, held, link, monkeypatch, budget_bytes
):
    """Such values are copied in the call; above the budget, the call returns after the whole copy."""
    monkeypatch.setattr(plan_cache, "BUDGET_BYTES", budget_bytes)
    state = {"b": torch.zeros(10_000)}
    ckpt = overlapping(tmp_path, attest=False)
    ckpt.save(1, state).result(ENDS_S)
    held.clear()
    if not budget_bytes:
        threading.Timer(0.05, held.set).start()
    handle = ckpt.save(2, state)
    assert held.is_set() == (not budget_bytes)
    state["b"].numpy().fill(7)
    held.set()
    handle.result(ENDS_S)
    assert restored(tmp_path, {"b": torch.ones(10_000)})["b"].eq(0).all()
    until(lambda: len(link.of("checkpoint")) == 2)
    assert [event["attested"] for event in link.of("checkpoint")] == [False, False]


def test_without_attestation_a_parameter_that_changes_unseen_is_in_the_checkpoint_as_it_was_copied(
    tmp_path, held
):
    weight = torch.nn.Parameter(torch.zeros(10_000))
    optimizer = torch.optim.SGD([weight])
    ckpt = overlapping(tmp_path, attest=False)
    ckpt.save(1, {"weight": weight, "optimizer": optimizer}).result(ENDS_S)
    held.clear()
    handle = ckpt.save(2, {"weight": weight, "optimizer": optimizer})
    weight.data.fill_(7)
    held.set()
    handle.result(ENDS_S)
    assert restored(tmp_path, {"weight": torch.zeros(10_000)})["weight"].eq(7).all()
