"""Test restores from the arena of a rank that died, with real deaths."""

import json
import os
import socket
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from images import hand_made, order_of, sealed
from started_ranks import run_program
from waiting import until

from holdfast.checkpoint.format.checksums import checksum_of_digests, digests_of
from holdfast.checkpoint.format.manifest import FileEntry, ManifestError
from holdfast.checkpoint.format.verified_files import ByteRange
from holdfast.checkpoint.ipc.durable_snapshot import DurableSnapshot
from holdfast.checkpoint.ipc.shared_buffer import State
from holdfast.checkpoint.memory import client as kept
from holdfast.checkpoint.memory import server as keeping
from holdfast.checkpoint.memory.server import MIN_FREE_BYTES, SnapshotServer
from holdfast.testing import FakeClock

HERE = Path(__file__).parent
ENDS_S = 240.0


def test_what_ranks_that_died_leave_in_memory(tmp_path):
    ended = run_program(HERE / "memory_scenarios.py", tmp_path)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    failed = "\n".join(f"{name}: {error}" for name, error in found.items() if error)
    assert not failed, failed + ended.stderr
    assert len(found) > 15


@pytest.mark.slow
def test_a_script_that_ends_with_a_traceback_leaves_it_too(tmp_path):
    script = (
        "import sys, torch, holdfast\n"
        "ckpt = holdfast.Checkpointer(sys.argv[1])\n"
        "ckpt.save(1, {'a': 1}).result()\n"
        "raise ValueError('of the script')\n"
    )
    ended = run_program(script, tmp_path)
    assert "of the script" in ended.stderr
    found = kept.ask(tmp_path, 0)
    assert (found.step, found.layout.world_size) == (1, 1)
    found.close()
    kept.end(tmp_path, 0)
    assert kept.ask(tmp_path, 0) is None


def test_where_the_memory_is_too_short_for_two_arenas_there_is_one(monkeypatch):
    import torch

    from holdfast.checkpoint.format.file_image import Need, lay_out
    from holdfast.checkpoint.snapshot.buffer_pool import BufferPool
    from holdfast.checkpoint.writer.client import Writer

    image = lay_out([Need(dtype=torch.float32, shape=(1000,))], prefix="__0_", shard_bytes=1 << 20)
    plan = SimpleNamespace(image=image, pieces=(0,), on_devices=())
    gib = 1 << 30  # all but the first leave this free
    free_bytes = 0
    # As often as the pool looks: while processes of other tests take memory, the pool looks again.
    monkeypatch.setattr(
        "holdfast.checkpoint.ipc.memory_reservation.available_memory_bytes", lambda: free_bytes
    )
    for first_bytes, second_bytes, count in ((2 * gib, 2 * gib, 2), (2 * gib, gib, 1), (gib, 0, 1)):
        free_bytes = first_bytes
        writer = Writer(timeout_s=60, max_write_bytes_s=None)
        seats = BufferPool(writer, spares_newest=True)
        first = seats.take(plan)
        free_bytes = second_bytes
        seats.prepare(plan)
        assert seats.has_free() == (count == 2)
        seats.free(first)
        assert (seats.take(plan) is first) == (count == 1)
        seats.forget()
        writer.close()


def test_a_node_that_was_short_of_memory_for_a_moment_has_two_arenas_again_at_a_later_save(
    monkeypatch, caplog
):
    import torch

    from holdfast.checkpoint.format.file_image import Need, lay_out
    from holdfast.checkpoint.ipc import memory_reservation
    from holdfast.checkpoint.snapshot import buffer_pool
    from holdfast.checkpoint.writer.client import Writer

    image = lay_out([Need(dtype=torch.float32, shape=(1000,))], prefix="__0_", shard_bytes=1 << 20)
    plan = SimpleNamespace(image=image, pieces=(0,), on_devices=())
    free_bytes = 2 << 30
    for module in (memory_reservation, buffer_pool):
        monkeypatch.setattr(module, "available_memory_bytes", lambda: free_bytes, raising=False)
    writer = Writer(timeout_s=60, max_write_bytes_s=None)
    seats = buffer_pool.BufferPool(writer, spares_newest=True)
    first = seats.take(plan)
    free_bytes = 1 << 30
    for _ in range(2):
        seats.prepare(plan)
        assert not seats.has_free()
        seats.free(first)
        assert seats.take(plan) is first
    assert caplog.text.count("There is no memory for a second snapshot") == 1
    free_bytes = 2 << 30
    seats.free(first)
    assert seats.take(plan) is first
    assert not seats.has_free(), (
        "who takes one then would wait, should there be too little after all"
    )
    seats.prepare(plan)
    assert seats.has_free()
    assert seats.take(plan) is not first
    seats.forget()
    writer.close()


def test_one_that_a_save_lacked_is_made_later_though_no_newest_one_is_spared(monkeypatch):
    import torch

    from holdfast.checkpoint.format.file_image import Need, lay_out
    from holdfast.checkpoint.ipc import memory_reservation
    from holdfast.checkpoint.snapshot import buffer_pool
    from holdfast.checkpoint.writer.client import Writer

    image = lay_out([Need(dtype=torch.float32, shape=(1000,))], prefix="__0_", shard_bytes=1 << 20)
    plan = SimpleNamespace(image=image, pieces=(0,), on_devices=())
    free_bytes = 1 << 30
    for module in (memory_reservation, buffer_pool):
        monkeypatch.setattr(module, "available_memory_bytes", lambda: free_bytes, raising=False)
    writer = Writer(timeout_s=60, max_write_bytes_s=None)
    seats, taken = buffer_pool.BufferPool(writer), []
    first = seats.take(plan)
    seats.prepare(plan)
    taking = threading.Thread(target=lambda: taken.append(seats.take(plan)))
    taking.start()
    until(lambda: not seats.has_free())
    seats.free(first)
    taking.join(ENDS_S)
    assert taken == [first]
    seats.prepare(plan)
    assert not seats.has_free()
    free_bytes = 2 << 30
    seats.prepare(plan)
    assert seats.has_free()
    assert seats.take(plan) is not first
    seats.forget()
    writer.close()


