"""Test the snapshots that a peer node holds: real senders and holders over TCP, and lost nodes."""

import contextlib
import gc
import json
import logging
import os
import secrets
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from images import hand_made, order_of, sealed
from started_ranks import run_program
from waiting import until

from holdfast.checkpoint import Checkpointer
from holdfast.checkpoint.format.checksums import digests_of
from holdfast.checkpoint.format.rank_layout import PAGE_BYTES
from holdfast.checkpoint.ipc import memory_reservation
from holdfast.checkpoint.ipc.durable_snapshot import DurableSnapshot
from holdfast.checkpoint.ipc.shared_buffer import State
from holdfast.checkpoint.memory import peer_holder, peer_protocol
from holdfast.checkpoint.memory.peer_holder import PeerHolder
from holdfast.checkpoint.memory.peer_protocol import Refused, await_answer, digest_of_notes, head
from holdfast.checkpoint.memory.peer_sender import Peer, Sender, send_snapshot
from holdfast.checkpoint.memory.server import MIN_FREE_BYTES
from holdfast.core.channel import greeting, receive_exactly
from holdfast.core.errors import BadUse

HERE = Path(__file__).parent
TOKEN = secrets.token_bytes(32)
SIZES = (100, 5 << 20)


@pytest.mark.parametrize("which", ["quick", pytest.param("slow", marks=pytest.mark.slow)])
def test_what_peers_hold_for_nodes_that_are_lost(tmp_path, which):
    ended = run_program(HERE / "peer_scenarios.py", tmp_path, which)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    failed = "\n".join(f"{name}: {error}" for name, error in found.items() if error)
    assert not failed, failed + ended.stderr
    assert found


def test_it_needs_a_time_for_which_memory_is_kept(tmp_path):
    with pytest.raises(BadUse, match="peer_memory needs keep_in_memory_s, which is None"):
        Checkpointer(tmp_path, peer_memory=True, keep_in_memory_s=None)


def durable(folder, step, *, rank=0, sizes=SIZES, save=None):
    """Return a snapshot full of the byte `step`."""
    layout = hand_made(rank=rank, world_size=2, sizes=sizes)
    arena = sealed(layout, step)
    for state in (State.WRITING, State.COMMITTED):
        arena.move(state, 1)
    blocks = {
        shard.name: digests_of(arena.image[shard.offset : shard.offset + shard.size_bytes])
        for shard in layout.shards
    }
    return DurableSnapshot(
        order=order_of(folder, step, save=save),
        layout=layout,
        arena=arena,
        generation=1,
        blocks=blocks,
    )


class Holding:
    """A holder of ranks 0 and 5, and a peer that can reach the holder."""

    def __init__(self, **options):
        listener = socket.create_server(("127.0.0.1", 0))
        self.peer = Peer(rank=1, host="127.0.0.1", port=listener.getsockname()[1], token=TOKEN)
        self.holder = PeerHolder(listener, TOKEN, [0, 5], **options)

    def send(self, snapshot):
        send_snapshot(self.peer, snapshot, snapshot.arena.image)

    def send_or_none(self, snapshot):
        try:
            self.send(snapshot)
        except Refused:
            return False
        return True

    def steps(self):
        return [image.info.step for image in self.holder.images()]

    def announce(self, token=TOKEN, **changed):
        """Connect to the holder and announce a snapshot; return the connection."""
        notes = b"notes"
        announced = {
            "rank": 0,
            "world_size": 2,
            "step": 9,
            "save": "s",
            "image_bytes": 4096,
            "notes_bytes": len(notes),
        }
        line = socket.create_connection((self.peer.host, self.peer.port), timeout=30)
        line.sendall(head(token, {**announced, "notes": digest_of_notes(notes), **changed}))
        return line


def test_the_newest_of_each_rank_is_held_as_it_was(tmp_path):
    holding = Holding()
    for step in (1, 2):
        snapshot = durable(tmp_path, step)
        holding.send(snapshot)
    holding.send(durable(tmp_path, 1, rank=5))
    assert holding.steps() == [2, 1]
    image = holding.holder.images()[0]
    assert (
        os.pread(image.fd, image.info.image_bytes, PAGE_BYTES)
        == bytes(snapshot.arena.image)[: 4096 + SIZES[1]]
    )
    assert os.pread(image.notes, image.info.notes_bytes, 0) == snapshot.pack_notes()
    holding.holder.give_back()
    assert holding.steps() == []
    assert os.fstat(image.fd)  # as long as it is in use


