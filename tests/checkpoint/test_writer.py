"""Test the real writing process: its saves, its deaths, and the trainer's deaths."""

import fcntl
import glob
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from images import TEN_FILES, again, half_copied, hand_made, is_whole, order_of, seal, sealed
from waiting import ENDS_S, open_descriptors, until

from holdfast.checkpoint.format.paths import failure_path
from holdfast.checkpoint.format.rank_layout import PAGE_BYTES, Piece
from holdfast.checkpoint.ipc.messages import receive, send
from holdfast.checkpoint.ipc.shared_buffer import State
from holdfast.checkpoint.writer import client as writer_module
from holdfast.checkpoint.writer import process as writing_process
from holdfast.checkpoint.writer.client import NotAttestedError, Writer
from holdfast.checkpoint.writer.process import Service, pause_s
from holdfast.core.errors import SaveFailed
from holdfast.testing import FakeClock

SLOW_BYTES_S = 4096 * 20
"""A rate of one file of the layout below every 50 ms."""
LAYOUT = hand_made(sizes=TEN_FILES)


class Bench:
    """A writer, and an arena and a layout that the writer has."""

    def __init__(self, folder, *, layout=LAYOUT, timeout_s=60.0, max_write_bytes_s=None):
        self.folder = folder
        self.layout = layout
        self.writer = Writer(timeout_s=timeout_s, max_write_bytes_s=max_write_bytes_s)
        self.arena = sealed(layout, 1)
        self._numbers = self.writer.share_arena(self.arena), self.writer.share_layout(layout)
        self._is_new = True

    def save(self, step, order=None):
        if not self._is_new:
            seal(self.arena, self.layout, step)
        self._is_new = False
        return self.again(order or order_of(self.folder, step))

    def again(self, order):
        arena, layout = self._numbers
        return self.writer.save(
            order,
            arena=arena,
            generation=self.arena.generation,
            layout=layout,
            attested_bytes=8 * len(self.layout.pieces),
        )

    def is_whole(self, step):
        return is_whole(self.folder, step, step, [self.layout])


@pytest.fixture
def bench(tmp_path):
    made = []

    def make(**options):
        made.append(Bench(tmp_path / "checkpoints", **options))
        made[-1].folder.mkdir(exist_ok=True)
        return made[-1]

    yield make
    for each in made:
        each.writer.close()


def files_of(folder, step):
    """Return the files of a step's unfinished save.

    The folder may vanish meanwhile, for which `Path.glob` would raise.
    """
    return glob.glob(f"{folder}/.step-{step:010d}.*.tmp/*.distcp")  # noqa: PTH207


def kill(pid, number=signal.SIGKILL):
    os.kill(pid, number)


