"""Show that every failed save is reported once, and is made again or raised as `on_failure` says."""

import logging
import sys
import threading
import time
from concurrent.futures import Future

import pytest
from checkpoint_training import Wide
from overlapping_saves import large, overlapping, steps_in
from waiting import ENDS_S, until

from holdfast.checkpoint import Checkpointer
from holdfast.checkpoint.ipc.shared_buffer import State
from holdfast.checkpoint.save import staging_thread
from holdfast.checkpoint.save.handle import SaveHandle
from holdfast.checkpoint.save.results import Outcomes, SaveReport
from holdfast.checkpoint.schedule.interval import make_interval
from holdfast.checkpoint.writer.client import Writer, WriteResult
from holdfast.core.errors import BadUse, SaveFailed
from holdfast.testing import FakeClock


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


def test_bad_use_in_a_later_save_is_raised_at_once_and_the_next_one_is_saved(tmp_path):
    ckpt = Checkpointer(tmp_path)
    ckpt.save(1, {"a": 1}).result(ENDS_S)
    with pytest.raises(BadUse, match="'bad'"):
        ckpt.save(2, {"a": 1, "bad": object()})
    ckpt.save(3, {"a": 3}).result(ENDS_S)
    assert steps_in(tmp_path) == [3, 1]
