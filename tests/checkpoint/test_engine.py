"""Test saves beside a training: restore returns the state of the call, or the save has failed."""

import contextlib
import copy
import logging
import os
import signal
import sys
import threading
import time
import weakref
from concurrent.futures import Future

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_training import Training, assert_same
from started_ranks import run_program
from waiting import ENDS_S, contents, open_descriptors, until

from holdfast.checkpoint import Checkpointer, scan, verify
from holdfast.checkpoint.ipc.shared_buffer import ArenaError, State
from holdfast.checkpoint.save import plan_cache, staging_thread
from holdfast.checkpoint.save.handle import SaveHandle
from holdfast.checkpoint.save.results import Outcomes, SaveReport
from holdfast.checkpoint.schedule.interval import make_interval
from holdfast.checkpoint.snapshot import early_copy
from holdfast.checkpoint.snapshot.buffer_pool import BufferPool
from holdfast.checkpoint.writer.client import Writer, WriteResult
from holdfast.core.errors import BadUse, SaveFailed
from holdfast.testing import FakeClock

MIB = 1 << 20


def restored(folder, state):
    Checkpointer(folder).restore(state)
    return state


def steps_in(folder):
    return [info.step for info in scan(folder)]


@pytest.fixture
def held(monkeypatch):
    """Hold the copying back until `set` is called."""
    gate, copy_into = threading.Event(), staging_thread.copy_into

    def later(*arguments, **named):
        assert gate.wait(ENDS_S)
        copy_into(*arguments, **named)

    gate.set()
    monkeypatch.setattr(staging_thread, "copy_into", later)
    yield gate
    gate.set()


def large(value, mib=33):
    """Return a state of three chunks, so that a rate limit always delays the last chunk."""
    return {"large": torch.full((mib * MIB // 4,), float(value)), "value": value}


def slow(folder, seconds, **options):
    """Return a Checkpointer that takes at least `seconds` for each save of `large`."""
    return Checkpointer(folder, max_write_mib_s=16 / seconds, **options)


def overlapping(folder, **options):
    """Return a Checkpointer that copies beside the training, which has called `before_update`."""
    ckpt = Checkpointer(folder, **options)
    ckpt.before_update()
    return ckpt


class Wide(Training):
    """The same training with a layer whose tensors are copied after the call."""

    def __init__(self, seed=0):
        super().__init__(seed)
        wide = torch.nn.Sequential(
            torch.nn.Linear(6, 1000), torch.nn.BatchNorm1d(1000), torch.nn.Linear(1000, 3)
        )
        self.model = torch.nn.Sequential(wide, torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=50)


def test_every_step_of_a_training_comes_back_as_it_was_when_save_was_called(tmp_path):
    training, expected, handles = Wide(), {}, []
    with Checkpointer(tmp_path, keep=None) as ckpt:
        for step in range(1, 9):
            training.run(1)
            expected[step] = copy.deepcopy(
                {name: each.state_dict() for name, each in training.objects.items()}
            )
            handles.append(ckpt.save(step, training.objects, per_rank={"position": step * 10}))
    assert [handle.result(0) for handle in handles] == [
        tmp_path / f"step-{step:010d}" for step in range(1, 9)
    ]
    for step in range(8, 0, -1):
        fresh, mine = Wide(seed=1).run(1), {"position": 0}
        assert Checkpointer(tmp_path).restore(fresh.objects, per_rank=mine) == step
        for name, state in expected[step].items():
            assert_same(fresh.objects[name].state_dict(), state, f"{step}.{name}")
        assert mine == {"position": step * 10}
        # Stock PyTorch reads the same values.
        theirs = {"model": Wide(seed=2).model.state_dict()}
        with pytest.warns(UserWarning, match=r"torch.distributed is disabled"):
            dcp.load(theirs, checkpoint_id=tmp_path / f"step-{step:010d}")
        assert_same(theirs["model"], expected[step]["model"])
        (tmp_path / f"step-{step:010d}").rename(tmp_path / f"seen-{step}")


def test_the_call_returns_before_the_bytes_are_copied_and_the_optimizer_waits_for_them(
    tmp_path, held
):
    training = Wide().run(1)
    ckpt = overlapping(tmp_path)
    ckpt.save(1, training.objects).result(ENDS_S)
    held.clear()
    expected = copy.deepcopy(training.model.state_dict())
    handle = ckpt.save(2, training.objects)
    assert not handle.done()
    # Forward and backward go on, and change the batch norms' buffers.
    loss = training.model(torch.randn(5, 6)).square().mean()
    training.optimizer.zero_grad()
    loss.backward()
    stepped = threading.Event()

    def step():
        training.optimizer.step()
        stepped.set()

    updating = threading.Thread(target=step)
    updating.start()
    assert not stepped.wait(0.1)
    held.set()
    updating.join(ENDS_S)
    assert stepped.is_set()
    handle.result(ENDS_S)
    fresh = Wide(seed=1)
    restored(tmp_path, {"model": fresh.model})
    assert_same(fresh.model.state_dict(), expected)


def test_whoever_waits_for_a_save_is_not_taken_for_one_that_hangs(
    tmp_path, held, link, monkeypatch
):
    """The optimizer's step waits for the copy, which may wait for earlier saves to slow storage."""
    opened = []

    @contextlib.contextmanager
    def section(name, **_):
        opened.append(name)
        yield
        opened.remove(name)

    monkeypatch.setattr(link, "section", section)
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.zeros(1)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"weight": weight}).result()
        optimizer.step()
        for step, wait in ((2, lambda _: optimizer.step()), (3, lambda saved: saved.result())):
            held.clear()
            saved = ckpt.save(step, {"weight": weight})
            beside = threading.Thread(target=saved.result)  # holds up no step
            beside.start()
            assert opened == []
            watching = threading.Thread(
                target=lambda: (until(lambda: opened == ["save"]), held.set())
            )
            watching.start()
            wait(saved)
            watching.join()
            beside.join()
            assert opened == []


def test_where_no_thread_can_be_started_the_first_save_fails_and_the_next_is_made(
    tmp_path, monkeypatch, caplog
):
    start, refused = threading.Thread.start, []

    def refuse_once(thread):
        if thread.name.startswith("holdfast-stage") and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_once)
    with Checkpointer(tmp_path, on_failure="warn") as ckpt:
        with pytest.raises(SaveFailed, match="Step 1 was not saved: can't start new thread"):
            ckpt.save(1, large(1)).result()
        assert ckpt.save(2, large(2)).result(ENDS_S)
    assert "Step 1 was not saved: can't start new thread" in caplog.text


