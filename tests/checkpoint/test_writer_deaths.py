"""Show that no save is lost where the writing process or its trainer dies or cannot be started."""

import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from images import TEN_FILES, hand_made, is_whole, order_of, sealed
from waiting import ENDS_S, open_descriptors, until
from writer_bench import LAYOUT, block, copy_the_rest, following, has_ended, kill, take_away

from holdfast.checkpoint.format.paths import failure_path
from holdfast.checkpoint.ipc.shared_buffer import State
from holdfast.checkpoint.writer import client as writer_module
from holdfast.checkpoint.writer import process as writing_process
from holdfast.checkpoint.writer.process import Service
from holdfast.core.errors import SaveFailed


def test_one_that_is_killed_while_idle_is_replaced_at_the_next_save(bench, caplog):
    made = bench()
    made.save(1).result(ENDS_S)
    pid = made.writer.pid
    kill(pid)
    assert has_ended(pid)
    made.save(2).result(ENDS_S)
    assert made.writer.pid != pid
    assert made.is_whole(1)
    assert made.is_whole(2)


@pytest.mark.parametrize("files", [0, 1, 9])
def test_one_that_is_killed_in_a_save_is_started_again_and_the_save_is_durable(
    bench, caplog, files
):
    made = bench()
    made.save(1).result(ENDS_S)
    (save, pipe), pid = made.blocked_save(2, files), made.writer.pid
    take_away(pipe, pid)
    kill(pid)
    save.result(ENDS_S)
    assert made.writer.pid != pid
    assert made.arena.state is State.COMMITTED
    assert made.is_whole(1)
    assert made.is_whole(2)
    assert sorted(path.name for path in made.folder.iterdir()) == [
        "step-0000000001",
        "step-0000000002",
    ]
    assert "The process that writes checkpoints is restarted: it died." in caplog.text


def test_a_save_that_was_committed_before_its_process_died_is_not_made_again(bench):
    made = bench()
    written = made.save(1).result(ENDS_S)
    before = (made.folder / "step-0000000001" / "holdfast.json").stat().st_ino
    kill(made.writer.pid)
    until(
        lambda: made.writer._socket is None
    )  # else the request is taken for one of the dead process
    assert made.again(order_of(made.folder, 1)).result(ENDS_S) == replace(written, seconds=0.0)
    assert (made.folder / "step-0000000001" / "holdfast.json").stat().st_ino == before


def test_whoever_takes_a_save_up_deletes_what_others_left_and_not_what_other_ranks_have_written(
    bench,
):
    ranks = [bench(layout=hand_made(rank=rank, world_size=3, sizes=TEN_FILES)) for rank in range(3)]
    first, second, third = ranks
    left = first.folder / ".step-0000000001.dead-1.tmp"
    left.mkdir()
    saves, note = [first.save(1), second.save(1)], order_of(first.folder, 1).staging / "rank-1.note"
    until(note.exists)
    until(lambda: not left.exists())
    left.mkdir()  # another process cleans up again
    kill(first.writer.pid)
    until(lambda: not left.exists())
    saves.append(third.save(1))  # the first save waits for this one
    for save in saves:
        save.result(ENDS_S)
    assert is_whole(first.folder, 1, 1, [each.layout for each in ranks])
    assert [path.name for path in first.folder.iterdir()] == ["step-0000000001"]


def test_a_save_that_three_processes_die_of_fails_and_costs_no_earlier_one(bench):
    made = bench()
    made.save(1).result(ENDS_S)
    (save, _), killed = made.blocked_save(2, files=1), []
    while not save.done():
        until(lambda: made.writer.pid not in killed or save.done())
        if not save.done():
            killed.append(made.writer.pid)
            kill(killed[-1])
            assert has_ended(killed[-1])
            time.sleep(0)
    assert len(killed) == 3
    with pytest.raises(
        SaveFailed, match=r"Step 2 was not saved: the process that writes it was started 3 times"
    ):
        save.result()
    assert made.arena.state is State.FREE
    assert made.is_whole(1)
    assert [path.name for path in made.folder.iterdir() if not path.name.startswith(".")] == [
        "step-0000000001"
    ]
    # The next save finds a living process.
    made.save(3).result(ENDS_S)
    assert made.is_whole(3)