def has_ended(pid):
    """Wait until a process, maybe no child of this one, has ended; return False if it lives on."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], ENDS_S)[0])
    finally:
        os.close(fd)


def is_there(pid):
    return Path(f"/proc/{pid}").exists()


def test_saves_are_durable_one_after_another_by_one_process(bench):
    made = bench()
    assert made.writer.pid is None
    seconds = made.save(1).result(ENDS_S).seconds
    assert seconds > 0
    assert made.arena.state is State.COMMITTED
    pid = made.writer.pid
    for step in (2, 3):
        made.save(step).result(ENDS_S)
    assert made.writer.pid == pid
    assert all(made.is_whole(step) for step in (1, 2, 3))


def test_orders_that_come_while_one_is_under_way_are_done_in_turn(bench, tmp_path):
    made = bench(max_write_bytes_s=SLOW_BYTES_S)
    arenas = [sealed(LAYOUT, step) for step in (5, 6)]
    layout = made.writer.share_layout(LAYOUT)
    saves = [
        made.writer.save(
            order_of(made.folder, step),
            arena=made.writer.share_arena(arena),
            generation=1,
            layout=layout,
            attested_bytes=8 * 10,
        )
        for step, arena in zip((5, 6), arenas, strict=True)
    ]
    first, second = (save.result(ENDS_S).seconds for save in saves)
    assert min(first, second) >= 9 * 4096 / SLOW_BYTES_S
    assert made.is_whole(5)
    assert made.is_whole(6)


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
    made = bench(max_write_bytes_s=SLOW_BYTES_S)
    made.save(1).result(ENDS_S)
    save, pid = made.save(2), made.writer.pid
    if files:
        until(lambda: len(files_of(made.folder, 2)) >= files)
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
    assert "The process that writes checkpoints is started again: it died." in caplog.text


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
    made = bench(max_write_bytes_s=SLOW_BYTES_S)
    made.save(1).result(ENDS_S)
    save, killed = made.save(2), []
    while not save.done():
        until(lambda: made.writer.pid not in killed or save.done())
        if not save.done():
            killed.append(made.writer.pid)
            until(lambda: files_of(made.folder, 2))
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
    made = bench(max_write_bytes_s=SLOW_BYTES_S)
    arena = sealed(LAYOUT, 5)
    deadly = made.save(2)
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
        until(lambda: files_of(made.folder, 2) or deadly.done() or len(killed) == 3)
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
    made = bench(
        layout=hand_made(rank=rank, world_size=2, sizes=TEN_FILES), max_write_bytes_s=SLOW_BYTES_S
    )
    order = order_of(made.folder, 1)
    order.staging.mkdir()
    save = made.save(1, order)
    until(lambda: files_of(made.folder, 1))
    kill(made.writer.pid)
    with pytest.raises(SaveFailed):
        save.result(ENDS_S)
    told = order.staging / "rank-1.note" if rank else failure_path(made.folder, 1, order.save)
    until(told.exists)
    assert "the process that writes it was started 1 times" in told.read_text()
    if rank == 0:
        until(lambda: [path.name for path in made.folder.iterdir()] == [told.name])


def test_storage_that_hangs_fails_the_save_that_waits_for_it_and_no_other_one(bench):
    """A pipe without a reader blocks a process that opens it for writing, also the next process."""
    made = bench(timeout_s=0.5)
    order = order_of(made.folder, 1)
    order.staging.mkdir()
    os.mkfifo(order.staging / LAYOUT.shards[0].name)
    second = sealed(LAYOUT, 2)
    hangs, pid = made.save(1, order), made.writer.pid
    waits = made.writer.save(
        order_of(made.folder, 2),
        arena=made.writer.share_arena(second),
        generation=1,
        layout=made.writer.share_layout(LAYOUT),
        attested_bytes=8 * 10,
    )
    with pytest.raises(SaveFailed, match=r"Step 1 was not saved: nothing was written for 0.5 s\. "):
        hangs.result(ENDS_S)
    assert made.arena.state is State.FREE
    waits.result(ENDS_S)
    assert made.writer.pid != pid
    assert made.is_whole(2)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_other_ranks_are_told_before_the_trainer_which_may_end_then(bench, monkeypatch, rank):
    monkeypatch.setattr(writer_module, "_STARTS_A_SAVE", 1)
    made = bench(
        layout=hand_made(rank=rank, world_size=2, sizes=TEN_FILES), max_write_bytes_s=SLOW_BYTES_S
    )
    order, seen = order_of(made.folder, 1), []
    told = order.staging / "rank-1.note" if rank else failure_path(made.folder, 1, order.save)
    save = made.save(1, order)
    save.add_done_callback(lambda _: seen.append(told.exists()))
    until(lambda: files_of(made.folder, 1))
    kill(made.writer.pid)
    until(lambda: seen)
    assert seen == [True]


def test_where_the_other_ranks_cannot_be_told_for_storage_that_hangs_the_save_fails_all_the_same(
    bench, monkeypatch
):
    monkeypatch.setattr(writer_module, "_STARTS_A_SAVE", 1)
    monkeypatch.setattr(writer_module, "_ENDING_S", 0.1)
    monkeypatch.setattr(writer_module, "discard_abandoned", lambda *_: None)
    hangs = threading.Event()
    monkeypatch.setattr(writer_module, "abandon", lambda *_: hangs.wait())
    made = bench(max_write_bytes_s=SLOW_BYTES_S)
    save = made.save(1)
    until(lambda: files_of(made.folder, 1))
    kill(made.writer.pid)
    with pytest.raises(SaveFailed, match="it died"):
        save.result(ENDS_S)
    hangs.set()


def test_storage_that_hangs_a_deletion_fails_no_save_that_nobody_has_begun(bench, monkeypatch):
    """A pipe without a writer blocks a process that opens it for reading, as the deletion does."""
    monkeypatch.setattr(writer_module, "_ENDING_S", 0.0)
    made = bench(timeout_s=0.5)
    old = made.folder / "step-0000000000"
    old.mkdir()
    os.mkfifo(old / "holdfast.json")
    made.save(1).result(ENDS_S)
    pid = made.writer.pid
    made.save(2).result(ENDS_S)
    assert made.writer.pid != pid
    assert made.is_whole(1)
    assert made.is_whole(2)


def test_storage_that_hangs_while_the_state_is_still_copied_fails_that_save_once(bench):
    made = bench(timeout_s=2.0)
    order = order_of(made.folder, 1)
    order.staging.mkdir()
    os.mkfifo(order.staging / LAYOUT.shards[0].name)
    made.arena.move(State.FREE, made.arena.generation)
    generation = half_copied(made.arena, LAYOUT, 1, files=4)
    save, pid = made.again(order), made.writer.pid
    until(lambda: made.writer._outstanding[1, generation].has_begun)
    copy_the_rest(made, generation)
    with pytest.raises(SaveFailed, match=r"Step 1 was not saved: nothing was written for 2 s\. "):
        save.result(ENDS_S)
    assert made.writer.pid == pid


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


def test_whoever_waits_for_other_ranks_does_not_hang():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        service = Service(theirs, os.getpid(), 0.0)
        before = service._moves
        service._waits(60.0)()
        assert service._moves != before


def test_one_that_is_stopped_is_replaced_also_where_a_save_fails_sooner_than_that_is_known(
    bench, monkeypatch
):
    monkeypatch.setattr(writer_module, "_SILENT_S", 2.0)
    made = bench(max_write_bytes_s=SLOW_BYTES_S, timeout_s=0.6)
    save, pid = made.save(1), made.writer.pid
    until(lambda: files_of(made.folder, 1))
    kill(pid, signal.SIGSTOP)
    save.result(ENDS_S)
    assert made.writer.pid != pid
    assert made.is_whole(1)


def test_it_looks_for_other_ranks_ever_more_seldom():
    assert [pause_s(waited_s) for waited_s in (0.0, 0.05, 1.0, 3.0, 5.0, 500.0)] == [
        0.01,
        0.01,
        0.1,
        0.3,
        0.5,
        0.5,
    ]


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
)
def test_what_a_scheduler_sends_to_all_processes_is_the_trainers_to_act_on(bench, number):
    made = bench(max_write_bytes_s=SLOW_BYTES_S)
    save, pid = made.save(1), made.writer.pid
    until(lambda: files_of(made.folder, 1))
    kill(pid, number)
    save.result(ENDS_S)
    assert made.writer.pid == pid


def test_files_of_the_working_directory_are_not_taken_for_modules(bench, tmp_path, monkeypatch):
    made = bench()
    for name in ("queue", "secrets", "socket"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    made.save(1).result(ENDS_S)
    assert made.is_whole(1)


def test_one_that_hangs_is_found_and_replaced(bench, monkeypatch, caplog):
    monkeypatch.setattr(writer_module, "_SILENT_S", 2.0)
    made = bench(max_write_bytes_s=SLOW_BYTES_S)
    save, pid = made.save(1), made.writer.pid
    until(lambda: files_of(made.folder, 1))
    kill(pid, signal.SIGSTOP)
    save.result(ENDS_S)
    assert made.writer.pid != pid
    assert has_ended(pid)
    assert made.is_whole(1)
    assert "started again: it was silent for 2 s." in caplog.text


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


def test_a_trainer_does_not_wait_until_its_order_is_heard(monkeypatch):
    """Cancelled requests pile up during a save, and the optimizer's step waits for the sender."""
    orders, written = [], threading.Event()

    def write_slowly(_service, message, _replicas):
        written.wait(ENDS_S)
        orders.append(message["save"])

    monkeypatch.setattr(Service, "_save", write_slowly)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    serving = threading.Thread(target=Service(theirs, os.getpid(), 0.0).serve)
    serving.start()
    count = 2000  # a socket holds a tenth
    sending = threading.Thread(
        target=lambda: [send(ours, {"save": number}) for number in range(count)], daemon=True
    )
    sending.start()
    sending.join(ENDS_S / 2)
    was_sent = not sending.is_alive()
    written.set()
    sending.join()
    ours.close()
    serving.join()
    assert was_sent
    assert orders == list(range(count))