def test_what_ranks_left_to_tell_of_a_failure_and_cannot_be_removed_is_left(tmp_path):
    (tmp_path / ".step-0000000001.old.failed").mkdir()
    with Checkpointer(tmp_path) as ckpt:
        assert ckpt.save(1, large(1)).result(ENDS_S)


def test_a_save_whose_writing_has_failed_before_its_copy_is_made_ends(tmp_path, held, monkeypatch):
    """The callback of the failure may run at once, in the thread that copies."""

    def fails(self, order, *, arena, **_):
        del order
        self._arenas[arena].move(State.FREE, self._arenas[arena].generation)
        ended = Future()
        ended.set_exception(SaveFailed("There is no room."))
        return ended

    training = Wide()
    ckpt = overlapping(tmp_path, on_failure="warn")
    ckpt.save(1, training.objects).result()
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "save", fails)
        held.clear()
        handle = ckpt.save(2, training.objects)
        held.set()
        with pytest.raises(SaveFailed, match="There is no room"):
            handle.result(ENDS_S)
    ckpt.save(3, training.objects).result(ENDS_S)
    assert steps_in(tmp_path) == [3, 1]


def test_where_no_process_can_be_started_the_other_ranks_hear_of_it(tmp_path, monkeypatch):
    """They would wait for this rank's part until a save's time limit."""
    told = []
    monkeypatch.setattr(
        staging_thread,
        "abandon",
        lambda order, layout, why, **_: told.append((order.step, layout.rank, why)),
    )
    ckpt = Checkpointer(tmp_path, on_failure="raise")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(tmp_path / "gone"))
        with pytest.raises(SaveFailed, match="No such file"):
            ckpt.save(1, {"a": 1})
    ((step, rank, why),) = told
    assert (step, rank) == (1, 0)
    assert why.startswith("the process that writes it cannot be started ([Errno 2] No such file")
    ckpt.save(2, {"a": 2}).result(ENDS_S)
    assert steps_in(tmp_path) == [2]


