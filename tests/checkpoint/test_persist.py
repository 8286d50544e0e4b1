"""Test one rank's files, and the files after a crash at any instant of a save."""

import errno
import os
from pathlib import Path

import pytest
import torch
from images import Enough, Part, again, hand_made, is_whole, order_of, part_of, sealed
from waiting import contents

from holdfast.checkpoint import Checkpointer, scan, verify
from holdfast.checkpoint.catalog.staging_dir import remove_leftovers
from holdfast.checkpoint.distributed.collectives import Ranks
from holdfast.checkpoint.format.checksums import BLOCK_BYTES, digests_of, read_sidecar
from holdfast.checkpoint.format.manifest import read_manifest
from holdfast.checkpoint.format.paths import failure_path, staging_path
from holdfast.checkpoint.ipc.shared_buffer import Arena
from holdfast.checkpoint.snapshot.copy import ChangeTracker, copy_into, live_digests, sources
from holdfast.checkpoint.snapshot.plan import make_plan
from holdfast.checkpoint.state.capture import collect
from holdfast.checkpoint.writer import persist
from holdfast.checkpoint.writer.commit import RankFailed
from holdfast.checkpoint.writer.persist import (
    NotAttested,
    abandon,
    delete_superfluous,
    discard_abandoned,
)


@pytest.fixture
def arenas():
    """Yield a function that seals layouts; close their arenas afterwards."""
    made = []

    def seal(layout, fill):
        made.append(sealed(layout, fill))
        return part_of(layout, made[-1])

    yield seal
    for arena in made:
        arena.close()


def of_state(value):
    """Return the part of a state that `restore` can read."""
    contents = collect(
        0, {"a": value, "t": torch.full((300,), float(value)), "u": torch.arange(5)}, None
    )
    plan = make_plan(Ranks(), contents, shard_bytes=1 << 30)
    arena = Arena.make(plan.image.size_bytes)
    plan.image.write_frames(arena.image)
    leaves = contents.leaves(plan.structure)
    found = sources(plan, leaves, ChangeTracker(contents.tensors, {}))
    copy_into(
        plan, arena.image, plan.image.views(torch.frombuffer(arena.image, dtype=torch.uint8)), found
    )
    return Part(plan.layout, arena.image, live_digests(plan, found))


@pytest.fixture(scope="module")
def states():
    return {value: of_state(value) for value in (10, 20, 21, 30, 40)}


def names_in(folder):
    return sorted(path.name for path in contents(folder))


def test_once_it_returns_the_checkpoint_is_whole_and_nothing_else_is_there(tmp_path, arenas):
    layout = hand_made(sizes=(1, 5000, 3 * BLOCK_BYTES + 64))
    part, told = arenas(layout, 7), []
    part.persist(order_of(tmp_path, 7), progress=told.append)
    assert names_in(tmp_path) == ["step-0000000007"]
    assert is_whole(tmp_path, 7, 7, [layout])
    assert sum(told) == layout.size_bytes
    folder = tmp_path / "step-0000000007"
    data = [shard.name for shard in layout.shards]
    assert names_in(folder) == sorted(
        [".metadata", "holdfast.json", *data, *(f"{name}.xxh3" for name in data)]
    )
    manifest = read_manifest(folder, step=7)
    assert (manifest.save, manifest.world_size, manifest.torch, manifest.created_at_s) == (
        "save-7",
        1,
        "2.13.0",
        1.0,
    )
    assert sorted(entry.path for entry in manifest.files) == sorted([".metadata", *data])
    assert (folder / ".metadata").read_bytes() == b"metadata"
    for entry in manifest.files:
        if entry.path != ".metadata":
            assert read_sidecar(folder / entry.path, entry.checksum) == digests_of(
                memoryview((folder / entry.path).read_bytes())
            )


def test_a_save_of_its_step_again_takes_the_place_of_the_first(tmp_path, arenas):
    layout = hand_made()
    first = order_of(tmp_path, 1)
    arenas(layout, 1).persist(first)
    arenas(layout, 2).persist(again(first))
    assert names_in(tmp_path) == ["step-0000000001"]
    assert is_whole(tmp_path, 1, 2, [layout])


def test_a_save_that_was_committed_already_is_not_written_again(tmp_path, arenas):
    layout = hand_made()
    arenas(layout, 1).persist(order_of(tmp_path, 1))
    # The present content of the same save is not read.
    arenas(layout, 2).persist(order_of(tmp_path, 1), progress=lambda _: pytest.fail("written"))
    assert is_whole(tmp_path, 1, 1, [layout])


def test_a_save_that_was_committed_already_is_made_durable_before_it_is_said_to_be(
    tmp_path, arenas, monkeypatch
):
    """The process that renamed the save may have died before the rename was durable."""
    layout, synced, fsync = hand_made(), [], os.fsync
    arenas(layout, 1).persist(order_of(tmp_path, 1))
    monkeypatch.setattr(
        os, "fsync", lambda fd: (synced.append(Path(f"/proc/self/fd/{fd}").readlink()), fsync(fd))
    )
    arenas(layout, 1).persist(order_of(tmp_path, 1))
    assert synced == [tmp_path]


