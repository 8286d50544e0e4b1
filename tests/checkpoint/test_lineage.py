"""Test which checkpoint is the newest: after training goes back, and after a crash in between."""

import errno
import json
import logging
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from holdfast.checkpoint import Checkpointer, scan
from holdfast.checkpoint.catalog import lineage
from holdfast.checkpoint.catalog.catalog import CheckpointInfo, inspect_checkpoint
from holdfast.checkpoint.catalog.lineage import (
    LINE_NAME,
    left_behind,
    left_by_newest,
    read_abandoned,
)
from holdfast.checkpoint.catalog.pruning import prune
from holdfast.checkpoint.catalog.retention import Retention, judge
from holdfast.checkpoint.catalog.writer_lease import read_holder
from holdfast.checkpoint.format.manifest import MANIFEST_NAME, Save, parse_manifest, read_manifest
from holdfast.checkpoint.ipc.save_request import SaveRequest
from holdfast.checkpoint.storage.remote import Remote
from holdfast.checkpoint.storage.uploader import fetch_newer
from holdfast.checkpoint.writer import commit, persist
from holdfast.cli.checkpoint import command
from holdfast.core.errors import NoVerifiedCheckpoint


def state_of(value):
    return {"w": torch.full((4,), float(value))}


def save(ckpt, *steps, sign=1):
    for step in steps:
        ckpt.save(step, state_of(sign * step)).result()


def go_back(ckpt, folder, step):
    """Set the parent of later saves as a restore of `step` does."""
    manifest = read_manifest(folder / f"step-{step:010}", step=step)
    ckpt._engine.descends_from(Save(step=step, save=manifest.save))


def restored(folder):
    state = state_of(0)
    with Checkpointer(folder, read_only=True) as ckpt:
        return ckpt.restore(state), state["w"][0].item()


def abandoned(folder):
    return [info.step for info in scan(folder) if info.abandoned]