def test_before_update_is_the_fence_of_a_loop_without_an_optimizer(tmp_path, held):
    state = {"t": torch.zeros(10_000)}
    ckpt = overlapping(tmp_path)
    ckpt.save(1, state).result(ENDS_S)
    held.clear()
    handle = ckpt.save(2, state)
    threading.Timer(0.1, held.set).start()
    ckpt.before_update()
    assert held.is_set()
    state["t"].fill_(1)
    handle.result(ENDS_S)
    assert restored(tmp_path, {"t": torch.ones(10_000)})["t"].eq(0).all()


def test_a_loop_that_never_says_when_it_changes_the_state_waits_for_each_copy_and_is_told_once(
    tmp_path, held, caplog
):
    state, ckpt = {"t": torch.zeros(10_000)}, Checkpointer(tmp_path, keep=None)
    for step in range(1, 5):
        held.clear()
        opening = threading.Timer(0.05, held.set)
        opening.start()
        ckpt.save(step, state)
        assert held.is_set()
        state["t"].fill_(step)
        opening.join()
    ckpt.close()
    assert caplog.text.count("call ckpt.before_update() before the state changes") == 1
    assert steps_in(tmp_path) == [4, 3, 2, 1]
    assert restored(tmp_path, {"t": torch.ones(10_000)})["t"].eq(3).all()


def test_plain_values_are_those_of_the_call(tmp_path, held):
    state = {"losses": [1.0], "nested": {"deep": [{"n": 1}]}, "t": torch.zeros(3)}
    ckpt = overlapping(tmp_path)
    ckpt.save(1, state).result(ENDS_S)
    held.clear()
    handle = ckpt.save(2, state)
    state["losses"].append(2.0)
    state["nested"]["deep"][0]["n"] = 2
    state["nested"]["new"] = 3
    held.set()
    handle.result(ENDS_S)
    target = {"losses": [], "nested": {}, "t": torch.ones(3)}
    assert_same(
        restored(tmp_path, target),
        {"losses": [1.0], "nested": {"deep": [{"n": 1}]}, "t": torch.zeros(3)},
    )


@pytest.fixture
def room_for_one(monkeypatch):
    """Only one of two tensors of 10,000 elements fits into the call's budget.

    So no tensor is copied in the call before a tensor was found to change.
    """
    monkeypatch.setattr(plan_cache, "BUDGET_BYTES", 60_000)


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


def seeing(size):
    """Return a model whose forward pass counts in a buffer of `size` elements."""
    model = torch.nn.Linear(200, 200)
    model.register_buffer("seen", torch.zeros(size))

    def see(module, _inputs):
        module.seen.add_(1)

    model.register_forward_pre_hook(see)
    return model


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


UNSEEN = {
    "data": lambda tensor: tensor.data.fill_(7),
    "numpy": lambda tensor: tensor.numpy().fill(7),
}


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
        SaveFailed, match=r"Step 2 was not saved: what was staged of 'b' is not what it was"
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


def test_conjugated_and_negated_tensors_are_saved(tmp_path):
    made = torch.randn(5000, dtype=torch.complex64)
    state = {"c": made.conj(), "n": made.conj().imag}
    ckpt = Checkpointer(tmp_path)
    for step in (1, 2):
        ckpt.save(step, state).result(ENDS_S)
    found = restored(
        tmp_path, {"c": torch.zeros(5000, dtype=torch.complex64), "n": torch.zeros(5000)}
    )
    assert torch.equal(found["c"], made.conj())
    assert torch.equal(found["n"], made.conj().imag)


def test_skip_leaves_out_the_third_save_in_flight_and_takes_the_next_that_finds_room(
    tmp_path, caplog
):
    ckpt = slow(tmp_path, 0.5, when_busy="skip", keep=None)
    with caplog.at_level(logging.WARNING, "holdfast"):
        handles = [ckpt.save(step, large(step)) for step in (1, 2, 3)]
        assert handles[2].result(ENDS_S) is None
    assert "Step 3 is not saved: the saves before it are not durable yet." in caplog.text
    assert not handles[1].done()
    assert all(handle.result(ENDS_S) for handle in handles[:2])
    ckpt.save(4, large(4)).result(ENDS_S)
    assert sorted(steps_in(tmp_path)) == [1, 2, 4]