def test_a_save_that_waits_behind_one_that_three_processes_die_of_is_made(bench):
    made = bench()
    arena = sealed(LAYOUT, 5)
    deadly, _ = made.blocked_save(2, files=1)
    waiting = made.writer.save(
        order_of(made.folder, 5),
        arena=made.writer.share_arena(arena),
        generation=1,
        layout=made._numbers[1],
        attested_bytes=8 * 10,
    )
    killed = []
    while not deadly.done():
        until(lambda: made.writer.pid not in killed or deadly.done())
        if not deadly.done() and len(killed) < 3:
            killed.append(made.writer.pid)
            kill(killed[-1])
            assert has_ended(killed[-1])
    with pytest.raises(SaveFailed, match="was started 3 times"):
        deadly.result()
    waiting.result(ENDS_S)
    assert made.is_whole(5)


@pytest.mark.parametrize("rank", [0, 1])
def test_of_a_save_that_three_processes_die_of_the_other_ranks_hear(bench, monkeypatch, rank):
    """They would wait for this rank until a save's time limit."""
    monkeypatch.setattr(writer_module, "_STARTS_A_SAVE", 1)
    made = bench(layout=hand_made(rank=rank, world_size=2, sizes=TEN_FILES))
    order = order_of(made.folder, 1)
    save, _ = made.blocked_save(1, files=1, order=order)
    kill(made.writer.pid)
    with pytest.raises(SaveFailed):
        save.result(ENDS_S)
    told = order.staging / "rank-1.note" if rank else failure_path(made.folder, 1, order.save)
    until(told.exists)
    assert "the process that writes it was started 1 times" in told.read_text()
    if rank == 0:
        until(lambda: [path.name for path in made.folder.iterdir()] == [told.name])


@pytest.mark.parametrize("rank", [0, 1])
def test_the_other_ranks_are_told_before_the_trainer_which_may_end_then(bench, monkeypatch, rank):
    monkeypatch.setattr(writer_module, "_STARTS_A_SAVE", 1)
    made = bench(layout=hand_made(rank=rank, world_size=2, sizes=TEN_FILES))
    order, seen = order_of(made.folder, 1), []
    told = order.staging / "rank-1.note" if rank else failure_path(made.folder, 1, order.save)
    save, _ = made.blocked_save(1, files=1, order=order)
    save.add_done_callback(lambda _: seen.append(told.exists()))
    kill(made.writer.pid)
    until(lambda: seen)
    assert seen == [True]


def test_one_that_dies_after_it_gave_up_the_arena_fails_the_save(bench, monkeypatch):
    """The process could not write, freed the arena, and died before its report."""
    monkeypatch.setattr(writer_module, "_STARTS_A_SAVE", 1)
    made = bench()
    save, _ = made.blocked_save(1, files=1)
    assert made.arena.state is State.WRITING
    made.arena.move(State.FREE, made.arena.generation)
    kill(made.writer.pid)
    with pytest.raises(SaveFailed):
        save.result(ENDS_S)


def test_one_that_dies_after_the_commit_and_before_it_said_so_has_saved(bench, monkeypatch):
    monkeypatch.setattr(writer_module, "_STARTS_A_SAVE", 1)
    made = bench()
    save, _ = made.blocked_save(1, files=1)
    assert made.arena.state is State.WRITING
    made.arena.move(State.COMMITTED, made.arena.generation)
    kill(made.writer.pid)
    save.result(ENDS_S)


def test_one_that_is_killed_while_it_follows_the_copy_is_replaced_by_one_that_does(bench):
    made = bench()
    generation, ended = following(made, files=4)
    first = made.writer.pid
    kill(first)
    until(lambda: made.writer.pid != first)
    copy_the_rest(made, generation)
    ended.result(ENDS_S)
    assert made.is_whole(1)


def test_one_that_cannot_be_started_again_fails_the_save(bench, monkeypatch, tmp_path):
    """No caller may wait for ever."""
    made = bench()
    save, _ = made.blocked_save(1, files=1)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    kill(made.writer.pid)
    with pytest.raises(SaveFailed):
        save.result(ENDS_S)
    assert made.arena.state is State.FREE


def refuse(*_):
    raise RuntimeError("can't start new thread")


def test_where_no_thread_can_be_started_either_the_save_fails(bench, monkeypatch):
    """From Python 3.12 on, this also happens at the interpreter's end. No caller may wait for ever."""
    made = bench()
    save, _ = made.blocked_save(1, files=1)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    kill(made.writer.pid)
    with pytest.raises(SaveFailed, match=r"cannot be started \(can't start new thread\)"):
        save.result(ENDS_S)
    assert made.arena.state is State.FREE


def test_a_process_that_no_thread_hears_is_ended_and_the_next_save_starts_another_one(
    bench, monkeypatch
):
    made = bench()
    before = open_descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            made.save(1)
    assert open_descriptors() <= before
    made.again(order_of(made.folder, 1)).result(ENDS_S)
    assert made.is_whole(1)


