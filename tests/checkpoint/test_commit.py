"""Test commits of several ranks, which meet only in the folder, at times of their own."""

import contextlib
import errno
import json
import os
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from images import Enough, again, hand_made, is_whole, order_of, part_of, sealed
from waiting import ENDS_S, until

from holdfast.checkpoint import verify
from holdfast.checkpoint.catalog.writer_lease import WRITER_NAME
from holdfast.checkpoint.format.manifest import FileEntry, ManifestError
from holdfast.checkpoint.format.paths import failure_path
from holdfast.checkpoint.ipc.save_request import SaveRequest
from holdfast.checkpoint.writer.commit import RankFailed, is_committed, leave_note
from holdfast.checkpoint.writer.persist import NotAttested
from holdfast.checkpoint.writer.process import explain

WORLD = 3


@pytest.fixture
def parts():
    """Yield every rank's part of step 1, of different sizes."""
    arenas, made = [], []
    for rank in range(WORLD):
        layout = hand_made(rank=rank, world_size=WORLD, sizes=(100 + rank, 5000 * (rank + 1)))
        arenas.append(sealed(layout, 1))
        made.append(part_of(layout, arenas[-1]))
    yield made
    for arena in arenas:
        arena.close()


def patience(seconds=10.0):
    """Return a wait that raises after some seconds."""
    until_s = time.monotonic() + seconds

    def wait():
        if time.monotonic() > until_s:
            raise Enough
        time.sleep(0.001)

    return wait


