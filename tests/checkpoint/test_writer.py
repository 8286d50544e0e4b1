"""Show that the writing process makes each ordered save durable, and ends when it is closed."""

import fcntl
import os
import signal
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from images import again, hand_made, order_of, sealed
from waiting import ENDS_S
from writer_bench import LAYOUT, copy_the_rest, following, kill

from holdfast.checkpoint.format.rank_layout import PAGE_BYTES, Piece
from holdfast.checkpoint.ipc.messages import send
from holdfast.checkpoint.ipc.shared_buffer import State
from holdfast.checkpoint.writer.client import NotAttestedError
from holdfast.checkpoint.writer.process import Service, pause_s
from holdfast.core.errors import SaveFailed

SLOW_BYTES_S = 4096 * 20
"""A rate of one file of the layout every 50 ms; the last file is not waited for."""


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


def test_what_is_copied_is_written_while_the_rest_is_still_being_copied(bench):
    made = bench()
    generation, ended = following(made, files=4)
    copy_the_rest(made, generation)
    ended.result(ENDS_S)
    assert made.is_whole(1)
    assert made.arena.state is State.COMMITTED


def test_a_snapshot_that_is_given_up_while_it_is_written_leaves_nothing(bench):
    made = bench()
    generation, ended = following(made, files=4)
    made.arena.move(State.FREE, generation)
    with pytest.raises(SaveFailed, match="was discarded"):
        ended.result(ENDS_S)
    assert list(made.folder.iterdir()) == []


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
    made = bench()
    generation, save = following(made, files=1)
    pid = made.writer.pid
    kill(pid, number)
    copy_the_rest(made, generation)
    save.result(ENDS_S)
    assert made.writer.pid == pid


def test_files_of_the_working_directory_are_not_taken_for_modules(bench, tmp_path, monkeypatch):
    made = bench()
    for name in ("queue", "json", "socket"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    made.save(1).result(ENDS_S)
    assert made.is_whole(1)


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


def test_closing_ends_the_process_and_twice_does_no_harm(bench):
    made = bench()
    made.save(1).result(ENDS_S)
    pid = made.writer.pid
    made.writer.close()
    assert not is_there(pid)
    made.writer.close()


def test_closing_where_nothing_was_started_does_no_harm(bench):
    bench().writer.close()