def test_a_second_arena_for_which_there_was_no_memory_is_made_by_a_later_save(
    tmp_path, monkeypatch
):
    """The second arena keeps the newest durable snapshot for a rank that replaces this one."""
    make, state, ckpt = BufferPool._make, {"t": torch.zeros(10_000)}, overlapping(tmp_path)

    def make_one(seats, plan):
        if seats._seats:
            raise ArenaError("There is no memory.")
        return make(seats, plan)

    with monkeypatch.context() as patch:
        patch.setattr(BufferPool, "_make", make_one)
        ckpt.save(1, state).result(ENDS_S)
        ckpt.wait()
    for step in (2, 3):
        ckpt.save(step, state).result(ENDS_S)
        ckpt.wait()
    assert len(ckpt._engine._seats._seats) == 2


def test_wait_makes_the_update_wait_and_leaves_nothing_out(tmp_path):
    ckpt = slow(tmp_path, 0.3, keep=None)
    handles = [ckpt.save(step, large(step)) for step in (1, 2, 3)]
    ckpt.before_update()
    assert 1 in steps_in(tmp_path)  # the handle completes a moment after its memory is free
    ckpt.close()
    assert [handle.result(0).name[-1] for handle in handles] == ["1", "2", "3"]
    assert [verify(info).state for info in scan(tmp_path)] == ["verified"] * 3


def test_a_job_that_is_to_stop_never_leaves_with_its_last_save_skipped(tmp_path, stop_at):
    link = stop_at(3)
    ckpt = slow(tmp_path, 0.5, when_busy="skip", keep=None)
    for step in (1, 2, 3):
        ckpt.save(step, large(step))
    assert link.left_at == 3
    assert 3 in steps_in(tmp_path)