def test_other_ranks_that_never_come_fail_the_save_once_it_took_too_long(bench):
    made = bench(layout=hand_made(world_size=2), timeout_s=0.2)
    with pytest.raises(
        SaveFailed, match=r"Step 1 was not saved: the other ranks were not through after 0.2 s"
    ):
        made.save(1).result(ENDS_S)
    assert made.arena.state is State.FREE
    assert [path.name for path in made.folder.iterdir() if path.suffix != ".failed"] == []


def test_what_was_not_attested_is_told_piece_by_piece(bench):
    made = bench()
    made.arena.notes[8 * 3] ^= 1
    made.arena.notes[8 * 7] ^= 1
    with pytest.raises(NotAttestedError) as raised:
        made.save(1).result(ENDS_S)
    assert raised.value.pieces == [3, 7]
    assert made.arena.state is State.FREE
    assert list(made.folder.iterdir()) == []
    made.save(2).result(ENDS_S)
    assert made.is_whole(2)


def test_more_wrong_pieces_than_a_message_holds_are_a_failure_all_the_same(bench):
    layout = hand_made(sizes=[40_000])
    made = bench(layout=replace(layout, pieces=tuple(Piece(number, 1) for number in range(30_000))))
    made.arena.notes[:] = bytes(len(made.arena.notes))
    with pytest.raises(NotAttestedError) as raised:
        made.save(1).result(ENDS_S)
    assert raised.value.pieces[:1000] == list(range(1000))