@pytest.fixture(scope="module")
def saved_so(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    with Checkpointer(folder, keep=None) as ckpt:
        save(ckpt, 10, 20, 30, 40)
    with Checkpointer(folder, keep=None) as ckpt:
        go_back(ckpt, folder, 20)
        save(ckpt, 25, sign=-1)
    return folder


@pytest.fixture
def went_back(saved_so, tmp_path):
    """Return a copy of a folder with steps 10 to 40, and then from 20 on step 25."""
    shutil.copytree(saved_so, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_each_save_names_its_run_and_its_parent(tmp_path):
    with Checkpointer(tmp_path, run="mine") as ckpt:
        save(ckpt, 1, 2)
    with Checkpointer(tmp_path, run="mine") as ckpt:
        ckpt.restore(state_of(0))
        save(ckpt, 3)
    newest, middle, oldest = scan(tmp_path)
    assert {info.run for info in (newest, middle, oldest)} == {"mine"}
    assert newest.parent == Save(step=2, save=middle.save)
    assert middle.parent == Save(step=1, save=oldest.save)
    assert oldest.parent is None


def test_after_going_back_the_newest_is_the_newest_of_the_branch(went_back):
    assert abandoned(went_back) == [40, 30]
    assert restored(went_back) == (25, -25.0)
    with Checkpointer(went_back, keep=None) as ckpt:
        ckpt.restore(state_of(0))
        save(ckpt, 35, 45, sign=-1)  # beyond the abandoned steps
    assert abandoned(went_back) == [40, 30]
    assert restored(went_back) == (45, -45.0)


def test_a_step_of_the_branch_takes_the_place_of_the_abandoned_one(went_back):
    with Checkpointer(went_back, keep=None) as ckpt:
        ckpt.restore(state_of(0))
        save(ckpt, 30, sign=-1)
    assert abandoned(went_back) == [40]
    assert restored(went_back) == (30, -30.0)


def test_whoever_goes_on_from_an_abandoned_step_abandons_the_branch(went_back):
    with Checkpointer(went_back, keep=None) as ckpt:
        go_back(ckpt, went_back, 40)
        save(ckpt, 50)
    assert abandoned(went_back) == [25]
    assert restored(went_back) == (50, 50.0)


def test_in_a_used_folder_what_a_run_saves_anew_is_kept_and_restored(tmp_path):
    with Checkpointer(tmp_path) as ckpt:
        save(ckpt, 1000, 2000, 3000)
    with Checkpointer(tmp_path, keep=2) as ckpt:
        save(ckpt, 1, 2, 3, 4, sign=-1)
    assert restored(tmp_path) == (4, -4.0)
    assert [(info.step, info.abandoned) for info in scan(tmp_path)] == [
        (3000, True),
        (2000, True),
        (4, False),
        (3, False),
    ]


def test_training_that_goes_back_in_its_own_process_begins_a_branch(tmp_path):
    with Checkpointer(tmp_path, keep=None) as ckpt:
        save(ckpt, 10, 20, 30)
        save(ckpt, 25, sign=-1)
    assert abandoned(tmp_path) == [30]
    assert read_manifest(tmp_path / "step-0000000025", step=25).parent.step == 20
    assert restored(tmp_path) == (25, -25.0)


def test_a_step_that_is_saved_again_abandons_nothing(tmp_path):
    with Checkpointer(tmp_path, keep=None) as ckpt:
        save(ckpt, 10, 20)
        save(ckpt, 20, sign=-1)
    assert not (tmp_path / LINE_NAME).exists()
    assert restored(tmp_path) == (20, -20.0)


def test_a_parent_that_failed_is_none(tmp_path):
    with Checkpointer(tmp_path, keep=None, on_failure="warn") as ckpt:
        save(ckpt, 1)
        with pytest.raises(Exception, match="Cannot save"):
            ckpt.save(2, {"w": object()})
        save(ckpt, 3)
    assert inspect_checkpoint(tmp_path / "step-0000000003").parent.step == 1


def test_a_crash_before_the_branch_has_its_name_leaves_where_it_began(tmp_path, monkeypatch):
    with Checkpointer(tmp_path, keep=None) as ckpt:
        save(ckpt, 10, 20, 30, 40)
    parent = Save(step=20, save=inspect_checkpoint(tmp_path / "step-0000000020").save)
    token = read_holder(tmp_path).token
    order = SaveRequest(
        folder=tmp_path,
        step=25,
        save="s-1",
        created_at_s=1.0,
        keep=Retention(),
        lease=token,
        ancestors=(parent,),
    )

    class Crash(BaseException):
        pass

    class Staging:
        def commit(self, **_):
            raise Crash

    monkeypatch.setattr(commit, "_is_prepared", lambda _order: True)
    order.staging.mkdir()
    with pytest.raises(Crash):
        commit.commit(order, Staging(), world_size=0, torch="", metadata=b"", wait=lambda: None)
    assert abandoned(tmp_path) == [40, 30]
    assert restored(tmp_path) == (20, 20.0)


def test_where_all_is_abandoned_training_does_not_begin_anew(went_back):
    shutil.rmtree(went_back / "step-0000000025")
    for step in (10, 20):
        shutil.rmtree(went_back / f"step-{step:010}")
    with Checkpointer(went_back) as ckpt:
        assert ckpt.has_any()
        with pytest.raises(NoVerifiedCheckpoint, match=r"were abandoned \(step 40, 30\)"):
            ckpt.restore(state_of(0))


@pytest.mark.parametrize("is_damaged", [False, True])
def test_on_a_full_disk_an_abandoned_checkpoint_is_not_the_one_that_must_be_whole(
    went_back, monkeypatch, is_damaged
):
    full = SimpleNamespace(free=0)
    monkeypatch.setattr(persist.shutil, "disk_usage", lambda _: full)
    if is_damaged:
        file = next((went_back / "step-0000000025").glob("*.distcp"))
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 255
        file.write_bytes(content)
    before = {info.step for info in scan(went_back)}
    order = SaveRequest(
        folder=went_back, step=26, save="x-1", created_at_s=2e9, keep=Retention(last=3)
    )
    while persist.make_room(order, errno.ENOSPC, 10**6, lambda _: None):
        pass
    left = {info.step for info in scan(went_back)}
    assert (left == before) if is_damaged else (25 in left and left < before)


def test_checkpoints_of_before_are_one_line_in_the_order_of_steps(tmp_path):
    with Checkpointer(tmp_path, keep=None) as ckpt:
        save(ckpt, 10, 20, 30)
    for info in scan(tmp_path):  # without the fields that earlier versions lack
        file = info.path / MANIFEST_NAME
        content = json.loads(file.read_bytes())
        content.pop("parent", None)
        content.pop("digest")
        from holdfast.checkpoint.format import manifest as module

        file.write_text(json.dumps({**content, "digest": module._digest(content)}))
    assert [info.parent for info in scan(tmp_path)] == [None] * 3
    assert restored(tmp_path) == (30, 30.0)
    with Checkpointer(tmp_path, keep=None) as ckpt:
        ckpt.restore(state_of(0))
        save(ckpt, 40)
    assert not (tmp_path / LINE_NAME).exists()
    with Checkpointer(tmp_path, keep=None) as ckpt:
        go_back(ckpt, tmp_path, 10)
        save(ckpt, 15, sign=-1)
    assert abandoned(tmp_path) == [40, 30, 20]
    assert restored(tmp_path) == (15, -15.0)


def test_a_manifest_without_lineage_has_the_digest_that_it_always_had():
    content = {
        "schema": "holdfast.checkpoint",
        "version": 2,
        "step": 1,
        "world_size": 1,
        "created_at_s": 1.0,
    }
    content |= {"torch": "2", "save": "s", "files": []}
    from holdfast.checkpoint.format import manifest as module

    digest = module._digest(content)
    assert (
        parse_manifest(json.dumps({**content, "digest": digest}).encode(), step=1).digest == digest
    )


def test_a_copy_from_elsewhere_counts_as_the_newest(went_back, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    with Checkpointer(other) as ckpt:
        save(ckpt, 5000)
    shutil.copytree(other / "step-0000005000", went_back / "step-0000005000")
    assert restored(went_back) == (5000, 5000.0)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"abandoned": [1]}', b"\xff"])
def test_a_list_that_cannot_be_read_is_said(went_back, caplog, content):
    (went_back / LINE_NAME).write_bytes(content)
    assert read_abandoned(went_back) == frozenset()
    assert any("cannot be read" in record.getMessage() for record in caplog.records)


def info_of(step, *, parent=None, save=None, **fields):
    return CheckpointInfo(
        step=step,
        path=f"/c/{step}",
        state="written",
        save=save or f"s{step}",
        parent=parent,
        **fields,
    )


def saved(step):
    return Save(step=step, save=f"s{step}")


@pytest.mark.parametrize(
    ("present", "before", "step", "parent", "left"),
    [
        ([(10, None), (20, 10)], [], 30, 20, []),
        ([(10, None), (20, 10), (30, 20)], [], 25, 20, [30]),
        ([(10, None), (20, 10), (30, 20)], [], 25, None, [30]),
        ([(10, None), (20, 10), (30, 20)], [], 35, 20, [30]),
        ([(20, 10), (30, 20), (25, 20)], [30], 40, 25, [30]),
        ([(20, 10), (30, 20), (25, 20)], [30], 40, 30, [25]),
        ([(30, 20), (25, 20)], [30], 40, 30, [25]),  # the common parent is deleted
        ([(10, None), (60, 55)], [], 65, 60, []),  # fetched from elsewhere
        ([(10, None), (30, 10)], [], 25, 21, [30]),  # its parent is deleted
        ([(3000, None)], [], 1, None, [3000]),
        ([(10, None), (20, 10), (30, 20)], [], 20, None, [30]),  # the former save is replaced
        ([(10, None), (20, 10)], [20], 20, None, [20]),
    ],
)
def test_what_a_save_leaves_behind(present, before, step, parent, left):
    infos = [info_of(each, parent=saved(of) if of else None) for each, of in present]
    found = left_behind(
        infos,
        {saved(each) for each in before},
        step=step,
        parent=saved(parent) if parent is not None else None,
    )
    assert sorted(each.step for each in found) == left


@pytest.mark.parametrize(
    ("present", "left"),
    [
        ([(20, 10, 1), (30, 20, 2)], []),
        ([(20, 10, 1), (40, 20, 2), (25, 20, 3)], [40]),
        ([(40, 39, 2), (25, 24, 3)], [40]),  # parents that were never pushed
        ([(3000, 2999, 1), (10, None, 2), (20, 10, 3)], [3000]),
        (
            [(20, 10, 1), (40, 20, 2), (25, 20, 3), (50, 40, 4)],
            [25],
        ),  # continued from abandoned steps
        ([(20, 10, 9), (30, 20, 2), (40, 30, 3)], []),  # a wrong clock
        ([(20, 10, 1), (40, 20, 3), (25, 20, 3)], []),  # undecidable
        ([(40, None, 1), (25, None, 2)], []),  # written by earlier versions
        ([], []),
    ],
)
def test_what_the_newest_shows_to_be_left_behind(present, left):
    infos = [
        info_of(step, parent=saved(of) if of else None, created_at_s=at_s)
        for step, of, at_s in present
    ]
    assert sorted(each.step for each in left_by_newest(infos)) == left


def test_abandoned_steps_do_not_count_for_the_line_and_are_kept_by_the_same_rules():
    infos = [info_of(step, abandoned=step in (70, 60, 50)) for step in (70, 60, 50, 40, 30, 20)]
    verdicts = judge(infos, Retention(last=2), now_s=None)
    assert [(verdict.info.step, verdict.stays) for verdict in verdicts if verdict.stays] == [
        (70, ("abandoned, one of the last 2",)),
        (60, ("abandoned, one of the last 2",)),
        (40, ("one of the last 2", "the newest")),
        (30, ("one of the last 2",)),
    ]


def test_prune_reads_the_newest_of_the_line_before_it_deletes(went_back):
    pruned = prune(went_back, Retention(last=1), by="me", now_s=2e9)
    assert pruned.failed == []
    assert [(info.step, info.marks.verified is not None) for info in scan(went_back)] == [
        (40, False),
        (25, True),
    ]


def test_ls_says_which_are_abandoned(went_back):
    said = CliRunner().invoke(command, ["ls", str(went_back)]).output
    assert [("abandoned" in line) for line in said.splitlines() if "step-00" in line] == [
        True,
        True,
        False,
        False,
        False,
    ]
    told = json.loads(CliRunner().invoke(command, ["ls", str(went_back), "--json"]).output)
    assert [row["step"] for row in told["checkpoints"] if row["abandoned"]] == [40, 30]


def test_what_is_abandoned_is_not_fetched_again(went_back, tmp_path_factory):
    storage = tmp_path_factory.mktemp("storage")
    remote = Remote(storage.as_uri())
    for step in (25, 40):
        remote.push(went_back / f"step-{step:010}")
    (went_back / "step-0000000040" / "touched").write_text("")
    fetch_newer(remote, went_back)
    assert (went_back / "step-0000000040" / "touched").exists()
    assert restored(went_back) == (25, -25.0)


def test_the_log_names_what_is_restored(tmp_path, caplog):
    with Checkpointer(tmp_path, run="mine") as ckpt:
        save(ckpt, 7)
    with caplog.at_level(logging.INFO, "holdfast"):
        restored(tmp_path)
    assert any(
        "Restored step 7 of run 'mine', saved at 20" in record.getMessage()
        for record in caplog.records
    )


def test_nothing_is_written_for_a_save_that_abandons_nothing(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(commit, "scan", asked.append)
    order = SaveRequest(
        folder=tmp_path,
        step=5,
        save="s-5",
        created_at_s=1.0,
        keep=Retention(),
        ancestors=(saved(4),),
    )
    for step in (3, 4):
        (tmp_path / f"step-{step:010}").mkdir()
    commit._leave_behind(order, saved(4))
    assert (asked, os.listdir(tmp_path).count(lineage.LINE_NAME)) == ([], 0)  # noqa: PTH208 - names alone
