"""Show that a writing process, storage or a rank that hangs fails one save at most, and no other one."""

import os
import signal
import socket
import subprocess
import threading

import pytest
from images import half_copied, hand_made, order_of, sealed
from waiting import ENDS_S, until
from writer_bench import LAYOUT, block, copy_the_rest, following, has_ended, kill, take_away

from holdfast.checkpoint.ipc.messages import receive, send
from holdfast.checkpoint.ipc.shared_buffer import State
from holdfast.checkpoint.writer import client as writer_module
from holdfast.checkpoint.writer.process import Service
from holdfast.core.errors import SaveFailed
from holdfast.testing import FakeClock


def test_one_that_hangs_is_found_and_replaced(bench, monkeypatch, caplog):
    monkeypatch.setattr(writer_module, "_SILENT_S", 2.0)
    made = bench()
    (save, pipe), pid = made.blocked_save(1, files=1), made.writer.pid
    take_away(pipe, pid)  # stops the process
    save.result(ENDS_S)
    assert made.writer.pid != pid
    assert has_ended(pid)
    assert made.is_whole(1)
    assert "restarted: it sent nothing for 2 s." in caplog.text


def test_one_that_is_stopped_is_replaced_also_where_a_save_fails_sooner_than_that_is_known(
    bench, monkeypatch
):
    monkeypatch.setattr(writer_module, "_SILENT_S", 2.0)
    made = bench()
    generation, save = following(made, files=4)
    pid = made.writer.pid
    kill(pid, signal.SIGSTOP)
    made.limit_this_process(0.6)
    until(lambda: made.writer.pid != pid)
    copy_the_rest(made, generation)
    save.result(ENDS_S)
    assert made.is_whole(1)


def test_it_says_that_it_lives_before_it_takes_an_order(monkeypatch):
    """Otherwise a process that hangs in its first save would count as not yet started."""
    monkeypatch.setattr(Service, "_keep_saying", lambda _: None)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        send(ours, {"closed": True})
        ours.shutdown(socket.SHUT_WR)
        Service(theirs, os.getpid(), 0.0).serve()
        ours.settimeout(ENDS_S)
        assert receive(ours) == ({"alive": 0}, None)


def test_a_trainer_that_was_stopped_itself_does_not_take_its_process_for_one_that_is_silent(
    bench, monkeypatch
):
    writer, clock = bench().writer, FakeClock()
    monkeypatch.setattr(writer_module.time, "monotonic", clock.monotonic_s)
    looks = iter([True, *[False] * 5])

    def look(fds, _timeout_s):
        clock.advance(10_000)
        return list(fds) if next(looks, True) else []

    monkeypatch.setattr(writer_module, "readable", look)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        send(theirs, {"alive": 0})
        theirs.shutdown(socket.SHUT_WR)
        assert writer._listen(ours) == "it died"


def test_a_trainer_that_was_stopped_itself_does_not_take_its_process_for_one_that_hangs(
    bench, monkeypatch
):
    """A scheduler may stop all of a job for hours, and continue it."""
    writer, clock = bench(timeout_s=60.0).writer, FakeClock()
    monkeypatch.setattr(writer_module.time, "monotonic", clock.monotonic_s)
    monkeypatch.setattr(
        writer_module, "receive", lambda line: (clock.advance(10_000), receive(line))[1]
    )
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        for _ in range(5):
            send(theirs, {"alive": 7})
        theirs.shutdown(socket.SHUT_WR)
        writer._outstanding[1, 1] = None
        assert writer._listen(ours) == "it died"
    writer._outstanding.clear()


def test_storage_that_hangs_fails_the_save_that_waits_for_it_and_no_other_one(bench):
    """The next process would hang as well."""
    made = bench()
    (hangs, _), pid = made.blocked_save(1, files=0), made.writer.pid
    second = sealed(LAYOUT, 2)
    waits = made.writer.save(
        order_of(made.folder, 2),
        arena=made.writer.share_arena(second),
        generation=1,
        layout=made.writer.share_layout(LAYOUT),
        attested_bytes=8 * 10,
    )
    until(lambda: made.writer._outstanding[1, 1].has_begun)
    made.limit_this_process(0.5)
    with pytest.raises(SaveFailed, match=r"Step 1 was not saved: nothing was written for 0.5 s\. "):
        hangs.result(ENDS_S)
    assert made.arena.state is State.FREE
    waits.result(ENDS_S)
    assert made.writer.pid != pid
    assert made.is_whole(2)