class Keeping:
    """A keeper of a hand-made snapshot, in a thread."""

    def __init__(self, folder, *, begins=True, **options):
        layout = hand_made()
        self.arena = sealed(layout, 3)
        for state in (State.WRITING, State.COMMITTED):
            self.arena.move(state, 1)
        image = self.arena.image
        blocks = {
            shard.name: digests_of(image[shard.offset : shard.offset + shard.size_bytes])
            for shard in layout.shards
        }
        order = order_of(folder, 3)
        self.keeper = SnapshotServer(**{"keep_s": 100.0, **options})
        self.keeper.ordered(order, 0)
        self.keeper.committed(
            DurableSnapshot(
                order=order, layout=layout, arena=self.arena, generation=1, blocks=blocks
            )
        )
        self._thread = threading.Thread(target=self.keeper.keep)
        if begins:
            self.begin()

    def begin(self):
        self._thread.start()

    def ends(self):
        self._thread.join(ENDS_S)
        return not self._thread.is_alive()


def test_it_is_given_to_whoever_asks_until_the_time_is_over(tmp_path):
    clock = FakeClock()
    keeping = Keeping(tmp_path, now_s=clock.monotonic_s)
    for _ in range(2):
        found = kept.ask(tmp_path, 0)
        assert (found.step, found.save, found.layout) == (3, "save-3", hand_made())
        assert os.pread(found.fd, 4, 4096) == b"\3\3\3\3"
        found.close()
    assert kept.ask(tmp_path, 1) is None
    assert kept.ask(tmp_path / "another", 0) is None
    clock.advance(101.0)
    assert keeping.ends()
    assert kept.ask(tmp_path, 0) is None


def test_while_a_last_save_waits_for_a_lost_rank_the_one_before_is_given(tmp_path, monkeypatch):
    """The trainer is dead, but the last save has not ended: `keep` has not begun."""
    monkeypatch.setattr(keeping, "LAST_SAVE_S", 0.0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        waiting = Keeping(tmp_path, begins=False, trainer=ours.fileno())
        assert kept.ask(tmp_path, 0) is None  # the trainer lives
        theirs.close()
        until(lambda: kept.ask_all(tmp_path, 2))
        ((keeper, told),) = kept.ask_all(tmp_path, 2)
        assert (keeper, told.rank, told.step) == (0, 0, 3)
        kept.ask(tmp_path, 0).close()
        kept.end(tmp_path, 0)
        assert not waiting.keeper.has_any
        waiting.begin()
        assert waiting.ends()


def test_it_ends_when_it_is_told_to_when_its_supervisor_ends_and_when_memory_is_short(tmp_path):
    keeping = Keeping(tmp_path)
    kept.end(tmp_path, 0)
    assert keeping.ends()
    reader, writer = os.pipe()
    keeping = Keeping(tmp_path, ends_with=[reader])
    os.close(writer)
    assert keeping.ends()
    os.close(reader)
    assert Keeping(tmp_path, free_bytes=lambda: MIN_FREE_BYTES - 1).ends()
    assert kept.ask(tmp_path, 0) is None


def test_an_arena_that_is_in_use_again_is_not_kept(tmp_path):
    keeping = Keeping(tmp_path)
    kept.end(tmp_path, 0)
    assert keeping.ends()
    again = Keeping(tmp_path, keep_s=0.0)
    assert again.ends()
    again.arena.begin(4)
    assert again.keeper.newest is None


def test_a_nonsensical_request_is_not_answered(tmp_path):
    keeping = Keeping(tmp_path)
    with kept._request(tmp_path, 0, {"want": "more"}) as line:
        assert kept.receive(line) is None
    with kept._request(tmp_path, 0, {"want": "snapshot", "rank": 0}):
        pass  # and disconnects before the answer
    found = kept.ask(tmp_path, 0)
    found.close()
    kept.end(tmp_path, 0)
    assert keeping.ends()


def test_digests_that_are_not_those_of_the_manifest_are_refused(tmp_path):
    keeping = Keeping(tmp_path)
    found = kept.ask(tmp_path, 0)
    shard = found.layout.shards[0]
    right = FileEntry(
        path=shard.name,
        size_bytes=shard.size_bytes,
        checksum=checksum_of_digests(found.digests[:8]),
    )
    target = bytearray(shard.size_bytes)
    kept.KeptFiles(tmp_path, [right], [found]).read(shard.name, [ByteRange(0, memoryview(target))])
    assert target == b"\3" * shard.size_bytes
    wrong = replace(found, digests=bytes(8) + found.digests[8:])
    with pytest.raises(ManifestError, match=r"the digests of __0_0\.distcp in memory do not match"):
        kept.KeptFiles(tmp_path, [right], [wrong]).read(
            shard.name, [ByteRange(0, memoryview(target))]
        )
    found.close()
    kept.end(tmp_path, 0)
    assert keeping.ends()