def test_one_that_cannot_be_started_at_all_leaves_nothing_open(bench, monkeypatch, tmp_path):
    made = bench()
    before = open_descriptors()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    with pytest.raises(OSError, match="No such file"):
        made.save(1)
    assert open_descriptors() <= before
    monkeypatch.undo()
    made.again(order_of(made.folder, 1)).result(ENDS_S)
    assert made.is_whole(1)


class Overtaken:
    """A lock that calls `other` once, right after its first release."""

    def __init__(self, lock, other):
        self._lock, self._other = lock, other

    def __enter__(self):
        self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()
        other, self._other = self._other, lambda: None
        other()


def test_who_saves_while_a_dead_process_is_replaced_starts_no_second_one(bench, monkeypatch):
    made = bench()
    first, pipe = made.blocked_save(1, files=1)
    arena, layout = made.writer.share_arena(sealed(LAYOUT, 2)), made.writer.share_layout(LAYOUT)
    started, start, saves = [], made.writer._start, []
    monkeypatch.setattr(made.writer, "_start", lambda: (started.append(1), start()))

    def save_meanwhile():
        order = order_of(made.folder, 2)
        saves.append(
            made.writer.save(order, arena=arena, generation=1, layout=layout, attested_bytes=8 * 10)
        )

    take_away(pipe, made.writer.pid)
    made.writer._lock = Overtaken(made.writer._lock, save_meanwhile)
    kill(made.writer.pid)
    first.result(ENDS_S)
    until(lambda: saves)
    saves[0].result(ENDS_S)
    assert len(started) == 1
    assert made.is_whole(1)
    assert made.is_whole(2)


def test_closing_a_writer_whose_process_was_just_found_dead_does_no_harm(bench, monkeypatch):
    made = bench()
    made.save(1).result(ENDS_S)
    process = made.writer._process
    gate, send_signal = threading.Event(), process.send_signal

    def later(number):
        gate.wait(ENDS_S)
        send_signal(number)

    monkeypatch.setattr(process, "send_signal", later)
    kill(process.pid)
    try:
        assert has_ended(process.pid)
        made.writer.close()
    finally:
        gate.set()


def test_one_whose_trainer_is_gone_goes_on_where_a_child_holds_the_line_and_nobody_reads(
    monkeypatch,
):
    monkeypatch.setattr(writing_process, "_release_stderr", lambda: None)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, subprocess.Popen(["sleep", "60"]) as trainer:
        service = Service(theirs, trainer.pid, 0.0)
        for _ in range(2000):  # a socket holds a tenth
            service._send_alive()
        saying = threading.Thread(target=service._send, args=({"ended": {}},), daemon=True)
        saying.start()
        saying.join(0.1)
        assert saying.is_alive(), "a trainer that lives is to hear it"
        trainer.kill()
        saying.join(ENDS_S)
        assert not saying.is_alive()


def test_a_trainer_that_is_killed_while_it_copies_leaves_nothing(bench):
    made = bench()
    made.save(1).result(ENDS_S)
    script = Path(__file__).parent / "ordered_then_killed.py"
    command = [sys.executable, script, made.folder, "alone", "6"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        pid, _ = map(int, trainer.stdout.readline().split())
        until(lambda: len(list(made.folder.glob(".step-*/*.xxh3"))) == 6)
        trainer.kill()
        trainer.wait()
        assert has_ended(pid)
    assert [path.name for path in made.folder.iterdir()] == ["step-0000000001"]


@pytest.mark.parametrize("forks", ["forks", "alone"])
def test_what_a_trainer_ordered_is_saved_though_it_is_killed_and_its_writer_ends_by_itself(
    bench, forks
):
    """This also holds if a child of the trainer, such as a data worker, keeps the socket open."""
    made = bench()
    made.save(1).result(ENDS_S)
    script = Path(__file__).parent / "ordered_then_killed.py"
    command = [sys.executable, script, made.folder, forks, "10"]
    pipe = block(order_of(made.folder, 2), LAYOUT, files=1)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        pid, child = map(int, trainer.stdout.readline().split())
        try:
            until(lambda: list(pipe.parent.glob("*.xxh3")))
            trainer.kill()
            trainer.wait()
            assert not (made.folder / "step-0000000002").exists()
            take_away(pipe, pid)
            kill(pid, signal.SIGCONT)
            assert has_ended(pid)
        finally:
            if child:
                kill(child)
    assert made.is_whole(1)
    assert made.is_whole(2)
    assert sorted(path.name for path in made.folder.iterdir()) == [
        "step-0000000001",
        "step-0000000002",
    ]