def test_an_order_with_a_very_long_list_of_damaged_ones_arrives(bench):
    made = bench()
    damaged = [made.folder / f"step-{number:010d}.replaced" for number in range(5000)]
    made.save(1, order_of(made.folder, 1, damaged=damaged)).result(ENDS_S)
    assert made.is_whole(1)


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


def test_an_order_of_a_use_that_is_over_fails_and_changes_nothing(bench):
    made = bench()
    made.save(1).result(ENDS_S)
    late = again(order_of(made.folder, 1))
    made.arena.begin(2)
    future = made.writer.save(late, arena=1, generation=1, layout=2, attested_bytes=0)
    with pytest.raises(SaveFailed, match="is over"):
        future.result(ENDS_S)
    assert made.arena.state is State.COPYING
    assert made.is_whole(1)


def test_one_that_cannot_be_started_again_fails_the_save(bench, monkeypatch, tmp_path):
    """No caller may wait for ever."""
    made = bench(max_write_bytes_s=SLOW_BYTES_S)
    save = made.save(1)
    until(lambda: files_of(made.folder, 1))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    kill(made.writer.pid)
    with pytest.raises(SaveFailed):
        save.result(ENDS_S)
    assert made.arena.state is State.FREE


def refuse(*_):
    raise RuntimeError("can't start new thread")


def test_where_no_thread_can_be_started_either_the_save_fails(bench, monkeypatch):
    """From Python 3.12 on, this also happens at the interpreter's end. No caller may wait for ever."""
    made = bench(max_write_bytes_s=SLOW_BYTES_S)
    save = made.save(1)
    until(lambda: files_of(made.folder, 1))
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
    made = bench(max_write_bytes_s=SLOW_BYTES_S)
    first = made.save(1)
    until(lambda: files_of(made.folder, 1))
    arena, layout = made.writer.share_arena(sealed(LAYOUT, 2)), made.writer.share_layout(LAYOUT)
    started, start, saves = [], made.writer._start, []
    monkeypatch.setattr(made.writer, "_start", lambda: (started.append(1), start()))

    def save_meanwhile():
        order = order_of(made.folder, 2)
        saves.append(
            made.writer.save(order, arena=arena, generation=1, layout=layout, attested_bytes=8 * 10)
        )

    made.writer._lock = Overtaken(made.writer._lock, save_meanwhile)
    kill(made.writer.pid)
    first.result(ENDS_S)
    until(lambda: saves)
    saves[0].result(ENDS_S)
    assert len(started) == 1
    assert made.is_whole(1)
    assert made.is_whole(2)


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


def test_one_that_dies_after_it_gave_up_the_arena_fails_the_save(bench, monkeypatch):
    """The process could not write, freed the arena, and died before its report."""
    monkeypatch.setattr(writer_module, "_STARTS_A_SAVE", 1)
    made = bench(max_write_bytes_s=SLOW_BYTES_S)
    save = made.save(1)
    until(lambda: made.arena.state is State.WRITING)
    kill(made.writer.pid, signal.SIGSTOP)
    made.arena.move(State.FREE, made.arena.generation)
    kill(made.writer.pid)
    with pytest.raises(SaveFailed):
        save.result(ENDS_S)


def test_one_that_dies_after_the_commit_and_before_it_said_so_has_saved(bench, monkeypatch):
    monkeypatch.setattr(writer_module, "_STARTS_A_SAVE", 1)
    made = bench(max_write_bytes_s=SLOW_BYTES_S)
    save = made.save(1)
    until(lambda: made.arena.state is State.WRITING)
    kill(made.writer.pid, signal.SIGSTOP)
    made.arena.move(State.COMMITTED, made.arena.generation)
    kill(made.writer.pid)
    save.result(ENDS_S)