def test_who_has_not_the_token_is_told_nothing(tmp_path):
    holding = Holding()
    for first in (bytes(100), head(secrets.token_bytes(32), {}), b"GET / HTTP/1.1\r\n\r\n" * 5):
        with socket.create_connection((holding.peer.host, holding.peer.port), timeout=30) as line:
            line.sendall(first)
            with contextlib.suppress(ConnectionResetError):  # the holder has not read all
                assert line.recv(1) == b""
    holding.peer = replace(holding.peer, token=bytes(32))
    with pytest.raises(ConnectionError):
        holding.send(durable(tmp_path, 1))
    assert holding.steps() == []


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"image_bytes": 1 << 50}, "it needs 1,125,899,"),
        ({"notes_bytes": 1 << 50}, "it needs 1,125,899,"),
        ({"image_bytes": -1}, "its announcement is not valid"),
        ({"image_bytes": "9"}, "its announcement is not valid"),
        ({"save": 3}, "its announcement is not valid"),
        ({"rank": 7}, "this is not the peer of rank 7"),
        ({"rank": None}, "its announcement is not valid"),
    ],
)
def test_what_is_too_large_or_no_announcement_is_refused(changed, why):
    holding = Holding()
    with holding.announce(**changed) as line, pytest.raises(Refused, match=why):
        await_answer(line)


def test_a_long_announcement_is_not_read():
    holding = Holding()
    with socket.create_connection((holding.peer.host, holding.peer.port), timeout=30) as line:
        line.sendall(greeting(peer_protocol.MAGIC, TOKEN) + (1 << 31).to_bytes(4, "little"))
        with pytest.raises(Refused, match="A frame of 2147483648 bytes was announced"):
            await_answer(line)


def test_notes_that_are_none_are_refused():
    holding = Holding()
    with holding.announce() as line:
        await_answer(line)
        line.sendall(b"NOTES")
        with pytest.raises(Refused, match="the notes differ"):
            await_answer(line)
    with holding.announce() as line:
        await_answer(line)
        line.sendall(b"notes")
        with pytest.raises(Refused, match="its data cannot be decoded"):
            await_answer(line)


def test_notes_of_something_else_are_refused(tmp_path):
    holding = Holding()
    notes = durable(tmp_path, 1).pack_notes()
    with holding.announce(notes_bytes=len(notes), notes=digest_of_notes(notes)) as line:
        await_answer(line)
        line.sendall(notes)
        with pytest.raises(Refused, match="do not match the announcement"):
            await_answer(line)


def test_a_flipped_bit_on_the_way_is_refused_and_the_one_before_stays(tmp_path):
    holding = Holding()
    holding.send(durable(tmp_path, 1))
    snapshot = durable(tmp_path, 2)
    snapshot.arena.image[4096 + SIZES[1] - 1] ^= 16
    with pytest.raises(
        Refused, match=r"__0_1\.distcp does not match its digests, in bytes 4,194,304 to 5,242,880"
    ):
        holding.send(snapshot)
    assert holding.steps() == [1]


def test_a_sender_that_dies_midway_leaves_the_one_before(tmp_path):
    holding = Holding()
    holding.send(durable(tmp_path, 1))
    snapshot = durable(tmp_path, 2)
    notes = snapshot.pack_notes()
    size_bytes = 4096 + SIZES[1]
    told = {"notes_bytes": len(notes), "notes": digest_of_notes(notes), "image_bytes": size_bytes}
    with holding.announce(**told) as line:
        await_answer(line)
        line.sendall(notes)
        line.sendall(
            bytes(snapshot.arena.image[:100]) + bytes(snapshot.arena.image[4096 : 2 << 20])
        )
    until(lambda: holding.holder._coming_bytes == 0)
    assert holding.steps() == [1]
    holding.send(snapshot)
    assert holding.steps() == [2]


def test_the_memory_that_it_may_take_is_kept_to(tmp_path):
    needed = 2 * PAGE_BYTES + SIZES[1] + len(durable(tmp_path, 1).pack_notes())
    own_bytes = 1000
    for count, steps in ((0, []), (1, [2]), (2, [2])):
        holding = Holding(max_bytes=count * needed + own_bytes, own_bytes=lambda: own_bytes)
        for step in (1, 2):
            if count:
                holding.send(durable(tmp_path, step))
            else:
                with pytest.raises(
                    Refused,
                    match=rf"it needs {needed:,} bytes of memory, and 0 are left for it there",
                ):
                    holding.send(durable(tmp_path, step))
        assert holding.steps() == steps
        if count:  # with room for two, the former one stays until the next is whole
            snapshot = durable(tmp_path, 3)
            snapshot.arena.image[0] ^= 1
            with pytest.raises(Refused):
                holding.send(snapshot)
            assert holding.steps() == ([2] if count == 2 else [])