def at_once(parts, order, **of_rank):
    """Write all parts, each in a thread; return the error of each."""
    raised = [None] * len(parts)

    def one(rank):
        try:
            parts[rank].persist(order, wait=patience(), **of_rank.get(f"rank_{rank}", {}))
        except Exception as error:
            raised[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def killed_in(work):
    """Run `work(die)` in a forked process, which `die` ends as a kill would."""

    def die(*_arguments, **_named):
        os._exit(9)

    child = os.fork()
    if child == 0:
        try:
            work(die)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_all_ranks_together_make_one_checkpoint(tmp_path, parts):
    assert at_once(parts, order_of(tmp_path, 1)) == [None] * WORLD
    assert is_whole(tmp_path, 1, 1, [part.layout for part in parts])
    assert names_in(tmp_path) == ["step-0000000001"]
    # The notes are no part of the checkpoint.
    assert [name for name in names_in(tmp_path / "step-0000000001") if "note" in name] == []


@pytest.mark.parametrize("last", range(WORLD))
def test_it_does_not_matter_who_is_last(tmp_path, parts, last):
    order = order_of(tmp_path, 1)
    threads = [
        threading.Thread(target=part.persist, args=(order,), kwargs={"wait": patience()})
        for rank, part in enumerate(parts)
        if rank != last
    ]
    for thread in threads:
        thread.start()
    others = [
        shard.name
        for rank, part in enumerate(parts)
        if rank != last
        for shard in part.layout.shards
    ]
    wait = patience()
    while not all((order.staging / name).exists() for name in others):
        wait()
    assert not is_committed(order)
    parts[last].persist(order, wait=patience())
    for thread in threads:
        thread.join()
    assert is_whole(tmp_path, 1, 1, [part.layout for part in parts])


def test_a_rank_that_comes_after_the_commit_is_through_at_once(tmp_path, parts):
    order = order_of(tmp_path, 1)
    at_once(parts, order)
    parts[1].persist(order, progress=lambda _: pytest.fail("written"))


def test_another_rank_sees_to_it_that_the_name_is_durable_before_it_says_so(
    tmp_path, parts, monkeypatch
):
    """The rename by rank 0 may be visible before rank 0 has made it durable."""
    order, synced, fsync = order_of(tmp_path, 1), [], os.fsync
    order.staging.mkdir()
    killed_in(lambda die: parts[2].persist(order, wait=die))

    def commit_meanwhile():
        parts[0].persist(order, wait=patience())
        monkeypatch.setattr(
            os,
            "fsync",
            lambda fd: (synced.append(Path(f"/proc/self/fd/{fd}").readlink()), fsync(fd)),
        )

    parts[1].persist(order, wait=commit_meanwhile)
    assert synced == [tmp_path]


@pytest.mark.parametrize("bad", range(WORLD))
def test_a_rank_that_failed_fails_all_of_them_with_its_reason_and_leaves_nothing(
    tmp_path, parts, bad
):
    live = bytes(len(parts[bad].live))
    raised = at_once(parts, order_of(tmp_path, 1), **{f"rank_{bad}": {"live": live}})
    assert isinstance(raised[bad], NotAttested)
    for rank, error in enumerate(raised):
        assert isinstance(error, RankFailed), (rank, error)
        assert "the staged copy differs from the live tensors" in str(error)
        if bad not in (0, rank):
            assert f"rank {bad}: " in str(error)
    assert [name for name in names_in(tmp_path) if not name.endswith(".failed")] == []


@pytest.mark.parametrize("bad", range(WORLD))
def test_a_rank_that_comes_late_learns_why_and_leaves_nothing_either(tmp_path, parts, bad):
    """Its files would fill a disk that may be full already."""
    order = order_of(tmp_path, 1)
    late = 2 if bad != 2 else 1
    others = [part if rank != late else None for rank, part in enumerate(parts)]
    raised = {}

    def one(rank):
        try:
            others[rank].persist(order, wait=patience(), live=bytes(16) if rank == bad else None)
        except RankFailed as error:
            raised[rank] = str(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(WORLD) if rank != late]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(raised) == WORLD - 1
    with pytest.raises(RankFailed, match="the staged copy differs from the live tensors"):
        parts[late].persist(order, wait=patience())
    assert [name for name in names_in(tmp_path) if not name.endswith(".failed")] == []


def test_the_systems_own_reason_reaches_the_other_ranks(tmp_path, parts, monkeypatch):
    """Each rank can then report that the disk is full or read-only."""
    order = order_of(tmp_path, 1)
    order.staging.mkdir()
    (order.staging / parts[1].layout.shards[0].name).mkdir()
    raised = at_once(parts, order)
    assert isinstance(raised[1], IsADirectoryError)
    assert all(error.errno == raised[1].errno for error in raised)


@pytest.mark.parametrize("bad", range(WORLD))
def test_a_rank_that_finds_the_disk_full_to_the_last_byte_says_so_too(small_disk, parts, fill, bad):
    """There is no room for a reason, and the other ranks must not wait until their limit."""
    raised = [None] * WORLD
    waits = [threading.Event() for _ in range(WORLD)]
    order = order_of(small_disk, 1)

    def one(rank):
        patient = patience()

        def wait():
            waits[rank].set()
            patient()

        try:
            parts[rank].persist(order, wait=wait)
        except Exception as error:
            raised[rank] = error

    others = [threading.Thread(target=one, args=(rank,)) for rank in range(WORLD) if rank != bad]
    for thread in others:
        thread.start()
    written = [order.staging / f"rank-{rank}.note" for rank in range(WORLD) if rank != bad]
    until(lambda: all(note.exists() for note in written))
    # A note is there before its folder is synced. A rank that waits after that has written all.
    for each in waits:
        each.clear()
    until(lambda: all(waits[rank].is_set() for rank in range(WORLD) if rank != bad))
    fill(small_disk / "ballast")
    one(bad)
    for thread in others:
        thread.join()
    assert [error.errno for error in raised] == [errno.ENOSPC] * WORLD
    assert isinstance(raised[bad], OSError)
    assert names_in(small_disk) == [failure_path(small_disk, 1, order.save).name, "ballast"]


@pytest.mark.parametrize("lie_bytes", [-1, 1])
def test_a_note_that_lies_about_a_size_is_found_out(tmp_path, parts, lie_bytes):
    order = order_of(tmp_path, 1)
    raised = []

    def rank_0():
        with pytest.raises(ManifestError) as caught:
            parts[0].persist(order, wait=patience())
        raised.append(str(caught.value))

    order.staging.mkdir()
    for rank in (1, 2):
        shard = parts[rank].layout.shards[0]
        (order.staging / shard.name).write_bytes(bytes(shard.size_bytes))
        told = shard.size_bytes + (lie_bytes if rank == 2 else 0)
        leave_note(
            order, rank, [FileEntry(path=shard.name, size_bytes=told, checksum="xxh3_128:0")]
        )
    rank_0()
    (message,) = raised
    assert "__2_0.distcp has 102 bytes instead of" in message
    assert [name for name in names_in(tmp_path) if not name.endswith(".failed")] == []


def test_a_note_of_a_file_that_is_not_there_is_found_out(tmp_path, parts):
    order = order_of(tmp_path, 1)
    order.staging.mkdir()
    for rank in (1, 2):
        leave_note(
            order, rank, [FileEntry(path=f"__{rank}_0.distcp", size_bytes=1, checksum="xxh3_128:0")]
        )
    with pytest.raises(ManifestError, match=r"__1_0.distcp is missing"):
        parts[0].persist(order, wait=patience())


def test_of_a_folder_that_is_taken_over_nothing_is_written_and_all_ranks_say_why(tmp_path, parts):
    holder = {"run": "a", "generation": 2, "host": "h", "pid": 9, "since_s": 1.0, "token": "other"}
    (tmp_path / WRITER_NAME).write_text(json.dumps(holder))
    order = replace(order_of(tmp_path, 1), lease="own")
    rank_0 = {"progress": lambda _: pytest.fail("written")}
    raised = at_once(parts, order, rank_0=rank_0)
    assert [error.is_final for error in raised] == [True] * WORLD
    [told] = {explain(order, 1, error) for error in raised}
    assert re.fullmatch(
        rf"Step 1 was not saved: {tmp_path} has been taken over by .*\. This process must end\.",
        told,
    )
    assert [name for name in names_in(tmp_path) if not name.endswith(".failed")] == [WRITER_NAME]


def test_a_failure_of_one_save_says_nothing_of_the_next_of_its_step(tmp_path, parts):
    order = order_of(tmp_path, 1)
    at_once(parts, order, rank_0={"live": bytes(16)})
    assert at_once(parts, again(order)) == [None] * WORLD
    assert is_whole(tmp_path, 1, 1, [part.layout for part in parts])


def test_an_earlier_checkpoint_of_the_step_is_not_taken_for_this_save(tmp_path, parts):
    order = order_of(tmp_path, 1)
    at_once(parts, order)
    assert is_committed(order)
    assert not is_committed(again(order))
    with pytest.raises(Enough):
        parts[1].persist(again(order))
    assert is_whole(tmp_path, 1, 1, [part.layout for part in parts])


@pytest.mark.parametrize("call", range(1, 40))
def test_rank_0_may_be_killed_before_any_change_of_a_name_and_take_it_up_again(
    tmp_path, parts, call
):
    """The other ranks wait meanwhile, and do not write twice."""
    order = order_of(tmp_path, 1)

    def rank_0(die):
        calls = 0

        def counting(function):
            def counted(*arguments, **named):
                nonlocal calls
                calls += 1
                if calls == call:
                    die()
                return function(*arguments, **named)

            return counted

        for module, name in [
            (Path, "rename"),
            (Path, "mkdir"),
            (Path, "replace"),
            (Path, "unlink"),
            (os, "fsync"),
        ]:
            setattr(module, name, counting(getattr(module, name)))
        parts[0].persist(order, wait=patience())
        die()  # there are fewer calls

    raised = []

    def other(rank):
        try:
            parts[rank].persist(order, wait=patience(ENDS_S))
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=other, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    wait = patience()
    while len(list(order.staging.glob("rank-*.note"))) < 2:
        wait()
    killed_in(rank_0)
    try:
        parts[0].persist(order, wait=patience(1))
    finally:
        for thread in threads:
            thread.join()
    assert raised == []
    assert is_whole(tmp_path, 1, 1, [part.layout for part in parts])
    assert names_in(tmp_path) == ["step-0000000001"]
    assert [name for name in names_in(tmp_path / "step-0000000001") if "note" in name] == []


def test_another_rank_that_is_started_again_after_its_note_never_puts_the_commit_in_danger(
    tmp_path, parts
):
    """Rank 0 may have read the note, and may commit the files at any moment."""
    order = order_of(tmp_path, 1)
    order.staging.mkdir()
    for rank in (1, 2):
        killed_in(lambda die, rank=rank: parts[rank].persist(order, wait=die))

    class Killed(BaseException):
        """A kill in the middle of the files."""

    def commit_meanwhile(_count):
        parts[0].persist(order, wait=patience())
        raise Killed

    with contextlib.suppress(Killed):
        parts[2].persist(order, wait=lambda: commit_meanwhile(0), progress=commit_meanwhile)
    assert is_committed(order)
    assert is_whole(tmp_path, 1, 1, [part.layout for part in parts])


def test_an_order_survives_its_message(tmp_path):
    order = order_of(tmp_path, 5, keep=3, damaged=[tmp_path / "step-0000000001"])
    assert SaveRequest.of_json(order.as_json()) == order
    assert (order.final, order.staging.parent) == (tmp_path / "step-0000000005", tmp_path)


def test_a_checkpoint_lacking_one_ranks_file_does_not_verify(tmp_path, parts):
    at_once(parts, order_of(tmp_path, 1))
    (tmp_path / "step-0000000001" / "__2_1.distcp").unlink()
    assert verify(tmp_path / "step-0000000001").state == "damaged"
