import errno
import fcntl
import json
import math
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.checkpoint.catalog import annotations
from holdfast.checkpoint.catalog import annotations as marks
from holdfast.checkpoint.catalog.annotations import (
    LOCK_NAME,
    MARKS_NAME,
    Annotation,
    Annotations,
    ReadHold,
    change_marks,
    locked,
    note_damaged,
    note_healthy,
    note_metrics,
    note_verified,
    pin,
    read_marks,
    release,
    unpin,
    want,
)
from holdfast.core.errors import BadUse, CheckpointError, NotFound

MARKER = Path(__file__).with_name("killed_marker.py")


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "step-0000000001"
    path.mkdir()
    return path


def test_what_is_marked_is_read_back(checkpoint):
    assert read_marks(checkpoint) == Annotations()
    note_verified(checkpoint, by="ada", now_s=1.5)
    note_healthy(checkpoint, by="monitor", now_s=2.0, why="500 steps without a spike")
    pin(checkpoint, by="bo", now_s=3.0)
    want(checkpoint, "eval-7", now_s=4.0, until_s=100.0)
    want(checkpoint, "rollback", now_s=5.0)
    note_metrics(checkpoint, {"loss": 2, "acc": 0.1}, now_s=6.0)
    written = note_metrics(checkpoint, {"loss": 1.25, "spike": math.inf}, now_s=7.0)
    assert written == Annotations(
        verified=Annotation(at_s=1.5, by="ada"),
        healthy=Annotation(at_s=2.0, by="monitor", why="500 steps without a spike"),
        pinned=Annotation(at_s=3.0, by="bo"),
        wanted={"eval-7": ReadHold(at_s=4.0, until_s=100.0), "rollback": ReadHold(at_s=5.0)},
        metrics={"loss": 1.25, "acc": 0.1, "spike": math.inf},
    )
    assert read_marks(checkpoint) == written
    assert json.loads((checkpoint / MARKS_NAME).read_text())["version"] == 1
    assert sorted(path.name for path in checkpoint.iterdir()) == [LOCK_NAME, MARKS_NAME]


def test_what_is_taken_back_is_gone_and_the_rest_stays(checkpoint):
    pin(checkpoint, by="bo", now_s=1.0, why="paper")
    want(checkpoint, "a", now_s=1.0)
    want(checkpoint, "b", now_s=1.0)
    release(checkpoint, "a", now_s=2.0)
    release(checkpoint, "nobody", now_s=2.0)
    unpin(checkpoint, now_s=3.0)
    assert read_marks(checkpoint) == Annotations(wanted={"b": ReadHold(at_s=1.0)})
    with pytest.raises(BadUse, match="name of its holder"):
        want(checkpoint, "", now_s=1.0)


def test_damage_takes_back_what_was_good_and_a_verification_takes_back_damage(checkpoint):
    note_verified(checkpoint, by="a", now_s=1.0)
    note_healthy(checkpoint, by="a", now_s=1.0)
    marks = note_damaged(checkpoint, "a bit", by="b", now_s=2.0)
    assert (marks.verified, marks.healthy, marks.damaged) == (
        None,
        None,
        Annotation(at_s=2.0, by="b", why="a bit"),
    )
    marks = note_verified(checkpoint, by="c", now_s=3.0)
    assert (marks.verified, marks.damaged) == (Annotation(at_s=3.0, by="c"), None)


def test_a_want_ends(checkpoint):
    want(checkpoint, "until 10", now_s=1.0, until_s=10.0)
    marks = want(checkpoint, "for ever", now_s=1.0)
    assert marks.wanted_by(9.9) == ["for ever", "until 10"]
    assert marks.wanted_by(10.0) == ["for ever"]
    assert marks.wanted_by(None) == ["for ever", "until 10"]


