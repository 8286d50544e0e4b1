"""Show that a save beside the training stores the state of the call, and that updates wait for its copy."""

import contextlib
import copy
import sys
import threading
import weakref

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_training import Wide, assert_same
from overlapping_saves import large, overlapping, restored, steps_in
from started_ranks import run_program
from waiting import ENDS_S, open_descriptors, until

from holdfast.checkpoint import Checkpointer
from holdfast.checkpoint.ipc.shared_buffer import ArenaError
from holdfast.checkpoint.save import staging_thread
from holdfast.checkpoint.snapshot import early_copy
from holdfast.checkpoint.snapshot.buffer_pool import BufferPool


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


def test_nothing_is_left_open_by_a_checkpointer_that_was_closed(tmp_path):
    before, threads = open_descriptors(), threading.active_count()
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"t": torch.zeros(100)})
        ckpt.save(2, {"t": torch.zeros(200)})
        ckpt.save(3, {"t": torch.zeros(200)})
    until(lambda: open_descriptors() <= before and threading.active_count() <= threads)


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