def test_closing_ends_the_process_and_twice_does_no_harm(bench):
    made = bench()
    made.save(1).result(ENDS_S)
    pid = made.writer.pid
    made.writer.close()
    assert not is_there(pid)
    made.writer.close()


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
        closing.join(5)
        has_closed = not closing.is_alive()
        is_over.set()
        closing.join()
    process.wait()
    assert has_closed


def test_what_is_forgotten_is_given_back_at_once(bench):
    made = bench()
    made.save(1).result(ENDS_S)
    arena, layout = made._numbers
    mapped_elsewhere = os.dup(made.arena.fd)
    try:
        made.writer.forget([arena], [layout])
        assert os.fstat(mapped_elsewhere).st_blocks * 512 <= PAGE_BYTES
    finally:
        os.close(mapped_elsewhere)


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
        saying.join(5)
        assert not saying.is_alive()


def test_closing_where_nothing_was_started_does_no_harm(bench):
    bench().writer.close()


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


def test_sharing_an_arena_with_the_process_leaves_its_lock_alone(bench):
    """Closing any descriptor of a file releases all the process's locks on the file (fcntl(2))."""
    made = bench()
    made.save(1).result(ENDS_S)
    with made.arena._alone():
        number = made.writer.share_arena(made.arena)
        child = os.fork()
        if child == 0:
            try:
                fcntl.lockf(made.arena.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os._exit(7)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    del made.writer._arenas[number]  # closed once, under its first number
    assert code == 7


def following(made, files):
    """Request a save with only the first files copied, and wait until these are written."""
    made.arena.move(State.FREE, made.arena.generation)
    generation = half_copied(made.arena, made.layout, 1, files)
    ended = made.again(order_of(made.folder, 1))
    until(lambda: len(list(made.folder.glob(".step-*/*.xxh3"))) == files)
    assert made.arena.state is State.COPYING
    return generation, ended


def copy_the_rest(made, generation):
    size_bytes = made.layout.shards[-1].offset + made.layout.shards[-1].size_bytes
    made.arena.image[:size_bytes] = bytes([1]) * size_bytes
    made.arena.move(State.SEALED, generation)


def test_what_is_copied_is_written_while_the_rest_is_still_being_copied(bench):
    made = bench()
    generation, ended = following(made, files=4)
    copy_the_rest(made, generation)
    ended.result(ENDS_S)
    assert made.is_whole(1)
    assert made.arena.state is State.COMMITTED


def test_one_that_is_killed_while_it_follows_the_copy_is_replaced_by_one_that_does(bench):
    made = bench()
    generation, ended = following(made, files=4)
    first = made.writer.pid
    kill(first)
    until(lambda: made.writer.pid != first)
    copy_the_rest(made, generation)
    ended.result(ENDS_S)
    assert made.is_whole(1)


def test_a_snapshot_that_is_given_up_while_it_is_written_leaves_nothing(bench):
    made = bench()
    generation, ended = following(made, files=4)
    made.arena.move(State.FREE, generation)
    with pytest.raises(SaveFailed, match="given up"):
        ended.result(ENDS_S)
    assert list(made.folder.iterdir()) == []


def test_a_copy_that_never_goes_on_fails_the_save_once_it_took_too_long(bench):
    made = bench(timeout_s=0.2)
    made.arena.move(State.FREE, made.arena.generation)
    half_copied(made.arena, made.layout, 1, files=0)
    ended = made.again(order_of(made.folder, 1))
    with pytest.raises(SaveFailed, match="snapshot was not copied"):
        ended.result(ENDS_S)
    assert made.arena.state is State.FREE
    assert list(made.folder.iterdir()) == []


def test_a_trainer_that_is_killed_while_it_copies_leaves_nothing(bench):
    made = bench()
    made.save(1).result(ENDS_S)
    script = Path(__file__).parent / "ordered_then_killed.py"
    command = [sys.executable, script, made.folder, str(1 << 30), "alone", "6"]
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
    command = [sys.executable, script, made.folder, str(4096 * 10), forks, "10"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        pid, child = map(int, trainer.stdout.readline().split())
        try:
            until(lambda: files_of(made.folder, 2))
            trainer.kill()
            trainer.wait()
            assert not (made.folder / "step-0000000002").exists()
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