def test_a_node_that_is_short_of_memory_gets_it_back(tmp_path):
    free = [2 * MIN_FREE_BYTES]
    holding = Holding(free_bytes=lambda: free[0])
    holding.send(durable(tmp_path, 1))
    free[0] = MIN_FREE_BYTES - 1
    until(lambda: holding.steps() == [])
    with pytest.raises(Refused, match="0 are left"):
        holding.send(durable(tmp_path, 2))


def test_many_strangers_do_not_take_all_threads():
    holding = Holding()
    before = threading.active_count()
    lines = [socket.create_connection((holding.peer.host, holding.peer.port)) for _ in range(40)]
    for line in lines[10:]:
        line.settimeout(30)
        assert line.recv(1) == b""
    assert threading.active_count() <= before + 6
    for line in lines:
        line.close()


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_peer_that_cannot_be_reached_is_told_once_and_tried_again(tmp_path, caplog):
    holding = Holding()
    sent = []
    dead = socket.create_server(("127.0.0.1", 0))
    port = dead.getsockname()[1]
    dead.close()
    sender = Sender(replace(holding.peer, port=port), sent=sent.append)
    caplog.set_level(logging.DEBUG, "holdfast")
    for step in (1, 2):
        sender.offer(durable(tmp_path, step))
        until(lambda step=step: len(caplog.records) == step)
    assert len(warnings(caplog)) == 1
    assert warnings(caplog)[0].startswith(
        "Step 1 of rank 0 is not in a peer node's memory: rank 1 cannot be reached"
    )
    sender._peer = holding.peer
    sender.offer(durable(tmp_path, 3))
    until(lambda: sent == [3])
    assert holding.steps() == [3]


def test_a_peer_that_says_nothing_holds_nobody_up(tmp_path, caplog, monkeypatch):
    """The peer is stopped, or the network is cut after the connection."""
    monkeypatch.setattr(peer_protocol, "ANSWER_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        sender = Sender(Peer(rank=1, host="127.0.0.1", port=silent.getsockname()[1], token=TOKEN))
        for step in (1, 2, 3):
            sender.offer(durable(tmp_path, step))  # returns at once
        until(lambda: warnings(caplog))
    assert "rank 1 cannot be reached (timed out)" in warnings(caplog)[0]


def test_a_peer_that_dies_in_the_middle_is_told(tmp_path, caplog):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = Sender(Peer(rank=1, host="127.0.0.1", port=listener.getsockname()[1], token=TOKEN))
        sender.offer(durable(tmp_path, 1, sizes=(20 << 20,)))
        line = listener.accept()[0]
        receive_exactly(line, 44, within_s=30)
        peer_protocol.answer(line)
        line.close()
        until(lambda: warnings(caplog))
    assert "rank 1 cannot be reached" in warnings(caplog)[0]


def test_a_snapshot_whose_memory_is_needed_again_is_left_out(tmp_path, caplog):
    holding = Holding()
    snapshot = durable(tmp_path, 1)
    snapshot.arena.begin(2)
    sender = Sender(holding.peer)
    sender.offer(snapshot)
    until(lambda: warnings(caplog))
    assert "its memory was needed for a newer one" in warnings(caplog)[0]
    assert holding.steps() == []


def test_what_was_replaced_is_given_back_to_the_node(tmp_path):
    holding = Holding()

    def in_memory():
        gc.collect()
        found = set()
        for fd in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # another test's, which is just closed
                if "memfd:holdfast-peer" in str(fd.readlink()):
                    found.add(fd.stat().st_ino)
        return found

    before = in_memory()  # of earlier tests, some of which are yet to be closed
    for step in range(1, 5):
        holding.send(durable(tmp_path, step))
    until(lambda: len(in_memory() - before) == 1)


def test_holders_that_are_asked_at_once_do_not_take_more_than_there_is(tmp_path, monkeypatch):
    """A node has one holder for each rank, in separate processes."""
    image_bytes, taken = 2 * PAGE_BYTES + SIZES[1], []
    real = os.posix_fallocate
    snapshots = [durable(tmp_path, 1) for _ in range(4)]

    def fallocate(fd, offset, size_bytes):
        time.sleep(0.2)
        real(fd, offset, size_bytes)
        taken.append(size_bytes)

    monkeypatch.setattr(memory_reservation, "_SHARED", tmp_path)
    monkeypatch.setattr(
        memory_reservation,
        "available_memory_bytes",
        lambda: MIN_FREE_BYTES + 2 * image_bytes + 100 - sum(taken),
    )
    monkeypatch.setattr(peer_holder.os, "posix_fallocate", fallocate)
    holdings = [Holding(free_bytes=lambda: 1 << 40) for _ in snapshots]
    with ThreadPoolExecutor(4) as senders:
        sent = list(
            senders.map(
                lambda each: each[0].send_or_none(each[1]), zip(holdings, snapshots, strict=True)
            )
        )
    assert sum(sent) == 2
    assert len(taken) == 2
