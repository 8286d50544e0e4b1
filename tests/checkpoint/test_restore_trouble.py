"""Test restores beside saves and deletions, from unreliable storage, and after partial reads."""

import errno
import itertools
import os
import shutil
from pathlib import Path

import pytest
import torch

from holdfast.checkpoint import Checkpointer, scan, verify
from holdfast.checkpoint.format import verified_files
from holdfast.checkpoint.format.manifest import ManifestError
from holdfast.checkpoint.format.paths import step_path
from holdfast.checkpoint.restore import open as opening
from holdfast.core.errors import CheckpointError, NoVerifiedCheckpoint, StateMismatch

COUNT = 9 << 20
"""The number of 32-bit elements: more than one read returns."""


def state_of(value, *names):
    return {name: torch.full((5000,), float(value)) for name in names or ("t",)}


def save(folder, *steps, **options):
    with Checkpointer(folder, keep=None, **options) as ckpt:
        for step in steps:
            ckpt.save(step, state_of(step)).result()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save(folder, 1, 2)
    return folder


@pytest.fixture
def with_two(saved, tmp_path):
    """Put copies of the checkpoints of the steps 1 and 2 into the test's folder."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)


@pytest.fixture
def pauses(monkeypatch):
    """Return the list of the pauses that were made."""
    paused = []
    monkeypatch.setattr(opening, "_pause", paused.append)
    return paused


@pytest.mark.parametrize(("newer", "restored"), [(True, 110), (False, 90)])
def test_what_is_deleted_as_it_is_restored_gives_way_to_what_is_there_then(
    tmp_path, monkeypatch, newer, restored
):
    save(tmp_path / "other", 110)
    save(tmp_path, 90, 100)
    real = opening.open_checkpoint

    def replace_and_open(path, manifest, memory=None):
        if path.name == "step-0000000100" and path.exists():
            path.rename(tmp_path / "gone")
            if newer:
                step_path(tmp_path / "other", 110).rename(step_path(tmp_path, 110))
        return real(path, manifest, memory)

    monkeypatch.setattr(opening, "open_checkpoint", replace_and_open)
    state = state_of(0)
    assert Checkpointer(tmp_path, read_only=True).restore(state) == restored
    assert state["t"].eq(restored).all()


@pytest.mark.parametrize("last", [100, 103])
def test_a_folder_from_which_everything_goes_is_no_reason_to_begin_anew(
    tmp_path, monkeypatch, last
):
    """This also holds if another checkpoint always appears, and then disappears, too."""
    save(tmp_path / "other", *range(101, last + 1))
    save(tmp_path, 100)
    real = opening.open_checkpoint

    def remove_and_open(path, manifest, memory=None):
        path.rename(tmp_path / f"gone{path.name}")
        for other in sorted((tmp_path / "other").glob("step-*"))[:1]:
            other.rename(tmp_path / other.name)
        return real(path, manifest, memory)

    monkeypatch.setattr(opening, "open_checkpoint", remove_and_open)
    with pytest.raises(NoVerifiedCheckpoint):
        Checkpointer(tmp_path, read_only=True).restore(state_of(0))


@pytest.mark.usefixtures("with_two")
@pytest.mark.parametrize(
    ("number", "failures", "restored"),
    [(errno.ESTALE, 1, 2), (errno.EIO, 2, 2), (errno.EMFILE, 3, 1)],
)
def test_what_cannot_be_read_for_a_moment_is_read_again(
    tmp_path, monkeypatch, pauses, number, failures, restored
):
    real, failed = verified_files._open, itertools.count()

    def fail_at_first(path):
        if path.parent.name == "step-0000000002" and next(failed) < failures:
            raise OSError(number, os.strerror(number))
        return real(path)

    monkeypatch.setattr(verified_files, "_open", fail_at_first)
    state = state_of(0)
    assert Checkpointer(tmp_path).restore(state) == restored
    assert state["t"].eq(restored).all()
    assert len(pauses) == min(failures, 2)


@pytest.mark.usefixtures("with_two")
def test_a_manifest_that_cannot_be_read_for_a_moment_is_looked_at_again(
    tmp_path, monkeypatch, pauses
):
    real, infos = opening.scan, []

    def scan(folder):
        infos[:] = real(folder)
        if not pauses:
            (step_path(tmp_path, 2) / "holdfast.json").rename(tmp_path / "kept")
            (step_path(tmp_path, 2) / "holdfast.json").mkdir()
            infos[:] = real(folder)
            (step_path(tmp_path, 2) / "holdfast.json").rmdir()
            (tmp_path / "kept").rename(step_path(tmp_path, 2) / "holdfast.json")
        return infos

    monkeypatch.setattr(opening, "scan", scan)
    assert Checkpointer(tmp_path).restore(state_of(0)) == 2
    assert len(pauses) == 1


@pytest.mark.usefixtures("with_two")
def test_damage_is_not_read_again(tmp_path, pauses):
    (step_path(tmp_path, 2) / "__0_0.distcp").unlink()
    assert Checkpointer(tmp_path).restore(state_of(0)) == 1
    assert pauses == []


def test_a_state_that_holds_parts_of_a_damaged_step_is_not_said_to_be_unchanged(tmp_path):
    with Checkpointer(tmp_path, keep=None) as ckpt:
        ckpt.save(1, {"t": torch.ones(COUNT)}).result()
        path = ckpt.save(2, {"t": torch.full((COUNT,), 2.0), "u": torch.zeros(1)}).result()
    with (path / "__0_0.distcp").open("r+b") as file:
        file.seek(4 * COUNT - 100)
        file.write(b"\x55")
    state = {"t": torch.zeros(COUNT), "u": torch.zeros(1)}
    with pytest.raises(
        StateMismatch, match=r"has no 'u'.*may hold parts of step 2, which is damaged\."
    ):
        Checkpointer(tmp_path).restore(state)
    assert state["t"].count_nonzero(), "it is what this is about"
    path.rename(tmp_path / "away")
    with pytest.raises(
        StateMismatch,
        match=r"leave that entry out to restore the rest\. Restore into the state that was saved",
    ):
        Checkpointer(tmp_path).restore(state)


@pytest.mark.usefixtures("with_two")
@pytest.mark.parametrize("failures", [1, 3])
def test_a_folder_that_cannot_be_looked_at_is_looked_at_again(
    tmp_path, monkeypatch, pauses, failures
):
    real, failed = Path.iterdir, []

    def stale(path):
        if path == tmp_path and len(failed) < failures:
            failed.append(path)
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(path)

    monkeypatch.setattr(Path, "iterdir", stale)
    if failures == 1:
        assert Checkpointer(tmp_path).restore(state_of(0)) == 2
        assert len(pauses) == 1
    else:
        with pytest.raises(
            CheckpointError, match=r"cannot be read \(Stale file handle\)\. Look at the storage"
        ):
            Checkpointer(tmp_path).restore(state_of(0))


@pytest.mark.usefixtures("with_two")
def test_one_that_cannot_be_looked_at_for_a_moment_is_not_taken_for_none(
    tmp_path, monkeypatch, pauses
):
    real, failed = Path.is_dir, []

    def stale(path):
        if path == step_path(tmp_path, 2) and not failed:
            failed.append(path)
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(path)

    monkeypatch.setattr(Path, "is_dir", stale)
    assert Checkpointer(tmp_path).restore(state_of(0)) == 2


def link_away(folder, *steps):
    """Move these steps to other storage, and put links in their places."""
    for step in steps:
        moved = step_path(folder.parent / "elsewhere", step)
        moved.parent.mkdir(exist_ok=True)
        step_path(folder, step).rename(moved)
        step_path(folder, step).symlink_to(moved)


def test_links_to_checkpoints_are_restored_as_checkpoints(tmp_path):
    save(tmp_path / "run", 1, 2, 3)
    link_away(tmp_path / "run", 1, 2, 3)
    ckpt = Checkpointer(tmp_path / "run")
    assert ckpt.has_any()
    assert ckpt.restore(state_of(0)) == 3
    assert [verify(info).state for info in scan(tmp_path / "run")] == ["verified"] * 3


def test_where_all_steps_are_links_to_nothing_no_training_begins_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "_pause", lambda _: None)
    save(tmp_path / "run", 1, 2)
    link_away(tmp_path / "run", 1, 2)
    (tmp_path / "elsewhere").rename(tmp_path / "unmounted")
    ckpt = Checkpointer(tmp_path / "run")
    assert ckpt.has_any()
    with pytest.raises(
        NoVerifiedCheckpoint, match=r"step 2: it is a link to .*, where there is no folder; step 1"
    ):
        ckpt.restore(state_of(0))
    assert verify(step_path(tmp_path / "run", 2)).state == "damaged"
    (tmp_path / "unmounted").rename(tmp_path / "elsewhere")
    assert ckpt.restore(state_of(0)) == 2


def test_a_link_to_nothing_is_passed_over_for_an_older_step(tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "_pause", lambda _: None)
    save(tmp_path / "run", 1, 2)
    link_away(tmp_path / "run", 2)
    (tmp_path / "elsewhere").rename(tmp_path / "unmounted")
    assert Checkpointer(tmp_path / "run").restore(state_of(0)) == 1


@pytest.mark.parametrize("is_there", [True, False])
def test_a_save_of_a_step_that_is_a_link_takes_its_place_and_leaves_nothing_else(
    tmp_path, is_there
):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    save(run, 1)
    link_away(run, 1)
    if not is_there:
        elsewhere.rename(tmp_path / "unmounted")
    save(run, 1)
    assert [
        path.name for path in run.iterdir() if path.name.startswith((".deleting", ".step", "step"))
    ] == ["step-0000000001"]
    assert not step_path(run, 1).is_symlink()
    assert verify(step_path(run, 1)).state == "verified"
    if is_there:
        assert verify(step_path(elsewhere, 1)).state == "verified"


def test_retention_takes_links_away_and_never_what_they_lead_to(tmp_path):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    save(run, 1, 2)
    link_away(run, 1, 2)
    with Checkpointer(run, keep=1) as ckpt:
        ckpt.save(3, state_of(3)).result()
    assert sorted(path.name for path in run.iterdir() if not path.name.startswith(".holdfast")) == [
        "step-0000000003"
    ]
    assert [verify(step_path(elsewhere, step)).state for step in (1, 2)] == ["verified"] * 2


def test_a_hidden_link_that_a_crash_left_goes_and_what_it_leads_to_stays(tmp_path):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    save(run, 1)
    link_away(run, 1)
    step_path(run, 1).rename(run / ".deleting-step-0000000001.abcd")
    save(run, 2)
    assert [path.name for path in run.iterdir() if not path.name.startswith(".holdfast")] == [
        "step-0000000002"
    ]
    assert verify(step_path(elsewhere, 1)).state == "verified"


def test_a_damaged_plain_value_gives_way_to_an_older_checkpoint_and_changes_nothing(
    tmp_path, monkeypatch
):
    with Checkpointer(tmp_path, keep=None) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {**state_of(step), "epoch": step}).result()
    real, seen = opening.dcp_reader.read, []
    state = {**state_of(0), "epoch": 0}

    def read(path, metadata, wanted, files=None):
        if path == step_path(tmp_path, 2) and "epoch" in wanted:
            seen.append(state["t"][0].item())
            raise ManifestError("a block is damaged")
        assert path != step_path(tmp_path, 2) or "t" not in wanted, "tensors are read last"
        return real(path, metadata, wanted, files)

    monkeypatch.setattr(opening.dcp_reader, "read", read)
    with Checkpointer(tmp_path, read_only=True) as ckpt:
        assert ckpt.restore(state) == 1
    assert seen == [0.0]
    assert (state["epoch"], state["t"][0].item()) == (1, 1.0)
