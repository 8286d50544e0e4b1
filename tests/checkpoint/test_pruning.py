import errno
import logging
import os
import shutil
from pathlib import Path

import pytest
from waiting import contents

from holdfast.checkpoint import Checkpointer, scan
from holdfast.checkpoint.catalog import annotations, pruning, staging_dir
from holdfast.checkpoint.catalog.annotations import (
    LOCK_NAME,
    MARKS_NAME,
    note_damaged,
    note_healthy,
    note_metrics,
    note_verified,
    pin,
    read_marks,
    want,
)
from holdfast.checkpoint.catalog.catalog import inspect_checkpoint
from holdfast.checkpoint.catalog.pruning import delete_unclaimed, prune
from holdfast.checkpoint.catalog.retention import Best, Retention
from holdfast.checkpoint.catalog.staging_dir import Staging
from holdfast.core.errors import BadUse, NotFound

NOW_S = 2e9


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    with Checkpointer(folder, keep=None) as ckpt:
        for step in (1, 2, 3, 4):
            ckpt.save(step, {"value": step}).result()
    return folder


@pytest.fixture
def four(saved, tmp_path):
    """Return a folder with steps 1 to 4."""
    return shutil.copytree(saved, tmp_path / "checkpoints")


def steps(folder):
    return [info.step for info in scan(folder)]


def path_of(folder, step):
    return folder / f"step-{step:010}"


def damage(folder, step):
    data = next(path_of(folder, step).glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)


def test_prune_takes_links_away_and_never_what_they_lead_to(four, tmp_path):
    for step in (1, 2):
        path_of(four, step).rename(path_of(tmp_path, step))
        path_of(four, step).symlink_to(path_of(tmp_path, step))
    assert pruned(four, last=1).failed == []
    assert steps(four) == [4]
    assert steps(tmp_path) == [2, 1]


def pruned(folder, *, dry_run=False, **rules):
    return prune(folder, Retention(**rules), by="me", now_s=NOW_S, dry_run=dry_run)


def test_what_no_rule_keeps_goes_and_the_rest_says_why_it_stays(four):
    pin(path_of(four, 1), by="me", now_s=1.0)
    done = pruned(four, last=2)
    assert steps(four) == [4, 3, 1]
    assert done.deleted == [path_of(four, 2)]
    assert done.freed_bytes > 0
    assert [verdict.stays or verdict.goes for verdict in done.verdicts] == [
        ("one of the last 2", "the newest"),
        ("one of the last 2",),
        "no rule keeps it",
        ("pinned",),
    ]
    assert sorted(path.name for path in contents(four)) == [
        path_of(four, step).name for step in (1, 3, 4)
    ]


def test_a_dry_run_changes_nothing(four):
    done = pruned(four, last=1, dry_run=True)
    assert (len([verdict for verdict in done.verdicts if verdict.goes]), done.deleted) == (3, [])
    assert steps(four) == [4, 3, 2, 1]
    assert not list(four.glob(f"*/{MARKS_NAME}"))


def test_before_anything_goes_one_that_stays_is_read_whole(four):
    """The newest has unnoticed damage, and must not be the only one left."""
    damage(four, 4)
    done = pruned(four, last=1)
    assert steps(four) == [4, 3]
    assert read_marks(path_of(four, 4)).damaged.by == "me"
    assert read_marks(path_of(four, 3)).verified.at_s == NOW_S
    assert "does not match its checksum" in done.verdicts[0].stays[0]


def test_where_none_verifies_nothing_goes(four):
    for step in (1, 2, 3, 4):
        damage(four, step)
    assert pruned(four, last=1).deleted == []
    assert steps(four) == [4, 3, 2, 1]


def test_one_that_is_marked_verified_is_not_read_again(four, monkeypatch):
    note_verified(path_of(four, 3), by="me", now_s=1.0)
    monkeypatch.setattr(
        pruning, "verify_and_note", lambda *_a, **_n: pytest.fail("it is known to be whole")
    )
    pruned(four, last=1)
    assert steps(four) == [4, 3]