SHAPES = {
    "a new entry": ({"a": torch.ones(3)}, {"a": torch.ones(3), "b": torch.ones(4)}),
    "one less": ({"a": torch.ones(3), "b": torch.ones(4)}, {"a": torch.ones(3)}),
    "another shape": ({"a": torch.ones(3)}, {"a": torch.ones(1, 3)}),
    "another type": ({"a": torch.ones(3)}, {"a": torch.ones(3, dtype=torch.float64)}),
    "a tensor for a plain value": ({"a": 1}, {"a": torch.ones(3)}),
    "a plain value for a tensor": ({"a": torch.ones(3)}, {"a": 1}),
    "a longer text": ({"a": "x"}, {"a": "x" * 10_000}),
    "a growing list": ({"a": [1]}, {"a": list(range(1000))}),
    "a list of more tensors": ({"a": [torch.ones(1)]}, {"a": [torch.ones(1), torch.ones(1)]}),
    "a list for a dict": ({"a": {"0": torch.ones(1)}}, {"a": [torch.ones(1)]}),
    "numbers for texts as keys": ({"a": {"0": torch.ones(1)}}, {"a": {0: torch.ones(1)}}),
    "a new empty dict": ({"a": {"t": torch.ones(1)}}, {"a": {"t": torch.ones(1), "e": {}}}),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_a_state_of_another_shape_is_planned_anew(tmp_path, kind):
    before, after = copy.deepcopy(SHAPES[kind])
    ckpt = Checkpointer(tmp_path, keep=None)
    for step, state in enumerate((before, before, after, after), start=1):
        ckpt.save(step, {"s": state}).result(ENDS_S)
    for step, state in ((4, after), (2, before)):
        found = {"s": {}}
        assert Checkpointer(tmp_path).restore(found) == step
        assert_same(found, {"s": state})
        for info in scan(tmp_path)[:2]:
            info.path.rename(tmp_path / f"seen-{info.step}")


def test_a_new_group_of_parameters_is_saved_from_the_next_call_on(tmp_path):
    training, ckpt = Wide().run(2), Checkpointer(tmp_path)
    ckpt.save(2, training.objects)
    head = torch.nn.Linear(2, 2)
    training.optimizer.add_param_group({"params": head.parameters()})
    training.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(training.optimizer, T_max=50)
    training.model.append(torch.nn.Identity())
    head(torch.ones(2)).sum().backward()
    training.run(2)
    expected = copy.deepcopy(training.optimizer.state_dict())
    ckpt.save(4, training.objects).result(ENDS_S)
    state = {"optimizer": {}}
    assert Checkpointer(tmp_path).restore(state) == 4
    assert_same(state["optimizer"], expected)


def test_a_first_step_of_the_optimizer_is_a_new_shape(tmp_path):
    training, ckpt = Wide(), Checkpointer(tmp_path)
    for step in range(3):
        ckpt.save(step, training.objects).result(ENDS_S)
        expected = copy.deepcopy(training.optimizer.state_dict())
        training.run(1)
    state = {"optimizer": {}}
    assert Checkpointer(tmp_path).restore(state) == 2
    assert_same(state["optimizer"], expected)


def test_bad_use_in_a_later_save_is_raised_at_once_and_the_next_one_is_saved(tmp_path):
    ckpt = Checkpointer(tmp_path)
    ckpt.save(1, {"a": 1}).result(ENDS_S)
    with pytest.raises(BadUse, match="'bad'"):
        ckpt.save(2, {"a": 1, "bad": object()})
    ckpt.save(3, {"a": 3}).result(ENDS_S)
    assert steps_in(tmp_path) == [3, 1]


def broken(ckpt, folder, step, state, **options):
    """Begin a save that cannot become durable: a file has the name of the save's folder."""
    session, number = ckpt._engine._session, ckpt._engine._saves + 1
    (folder / f".step-{step:010d}.{session}-{number}.tmp").write_text("")
    ckpt.before_update()  # else the save may fail in the call
    return ckpt.save(step, state, **options)


def unbreak(folder):
    for path in folder.glob(".step-*.tmp"):
        path.unlink()


@pytest.fixture
def saving(tmp_path):
    """Return a function that makes a Checkpointer which has saved step 1."""

    def make(**options):
        ckpt = Checkpointer(tmp_path, **options)
        ckpt.save(1, {"a": 1}).result(ENDS_S)
        return ckpt

    return make


def leave(ckpt):
    with ckpt:
        pass


NEXT_CALLS = {
    "save": lambda ckpt: ckpt.save(4, {"a": 4}),
    "save of a step that is not due": lambda ckpt: ckpt.save(3, {"a": 3}),
    "wait": Checkpointer.wait,
    "restore": lambda ckpt: ckpt.restore({"a": 0}),
    "close": Checkpointer.close,
    "end of the block": leave,
}


@pytest.mark.parametrize("call", NEXT_CALLS)
def test_a_failure_that_nobody_saw_is_raised_once_by_the_next_call(tmp_path, call):
    ckpt = Checkpointer(tmp_path, every=2, on_failure="raise")
    ckpt.save(0, {"a": 0}).result(ENDS_S)
    handle = broken(ckpt, tmp_path, 2, {"a": 2})
    until(handle.done)
    with pytest.raises(SaveFailed, match="Step 2 was not saved"):
        NEXT_CALLS[call](ckpt)
    unbreak(tmp_path)
    if call not in ("close", "end of the block"):
        ckpt.wait()
        ckpt.save(4, {"a": 4}).result(ENDS_S)
    ckpt.close()


def test_a_failure_that_was_seen_is_not_raised_again(tmp_path, saving):
    ckpt = saving()
    handle = broken(ckpt, tmp_path, 2, {"a": 2})
    with pytest.raises(SaveFailed):
        handle.result(ENDS_S)
    unbreak(tmp_path)
    ckpt.wait()
    ckpt.save(3, {"a": 3}).result(ENDS_S)
    ckpt.close()


def test_waiting_tells_of_every_failure_though_its_story_is_still_being_told(
    tmp_path, link, monkeypatch
):
    """`wait` may not return between the end of a save and the record of its failure."""
    ckpt = Checkpointer(tmp_path)
    ckpt.save(1, {"a": 1}).result(ENDS_S)
    until(lambda: not ckpt._engine.thread.in_flight)
    telling, emit = threading.Event(), link.emit

    def slowly(kind, data):
        telling.set()
        time.sleep(0.2)
        emit(kind, data)

    monkeypatch.setattr(link, "emit", slowly)
    broken(ckpt, tmp_path, 2, {"a": 2})
    assert telling.wait(ENDS_S)
    with pytest.raises(SaveFailed, match="Step 2"):
        ckpt.wait()
    assert [event["step"] for event in link.of("save_failed")] == [2]


def test_waiting_returns_once_every_handle_is_done(tmp_path, link, monkeypatch):
    ckpt = Checkpointer(tmp_path)
    emit = link.emit

    def slowly(kind, data):
        time.sleep(0.1)
        emit(kind, data)

    monkeypatch.setattr(link, "emit", slowly)
    ckpt.save(1, {"a": 1})
    handle = ckpt.save(2, {"a": 1})
    ckpt.wait()
    assert handle.done()
    assert len(link.of("checkpoint")) == 2


def test_a_checkpoint_that_is_gone_before_it_is_told_of_was_saved_all_the_same(
    tmp_path, link, monkeypatch
):
    """With `keep=1` the next save may delete the checkpoint while this process is busy."""
    ckpt = Checkpointer(tmp_path, keep=1)
    gate, emit = threading.Event(), link.emit

    def held_back(kind, data):
        assert gate.wait(ENDS_S)
        emit(kind, data)

    monkeypatch.setattr(link, "emit", held_back)
    handles = [ckpt.save(step, {"a": step}) for step in (1, 2)]
    # The writing process goes on while the thread that receives its messages does not.
    until(
        lambda: (
            (tmp_path / "step-0000000002").exists() and not (tmp_path / "step-0000000001").exists()
        )
    )
    handles.append(ckpt.save(3, {"a": 3}))
    until(
        lambda: (
            (tmp_path / "step-0000000003").exists() and not (tmp_path / "step-0000000002").exists()
        )
    )
    gate.set()
    assert [handle.result(5).name[-1] for handle in handles] == ["1", "2", "3"]
    assert all(
        event["digest"] for event in link.of("checkpoint")
    )  # reported, not read: storage may hang


def test_what_was_saved_is_let_go_of_before_whoever_waits_goes_on(tmp_path, held):
    """A next call would wait for the save, and a state made for one save would take memory longer."""
    states = [large(step) for step in (1, 2)]
    with overlapping(tmp_path) as ckpt:
        ckpt.save(1, states[0]).result(ENDS_S)
        ckpt.before_update()
        held.clear()
        handle = ckpt.save(2, states[1])
        alive, last = [], weakref.ref(states[1]["large"])
        handle._outcome.add_done_callback(lambda _: alive.append(last() is not None))
        states.clear()
        held.set()
        assert handle.result(ENDS_S) is not None
    assert alive == [False]


def test_a_listener_that_breaks_does_not_keep_the_handle_waiting(tmp_path, link, monkeypatch):
    def breaks(kind, data):
        raise OSError("the line is dead")

    monkeypatch.setattr(link, "emit", breaks)
    assert Checkpointer(tmp_path).save(1, {"a": 1}).result(5)


def test_with_warn_the_training_goes_on(tmp_path, saving, caplog, link):
    ckpt = saving(on_failure="warn")
    with caplog.at_level(logging.WARNING, "holdfast"):
        handle = broken(ckpt, tmp_path, 2, {"a": 2})
        with pytest.raises(SaveFailed):
            handle.result(ENDS_S)
    assert "Step 2 was not saved" in caplog.text
    assert [event["step"] for event in link.of("save_failed")] == [2]
    unbreak(tmp_path)
    ckpt.wait()
    ckpt.save(3, {"a": 3}).result(ENDS_S)
    assert steps_in(tmp_path) == [3, 1]


def test_by_default_a_failed_save_is_made_again_at_the_next_call_whatever_its_step(tmp_path):
    ckpt = Checkpointer(tmp_path, every=10)
    ckpt.save(0, {"a": 0}).result(ENDS_S)
    assert ckpt.save(1, {"a": 1}).step is None
    handle = broken(ckpt, tmp_path, 10, {"a": 10})
    until(handle.done)
    unbreak(tmp_path)
    assert ckpt.save(11, {"a": 11}).result(ENDS_S) == tmp_path / "step-0000000011"
    assert ckpt.save(12, {"a": 12}).step is None
    ckpt.close()
    assert steps_in(tmp_path) == [11, 0]


def test_what_fails_again_and_again_is_tried_at_each_step_a_few_times_and_then_when_it_is_due(
    tmp_path, caplog, link
):
    with Checkpointer(tmp_path, every=10) as ckpt:
        ckpt.save(0, {"a": 0}).result(ENDS_S)
        tried = []
        with caplog.at_level(logging.WARNING, "holdfast"):
            for step in range(10, 100):
                handle = broken(ckpt, tmp_path, step, {"a": step})
                until(handle.done)
                tried += [handle.step] if handle.step is not None else []
        assert tried == [10, 11, 12, 13, *range(20, 100, 10)]
        assert [event["step"] for event in link.of("save_failed")] == tried
        logged = [record.message for record in caplog.records if "was not saved" in record.message]
        assert [message.split(" was not")[0] for message in logged] == [
            f"Step {step}" for step in (10, 11, 12, 13, 50)
        ]
        unbreak(tmp_path)
        ckpt.save(100, {"a": 100}).result(ENDS_S)
        handle = broken(ckpt, tmp_path, 110, {"a": 110})
        until(handle.done)
        unbreak(tmp_path)
        assert ckpt.save(111, {"a": 111}).step == 111, "it counts anew"
    assert steps_in(tmp_path) == [111, 100, 0]


@pytest.mark.parametrize("call", ["wait", "close", "end of the block"])
def test_what_no_later_save_has_made_up_for_is_raised_at_the_end(tmp_path, call):
    ckpt = Checkpointer(tmp_path, every=2)
    ckpt.save(0, {"a": 0}).result(ENDS_S)
    until(broken(ckpt, tmp_path, 2, {"a": 2}).done)
    with pytest.raises(SaveFailed, match="Step 2 was not saved"):
        NEXT_CALLS[call](ckpt)
    unbreak(tmp_path)
    ckpt.close()


def test_an_earlier_save_that_becomes_durable_later_makes_up_for_nothing(tmp_path):
    told = Outcomes(make_interval(1, FakeClock(), devices=lambda: 1), on_failure="retry")
    outcomes, handles = (
        [Future(), Future()],
        [SaveHandle(step, told.unseen, told.unmade) for step in (1, 2)],
    )
    for outcome, handle in zip(outcomes, handles, strict=True):
        told.follow(outcome, handle, save="", must=False)
    outcomes[1].set_exception(SaveFailed("Step 2 was not saved."))
    written = SaveReport(
        step=1,
        path=tmp_path,
        own_bytes=1,
        written=WriteResult(),
        call_s=0,
        fence_s=0,
        durable_s=1,
        attested=True,
    )
    outcomes[0].set_result(written)
    with pytest.raises(SaveFailed, match="Step 2"):
        told.raise_unmade()


def test_a_forced_save_that_fails_is_raised_by_the_next_call(tmp_path):
    with Checkpointer(tmp_path, every=5) as ckpt:
        ckpt.save(0, {"a": 0}).result(ENDS_S)
        ckpt.before_update()
        until(broken(ckpt, tmp_path, 2, {"a": 2}, force=True).done)
        unbreak(tmp_path)
        with pytest.raises(SaveFailed, match="Step 2 was not saved"):
            ckpt.save(3, {"a": 3})
        ckpt.save(3, {"a": 3}).result(ENDS_S)


def test_after_a_failure_restore_goes_back_and_nothing_is_left_to_raise(tmp_path):
    with Checkpointer(tmp_path, every=2) as ckpt:
        ckpt.save(0, {"a": 0}).result(ENDS_S)
        until(broken(ckpt, tmp_path, 2, {"a": 2}).done)
        unbreak(tmp_path)
        assert ckpt.restore({"a": 1}) == 0


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


def test_a_writing_process_that_is_killed_in_a_save_costs_nothing(tmp_path):
    ckpt = slow(tmp_path, 0.5, keep=None)
    ckpt.save(1, large(1)).result(ENDS_S)
    handle = ckpt.save(2, large(2))
    until(lambda: list(tmp_path.glob(".step-0000000002.*.tmp/*.distcp")))
    os.kill(ckpt._engine._writer.pid, signal.SIGKILL)
    handle.result(ENDS_S)
    assert [verify(info).state for info in scan(tmp_path)] == ["verified"] * 2
    found = restored(tmp_path, large(0))
    assert found["value"] == 2
    assert found["large"].eq(2).all()


def test_what_it_cost_is_told(tmp_path, link):
    ckpt = slow(tmp_path, 0.3)
    # Four chunks; the last chunk waits for at least two large ones, whichever it is.
    ckpt.save(1, large(1, mib=49)).result(ENDS_S)
    ckpt.save(2, large(2, mib=49)).result(ENDS_S)
    for event in link.of("checkpoint"):
        assert event["durable_s"] >= 0.3 > 0
        assert event["stall_s"] < event["durable_s"]
        assert event["write_gb_per_s"] < 0.1


def test_nothing_is_left_open_by_a_checkpointer_that_was_closed(tmp_path):
    before, threads = open_descriptors(), threading.active_count()
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"t": torch.zeros(100)})
        ckpt.save(2, {"t": torch.zeros(200)})
        ckpt.save(3, {"t": torch.zeros(200)})
    until(lambda: open_descriptors() <= before and threading.active_count() <= threads)