@pytest.mark.parametrize("seed", range(20))
def test_any_flipped_bit_is_no_mark_is_told_and_keeps_the_checkpoint(checkpoint, caplog, seed):
    pin(checkpoint, by="bo", now_s=1.0, why="the paper's")
    path = checkpoint / MARKS_NAME
    content = bytearray(path.read_bytes().strip())
    bit = random.Random(seed).randrange(len(content) * 8)
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    marks = read_marks(checkpoint)
    if marks.unreadable is None:  # for example a change of case that is valid JSON
        assert marks.pinned == Annotation(at_s=1.0, by="bo", why="the paper's")
        return
    assert marks == Annotations(unreadable=marks.unreadable)
    assert (
        f"The marks of {checkpoint} cannot be read, so the checkpoint is not deleted" in caplog.text
    )
    # A later write must keep a possible pin.
    marks = note_metrics(checkpoint, {"loss": 1.0}, now_s=5.0)
    assert marks.pinned.by == "holdfast"
    assert "its marks were damaged" in marks.pinned.why
    assert marks.metrics == {"loss": 1.0}
    assert (checkpoint / f"{MARKS_NAME}.damaged").read_bytes() == content


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"null", b"3", b"{}", b'{"digest": 1}', b"\xff", b"[" * 100_000, b" " * (1 << 21)],
)
def test_what_is_no_marks_at_all_is_unreadable(checkpoint, content):
    (checkpoint / MARKS_NAME).write_bytes(content)
    assert MARKS_NAME in read_marks(checkpoint).unreadable
    assert unpin(checkpoint, now_s=1.0) == Annotations()


def test_forged_marks_are_unreadable(checkpoint):
    content = {"schema": marks.SCHEMA, "version": 1, "verified": {"at_s": 10**400, "by": "me"}}
    content["digest"] = marks._digest(content)
    (checkpoint / MARKS_NAME).write_text(json.dumps(content))
    assert MARKS_NAME in read_marks(checkpoint).unreadable


def test_marks_of_a_newer_holdfast_are_left_as_they_are(checkpoint):
    from holdfast.checkpoint.catalog import annotations as marks

    content = {"schema": marks.SCHEMA, "version": 9, "pinned": "in another way"}
    content["digest"] = marks._digest(content)
    (checkpoint / MARKS_NAME).write_text(json.dumps(content))
    assert "version 9, this Holdfast reads version 1" in read_marks(checkpoint).unreadable
    with pytest.raises(
        CheckpointError, match=r"cannot be changed: .*version 9.*Use that Holdfast\."
    ):
        unpin(checkpoint, now_s=1.0)
    assert json.loads((checkpoint / MARKS_NAME).read_text()) == content


def test_a_checkpoint_that_is_gone_is_named(tmp_path):
    with pytest.raises(NotFound, match=r"There is no checkpoint .*step-0000000009"):
        pin(tmp_path / "step-0000000009", by="a", now_s=1.0)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_marks_as_they_were(checkpoint, monkeypatch):
    before = pin(checkpoint, by="a", now_s=1.0)

    def full(_fd):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            unpin(checkpoint, now_s=2.0)
    assert read_marks(checkpoint) == before


def test_damaged_marks_stay_until_there_are_others(checkpoint, monkeypatch):
    """Without marks, the checkpoint could be deleted, although it may be pinned."""
    (checkpoint / MARKS_NAME).write_text("{")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(marks, "write_atomic", full)
        with pytest.raises(OSError, match="No space"):
            note_verified(checkpoint, by="me", now_s=1.0)
    assert read_marks(checkpoint).unreadable
    note_verified(checkpoint, by="me", now_s=1.0)
    assert read_marks(checkpoint).pinned.by == "holdfast"
    assert (checkpoint / f"{MARKS_NAME}.damaged").read_text() == "{"


def test_wants_that_have_ended_are_forgotten(checkpoint):
    """The holders may have been killed, and a checkpoint may have many over its life."""
    for number in range(3):
        want(checkpoint, f"eval-{number}", now_s=10.0 * number, until_s=10.0 * number + 15.0)
    assert list(read_marks(checkpoint).wanted) == ["eval-1", "eval-2"]