def test_one_that_was_verified_long_ago_does_not_stand_for_the_newest(four):
    """If the newest is damaged, the job would resume from 3, not from 1."""
    note_verified(path_of(four, 1), by="me", now_s=1.0)
    damage(four, 4)
    pruned(four, last=1)
    assert steps(four) == [4, 3, 1]
    assert read_marks(path_of(four, 3)).verified


def test_what_cannot_be_noted_is_told_and_not_forgotten(four, monkeypatch, caplog):
    from holdfast.checkpoint.catalog import catalog

    def refused(*_arguments, **_named):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(catalog, "note_damaged", refused)
    damage(four, 4)
    with caplog.at_level(logging.WARNING, "holdfast"):
        pruned(four, last=1)
    assert "could not be recorded there" in caplog.text
    assert steps(four) == [4, 3]


def test_a_pin_that_comes_while_it_prunes_is_heeded(four, monkeypatch):
    real = pruning.judge

    def judge_and_pin(*arguments, **named):
        verdicts = real(*arguments, **named)
        pin(path_of(four, 1), by="another", now_s=1.0)
        want(path_of(four, 2), "eval-1", now_s=1.0)
        return verdicts

    monkeypatch.setattr(pruning, "judge", judge_and_pin)
    done = pruned(four, last=1)
    assert steps(four) == [4, 2, 1]
    assert [verdict.stays for verdict in done.verdicts[2:]] == [("wanted by eval-1",), ("pinned",)]


def test_what_was_marked_or_saved_again_since_it_was_judged_stays(four, monkeypatch):
    real = pruning.judge

    def judge_and_then(*arguments, **named):
        verdicts = real(*arguments, **named)
        monkeypatch.undo()
        note_healthy(path_of(four, 1), by="another", now_s=1.0)
        with Checkpointer(four, keep=None) as ckpt:
            ckpt.save(2, {"value": 22}).result()
        return verdicts

    note_verified(path_of(four, 4), by="me", now_s=1.0)
    monkeypatch.setattr(pruning, "judge", judge_and_then)
    done = pruned(four, last=1)
    assert steps(four) == [4, 2, 1]
    assert [verdict.stays for verdict in done.verdicts[2:]] == [
        ("its step was saved again during the deletion",),
        ("it was marked during the deletion",),
    ]


def test_one_that_cannot_be_touched_keeps_no_other_from_going(four):
    (path_of(four, 2) / LOCK_NAME).mkdir()
    done = pruned(four, last=1)
    assert steps(four) == [4, 2]
    assert "Is a directory" in done.verdicts[2].stays[0]


def test_what_a_killed_prune_left_is_deleted_by_the_next(four):
    left = path_of(four, 1).rename(four / ".deleting-step-0000000001.abcd")
    others = path_of(four, 2).rename(four / ".deleting-step-0000000002.abcd")
    for each in (left, *left.iterdir()):
        os.utime(each, (1.0, 1.0))
    pruned(four, last=2)
    assert not left.exists()
    assert others.exists(), "somebody may be at it"


def test_a_checkpoint_whose_marks_cannot_be_read_stays(four):
    (path_of(four, 1) / MARKS_NAME).write_text("{")
    pruned(four, last=1)
    assert steps(four) == [4, 1]
    assert "cannot be read" in delete_unclaimed(inspect_checkpoint(path_of(four, 1)), now_s=NOW_S)


def test_one_that_another_deletes_first_is_gone(four):
    judged = inspect_checkpoint(path_of(four, 1))
    shutil.rmtree(judged.path)
    assert delete_unclaimed(judged, now_s=NOW_S) is None