def test_python_s_lock_goes_around_quickly_while_the_state_is_copied(tmp_path, monkeypatch):
    before_s, seen_s, copy_into = sys.getswitchinterval(), [], staging_thread.copy_into

    def look(*arguments, **named):
        seen_s.append(sys.getswitchinterval())
        copy_into(*arguments, **named)

    monkeypatch.setattr(staging_thread, "copy_into", look)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"a": 1}).result(ENDS_S)
    assert seen_s[0] < before_s
    assert sys.getswitchinterval() == before_s


def test_a_gpu_without_memory_for_early_copies_makes_the_call_wait(tmp_path, monkeypatch, caplog):
    training = Wide()
    ckpt = overlapping(tmp_path)
    ckpt.save(1, training.objects).result(ENDS_S)
    training.run(1)

    def refuse(*_):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(early_copy.EarlyCopies, "take", refuse)
    expected = copy.deepcopy(training.model.state_dict())
    handle = ckpt.save(2, training.objects)
    training.model[0][0].weight.data.zero_()  # copied already
    handle.result(ENDS_S)
    assert "this save waits instead" in caplog.text
    monkeypatch.undo()
    fresh = Wide(seed=1)
    restored(tmp_path, {"model": fresh.model})
    assert_same(fresh.model.state_dict(), expected)