@pytest.mark.parametrize("wrong", [[0], [2], [0, 1, 2]])
def test_what_is_not_what_was_live_is_not_committed_and_its_pieces_are_named(
    tmp_path, arenas, wrong
):
    part = arenas(hand_made(sizes=(100, 5000, 64)), 1)
    live = bytearray(part.live)
    for piece in wrong:
        live[8 * piece + 3] ^= 1
    with pytest.raises(NotAttested) as raised:
        part.persist(order_of(tmp_path, 1), live=bytes(live))
    assert raised.value.pieces == wrong
    assert names_in(tmp_path) == []


def test_a_bit_that_flips_in_the_image_is_found(tmp_path, arenas):
    part = arenas(hand_made(), 1)
    part.memory[4096 + 4000] ^= 32
    with pytest.raises(NotAttested) as raised:
        part.persist(order_of(tmp_path, 1))
    assert raised.value.pieces == [1]
    assert names_in(tmp_path) == []


def test_digests_of_fewer_pieces_than_there_are_attest_nothing(tmp_path, arenas):
    part = arenas(hand_made(), 1)
    with pytest.raises(NotAttested) as raised:
        part.persist(order_of(tmp_path, 1), live=part.live[:8])
    assert raised.value.pieces == [1]


def test_old_ones_go_once_the_new_one_is_durable(tmp_path, arenas):
    layout = hand_made()
    for step in (1, 2, 3):
        arenas(layout, step).persist(order_of(tmp_path, step, keep=2))
    assert names_in(tmp_path) == ["step-0000000002", "step-0000000003"]


def test_those_known_to_be_damaged_stay_and_do_not_count(tmp_path, arenas):
    layout = hand_made()
    for step in (1, 2):
        arenas(layout, step).persist(order_of(tmp_path, step))
    damaged = [tmp_path / "step-0000000002"]
    arenas(layout, 3).persist(order_of(tmp_path, 3, keep=2, damaged=damaged))
    assert names_in(tmp_path) == ["step-0000000001", "step-0000000002", "step-0000000003"]


def test_a_failed_save_costs_no_earlier_one_and_leaves_nothing(tmp_path, arenas):
    layout = hand_made()
    arenas(layout, 1).persist(order_of(tmp_path, 1, keep=1))
    part = arenas(layout, 2)
    with pytest.raises(NotAttested):
        part.persist(order_of(tmp_path, 2, keep=1), live=bytes(len(part.live)))
    assert names_in(tmp_path) == ["step-0000000001"]
    assert is_whole(tmp_path, 1, 1, [layout])


def test_what_a_process_that_was_killed_has_left_of_the_same_save_is_written_over(tmp_path, arenas):
    layout = hand_made()
    staging = staging_path(tmp_path, 1, "save-1")
    staging.mkdir()
    (staging / layout.shards[0].name).write_bytes(
        b"half of what was there, or more than there will be" * 5
    )
    (staging / ".metadata").write_bytes(b"another")
    arenas(layout, 1).persist(order_of(tmp_path, 1))
    assert is_whole(tmp_path, 1, 1, [layout])


def test_rank_0_hears_of_a_rank_that_gives_up_before_there_is_a_folder(tmp_path, arenas):
    order = order_of(tmp_path, 1)
    abandon(order, hand_made(rank=1, world_size=2), "no process could be started")
    with pytest.raises(RankFailed, match="rank 1: no process could be started"):
        arenas(hand_made(world_size=2), 1).persist(order)
    abandon(order, hand_made(rank=1, world_size=2), "too late")
    assert names_in(tmp_path) == [failure_path(tmp_path, 1, order.save).name]


def test_a_rank_that_gives_up_what_is_committed_leaves_nothing(tmp_path, arenas):
    order = order_of(tmp_path, 1)
    arenas(hand_made(), 1).persist(order)
    abandon(order, hand_made(rank=1, world_size=2), "it died")
    assert names_in(tmp_path) == ["step-0000000001"]


@pytest.mark.parametrize("rank", [0, 1])
def test_giving_up_where_storage_fails_raises_nothing(tmp_path, rank):
    order, layout = order_of(tmp_path, 1, save="x" * 300), hand_made(rank=rank, world_size=2)
    with pytest.raises(OSError, match="too long"):
        order.staging.stat()
    abandon(order, layout, "it died")
    discard_abandoned(order, layout)


def test_of_each_file_of_old_ones_that_goes_it_is_told(tmp_path, arenas):
    """Many deletions may take longer than the limit for a save without progress."""
    layout, told = hand_made(), []
    for step in (1, 2, 3):
        arenas(layout, step).persist(order_of(tmp_path, step))
    files = [path for step in (1, 2) for path in (tmp_path / f"step-{step:010d}").iterdir()]
    delete_superfluous(order_of(tmp_path, 3, keep=1), told.append)
    assert names_in(tmp_path) == ["step-0000000003"]
    assert told == [1] * (len(files) + 2)  # and the lock file of each one's marks


class Crash(BaseException):
    """End a save as a kill would, without any cleanup."""