def test_one_that_the_file_system_does_not_let_go_of_stays(four, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(staging_dir.Path, "rename", refuse)
    assert (
        delete_unclaimed(inspect_checkpoint(path_of(four, 2)), now_s=NOW_S)
        == "it could not be deleted"
    )
    assert path_of(four, 2).is_dir()


def test_nothing_in_a_folder_is_open_while_it_is_deleted(four, monkeypatch):
    """A network file system would keep an open file, and its folder."""
    real, seen = shutil.rmtree, []

    def rmtree(path):
        opened = [
            str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()
        ]
        seen.append([each for each in opened if each.startswith(str(path))])
        real(path)

    monkeypatch.setattr(staging_dir.shutil, "rmtree", rmtree)
    pruned(four, last=2)
    with Checkpointer(four, keep=None) as ckpt:
        ckpt.save(4, {"value": 5})
    Staging(four, 3).commit(final_is_damaged=False)
    assert seen
    assert not any(seen)


def test_one_that_is_deleted_while_it_is_read_is_no_matter(four, monkeypatch):
    real = pruning.verify_and_note

    def verify_late(info, **named):
        if info.step == 4:
            shutil.rmtree(info.path)
        return real(info, **named)

    monkeypatch.setattr(pruning, "verify_and_note", verify_late)
    pruned(four, last=1)
    assert steps(four) == [3]


def test_the_best_by_a_metric_stay(four):
    for step, loss in ((1, 0.5), (2, 0.1), (3, float("nan"))):
        note_metrics(path_of(four, step), {"loss": loss}, now_s=1.0)
    pruned(four, best=(Best(metric="loss", count=1, mode="min"),))
    assert steps(four) == [4, 2]


def test_those_known_to_be_damaged_are_evidence(four):
    note_damaged(path_of(four, 1), "a bit", by="me", now_s=1.0)
    done = pruned(four, last=1)
    assert steps(four) == [4, 1]
    assert done.verdicts[-1].stays == ("evidence: a bit",)


def test_what_would_delete_by_mistake_is_refused(four, tmp_path):
    with pytest.raises(BadUse, match="No rule names the checkpoints to keep"):
        pruned(four)
    with pytest.raises(BadUse, match=r"has a metric 'loss'\. Record one"):
        pruned(four, best=(Best(metric="loss", count=1, mode="min"),))
    note_metrics(path_of(four, 1), {"acc": 1.0}, now_s=1.0)
    with pytest.raises(BadUse, match=r"There are: acc\."):
        pruned(four, best=(Best(metric="loss", count=1, mode="min"),))
    with pytest.raises(NotFound):
        pruned(tmp_path / "nowhere", last=1)
    assert steps(four) == [4, 3, 2, 1]


def test_what_is_read_before_anything_goes_is_not_deleted_meanwhile(four, monkeypatch):
    """Otherwise a job that keeps one checkpoint would delete each while prune reads it."""
    wanted = []
    verify_and_note = pruning.verify_and_note

    def verify(info, **named):
        wanted.append(list(read_marks(info.path).wanted))
        return verify_and_note(info, **named)

    monkeypatch.setattr(pruning, "verify_and_note", verify)
    pruned(four, last=1)
    assert wanted == [["prune"]]
    assert steps(four) == [4]
    assert not read_marks(path_of(four, 4)).wanted


def test_a_disk_that_is_too_full_for_marks_is_pruned_all_the_same(four, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(annotations, "write_atomic", full)
    assert len(pruned(four, last=1).deleted) == 3
    assert steps(four) == [4]
    assert "may be deleted while prune reads it" in caplog.text


def test_what_cannot_be_deleted_is_told(four, monkeypatch):
    def refused(*_arguments, **_named):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(pruning, "hide", refused)
    found = pruned(four, last=1)
    assert (found.deleted, found.failed) == ([], [path_of(four, step) for step in (3, 2, 1)])
    assert found.verdicts[1].stays == ("it could not be deleted: [Errno 13] Permission denied",)