def test_a_step_that_is_captured_for_a_graph_is_none_yet(tmp_path, held, monkeypatch):
    training = Wide()
    ckpt = Checkpointer(tmp_path)
    ckpt.save(1, training.objects).result(ENDS_S)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    training.run(1)
    monkeypatch.undo()
    assert not ckpt._engine.fence.was_passed
    training.run(1)
    assert ckpt._engine.fence.was_passed


def test_a_save_while_the_interpreter_ends_is_refused_and_nothing_hangs(tmp_path):
    script = (
        "import atexit, sys, torch, holdfast\n"
        "def last():\n"
        "    try: ckpt.save(2, {'t': torch.ones(3)})\n"
        "    except holdfast.core.errors.SaveFailed as error: print(error)\n"
        "ckpt = holdfast.Checkpointer(sys.argv[1], on_failure='raise')\n"
        "ckpt.save(1, {'t': torch.ones(3)}).result()\n"
        "atexit.register(last)\n"
    )
    ended = run_program(script, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "Save before the script ends" in ended.stdout
    assert steps_in(tmp_path) == [1]


def test_other_ranks_hear_of_a_close_only_once_every_save_has_ended(tmp_path, held, monkeypatch):
    """A save that has yet to meet the other ranks would fail on them."""
    ckpt = overlapping(tmp_path)
    ckpt.save(1, {"t": torch.zeros(10_000)}).result(ENDS_S)
    held.clear()
    handle, done = ckpt.save(2, {"t": torch.zeros(10_000)}), []
    monkeypatch.setattr(ckpt._engine.meeting, "close", lambda: done.append(handle.done()))
    threading.Timer(0.1, held.set).start()
    ckpt.close()
    assert done == [True]