@pytest.mark.parametrize("until_s", [math.inf, math.nan])
def test_a_want_without_end_is_none_that_ends_at_infinity(checkpoint, until_s):
    with pytest.raises(BadUse, match="or None for without end"):
        want(checkpoint, "eval-1", now_s=1.0, until_s=until_s)
    assert read_marks(checkpoint) == Annotations()


def test_who_waits_too_long_for_the_lock_says_so(checkpoint):
    with (checkpoint / LOCK_NAME).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        said = r"has held the marks of .*step-0000000001 for 0 s.*try again"
        with pytest.raises(CheckpointError, match=said), locked(checkpoint, wait_s=0.0):
            pytest.fail("it is held by another")
    with locked(checkpoint, wait_s=0.0):
        pass


def test_where_nothing_can_be_locked_marks_are_written_all_the_same(checkpoint, monkeypatch):
    def unsupported(_fd, _how):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    assert pin(checkpoint, by="a", now_s=1.0) == read_marks(checkpoint)


@pytest.mark.parametrize("saved_again", [False, True])
def test_a_checkpoint_that_went_while_one_waited_is_not_marked(
    checkpoint, monkeypatch, saved_again
):
    real = annotations._lock
    calls = 0

    def lock_once_it_went(*arguments):
        nonlocal calls
        calls += 1
        if calls == 1:
            checkpoint.rename(checkpoint.with_name(".deleting"))
            if saved_again:
                checkpoint.mkdir()
        real(*arguments)

    monkeypatch.setattr(annotations, "_lock", lock_once_it_went)
    if saved_again:
        assert pin(checkpoint, by="a", now_s=1.0) == read_marks(checkpoint)
    else:
        with pytest.raises(NotFound):
            pin(checkpoint, by="a", now_s=1.0)
    assert not (checkpoint.with_name(".deleting") / MARKS_NAME).exists()


def marker(checkpoint, name):
    return subprocess.Popen(
        [sys.executable, MARKER, checkpoint, name], stdout=subprocess.PIPE, text=True
    )


def test_of_two_writers_none_loses_what_it_wrote(checkpoint):
    """Two processes write as fast as possible; a third mark, by this process, must survive."""
    pin(checkpoint, by="me", now_s=1.0)
    done = {}
    with marker(checkpoint, "a") as a, marker(checkpoint, "b") as b:
        for process, name in ((a, "a"), (b, "b"), (a, "a"), (b, "b")):
            for _ in range(10):
                done[name] = int(process.stdout.readline())
        for process in (a, b):
            process.kill()
    marks = read_marks(checkpoint)
    assert marks.pinned is not None
    for name in ("a", "b"):
        values = {value for metric, value in marks.metrics.items() if metric.startswith(name)}
        assert len(values) == 1
        assert values.pop() >= done[name]


def test_kill_9_at_any_instant_leaves_the_old_marks_or_the_new(checkpoint):
    """Real SIGKILLs at seeded instants: every reported mark exists, and the lock is free."""
    chosen = random.Random(11)
    pin(checkpoint, by="me", now_s=0.0)
    for _ in range(8):
        with marker(checkpoint, "n") as writer:
            for _ in range(chosen.randrange(1, 10)):
                done = int(writer.stdout.readline())
            for _ in range(chosen.randrange(100_000)):  # anywhere within the next write
                pass
            os.kill(writer.pid, signal.SIGKILL)
            done = int((writer.stdout.read().split("\n")[-2:-1] or [done])[0])
        assert writer.returncode == -signal.SIGKILL
        marks = read_marks(checkpoint)
        assert marks.pinned is not None
        values = set(marks.metrics.values())
        assert len(marks.metrics) == 200
        assert len(values) == 1
        assert values.pop() in (done, done + 1)
        with locked(checkpoint, wait_s=0.0):
            pass
    change_marks(checkpoint, lambda marks: marks, now_s=1.0)