def crashes_at(monkeypatch, number, work):
    """Run `work` up to its `number`th change of a name, from 1; return True if it was ended there."""
    calls = 0

    def crashing(function):
        def call(*arguments, **named):
            nonlocal calls
            calls += 1
            if calls >= number:
                raise Crash
            return function(*arguments, **named)

        return call

    with monkeypatch.context() as patch:
        for module, name in [
            (Path, "rename"),
            (Path, "mkdir"),
            (Path, "replace"),
            (Path, "unlink"),
            (os, "fsync"),
            (os, "unlink"),
            (os, "rmdir"),
        ]:
            patch.setattr(module, name, crashing(getattr(module, name)))
        try:
            work()
        except Crash:
            return True
    assert calls < number
    return False


CALLS = 63
"""More calls than the two saves of the next test make; the test checks this."""


@pytest.mark.parametrize("crash_at", range(1, CALLS))
def test_a_crash_before_any_change_of_a_name_leaves_a_whole_checkpoint(
    tmp_path, monkeypatch, states, crash_at
):
    """Crash at every rename, fsync, mkdir and removal, of a replacing save and of a deleting one."""
    states[10].persist(order_of(tmp_path, 1, keep=2))
    states[20].persist(order_of(tmp_path, 2, keep=2))

    def save():
        states[21].persist(order_of(tmp_path, 2, save="again", keep=2))
        states[30].persist(order_of(tmp_path, 3, keep=2))

    crashed = crashes_at(monkeypatch, crash_at, save)
    assert crashed or crash_at > 1
    state = {"a": 0, "t": torch.zeros(300), "u": torch.zeros(5, dtype=torch.int64)}
    step = Checkpointer(tmp_path).restore(state)
    assert (step, state["a"]) in ([(2, 20), (2, 21), (3, 30)] if crashed else [(3, 30)])
    assert state["t"].eq(state["a"]).all()
    assert torch.equal(state["u"], torch.arange(5))
    found = scan(tmp_path)
    assert all(verify(info).state == "verified" for info in found)
    # The former checkpoint still exists, under some name, or the next one does.
    assert len({info.step for info in found}) >= 2

    # The next process deletes the leftovers and saves.
    remove_leftovers(tmp_path)
    states[40].persist(order_of(tmp_path, 4, save="next", keep=2))
    state = {"a": 0}
    assert Checkpointer(tmp_path).restore(state) == 4
    assert state == {"a": 40}
    names = names_in(tmp_path)
    assert len(names) == 2, names
    # A checkpoint that waits to be replaced is the only one of its step.
    assert all(name.startswith("step-") for name in names), names


def test_the_crashes_above_are_at_every_call_and_one_after_the_last(tmp_path, monkeypatch, states):
    states[10].persist(order_of(tmp_path, 1, keep=2))
    states[20].persist(order_of(tmp_path, 2, keep=2))

    def save():
        states[21].persist(order_of(tmp_path, 2, save="again", keep=2))
        states[30].persist(order_of(tmp_path, 3, keep=2))

    assert not crashes_at(monkeypatch, CALLS - 1, save)


def test_the_same_save_taken_up_again_after_any_crash_is_committed(tmp_path, monkeypatch, states):
    """Each replacement of a dead writing process dies at a later call."""
    states[10].persist(order_of(tmp_path, 1))
    crash_at = 1
    order = order_of(tmp_path, 2)
    while crashes_at(monkeypatch, crash_at, lambda: states[20].persist(order)):
        assert Checkpointer(tmp_path).restore({"a": 0}) in (1, 2)
        crash_at += 1
        assert crash_at < CALLS
    assert crash_at > 5, "each goes on where the one before it died"
    state = {"a": 0}
    assert Checkpointer(tmp_path).restore(state) == 2
    assert state == {"a": 20}
    remove_leftovers(tmp_path)
    assert names_in(tmp_path) == ["step-0000000001", "step-0000000002"]


def test_each_file_that_is_deleted_is_told_and_links_are_not_followed(tmp_path):
    """A process without any report for long counts as hanging."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    left = tmp_path / "checkpoints/.step-0000000001.dead-1.tmp"
    (left / "inner").mkdir(parents=True)
    for number in range(5):
        (left / f"{number}.distcp").touch()
    (left / "link").symlink_to(outside)
    told = []
    persist.delete_leftovers(order_of(left.parent, 1), told.append)
    assert told == [1] * 6
    assert names_in(left.parent) == []
    assert (outside / "file").exists()


def test_what_dead_processes_left_and_cannot_be_listed_is_told_of(tmp_path, monkeypatch, caplog):
    def fails(*_args, **_options):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(persist, "remove_leftovers", fails)
    persist.delete_leftovers(order_of(tmp_path, 1))
    assert "were not deleted: [Errno 116] Stale file handle" in caplog.text


def test_enough_of_waiting_ends_it(tmp_path, arenas):
    layout = hand_made(world_size=2)
    with pytest.raises(Enough):
        arenas(layout, 1).persist(order_of(tmp_path, 1))
    assert [name for name in names_in(tmp_path) if not name.endswith(".failed")] == []