def test_where_the_other_ranks_cannot_be_told_for_storage_that_hangs_the_save_fails_all_the_same(
    bench, monkeypatch
):
    monkeypatch.setattr(writer_module, "_STARTS_A_SAVE", 1)
    monkeypatch.setattr(writer_module, "_ENDING_S", 0.1)
    monkeypatch.setattr(writer_module, "discard_abandoned", lambda *_: None)
    hangs = threading.Event()
    monkeypatch.setattr(writer_module, "abandon", lambda *_: hangs.wait())
    made = bench()
    save, _ = made.blocked_save(1, files=1)
    kill(made.writer.pid)
    with pytest.raises(SaveFailed, match="it died"):
        save.result(ENDS_S)
    hangs.set()


def test_storage_that_hangs_a_deletion_fails_no_save_that_nobody_has_begun(bench, monkeypatch):
    """A pipe without a writer blocks a process that opens it for reading, as the deletion does."""
    monkeypatch.setattr(writer_module, "_ENDING_S", 0.0)
    made = bench()
    old = made.folder / "step-0000000000"
    old.mkdir()
    os.mkfifo(old / "holdfast.json")
    made.save(1).result(ENDS_S)
    made.limit_this_process(0.5)
    pid = made.writer.pid
    made.save(2).result(ENDS_S)
    assert made.writer.pid != pid
    assert made.is_whole(1)
    assert made.is_whole(2)


def test_storage_that_hangs_while_the_state_is_still_copied_fails_that_save_once(bench):
    made = bench(timeout_s=2.0)
    order = order_of(made.folder, 1)
    block(order, LAYOUT, files=0)
    made.arena.move(State.FREE, made.arena.generation)
    generation = half_copied(made.arena, LAYOUT, 1, files=4)
    save, pid = made.again(order), made.writer.pid
    until(lambda: made.writer._outstanding[1, generation].has_begun)
    copy_the_rest(made, generation)
    with pytest.raises(SaveFailed, match=r"Step 1 was not saved: nothing was written for 2 s\. "):
        save.result(ENDS_S)
    assert made.writer.pid == pid


def test_a_copy_that_never_goes_on_fails_the_save_once_it_took_too_long(bench):
    made = bench(timeout_s=0.2)
    made.arena.move(State.FREE, made.arena.generation)
    half_copied(made.arena, made.layout, 1, files=0)
    ended = made.again(order_of(made.folder, 1))
    with pytest.raises(SaveFailed, match="snapshot was not copied"):
        ended.result(ENDS_S)
    assert made.arena.state is State.FREE
    assert list(made.folder.iterdir()) == []


def test_whoever_waits_for_other_ranks_does_not_hang():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        service = Service(theirs, os.getpid(), 0.0)
        before = service._moves
        service._waits(60.0)()
        assert service._moves != before


def test_other_ranks_that_never_come_fail_the_save_once_it_took_too_long(bench):
    made = bench(layout=hand_made(world_size=2), timeout_s=0.2)
    with pytest.raises(
        SaveFailed, match=r"Step 1 was not saved: the other ranks had not finished after 0.2 s"
    ):
        made.save(1).result(ENDS_S)
    assert made.arena.state is State.FREE
    assert [path.name for path in made.folder.iterdir() if path.suffix != ".failed"] == []


def test_closing_does_not_wait_for_a_process_that_storage_holds_for_ever(bench, monkeypatch):
    """Even SIGKILL does not end such a process."""
    made = bench()
    made.save(1).result(ENDS_S)
    process, is_over = made.writer._process, threading.Event()

    def wait(timeout=None):
        if timeout is not None:
            raise subprocess.TimeoutExpired("python", timeout)
        is_over.wait(ENDS_S)

    with monkeypatch.context() as patch:
        patch.setattr(process, "wait", wait)
        closing = threading.Thread(target=made.writer.close)
        closing.start()
        closing.join(ENDS_S)
        has_closed = not closing.is_alive()
        is_over.set()
        closing.join()
    process.wait()
    assert has_closed
