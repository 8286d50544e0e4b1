import errno
import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from waiting import until

from holdfast.checkpoint import Checkpointer, scan, verify
from holdfast.checkpoint.catalog import catalog
from holdfast.checkpoint.catalog.annotations import (
    MARKS_NAME,
    Annotation,
    Annotations,
    note_healthy,
    pin,
    read_marks,
)
from holdfast.checkpoint.catalog.catalog import checkpoints_at, verify_and_note
from holdfast.checkpoint.catalog.staging_dir import discard
from holdfast.checkpoint.format import manifest
from holdfast.checkpoint.format.manifest import ManifestError, read_manifest
from holdfast.core.errors import NotFound

FILES = [".metadata", "__0_0.distcp", "holdfast.json"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    with Checkpointer(folder) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"value": step, "t": torch.full((50,), float(step))}).result()
    return folder


@pytest.fixture
def two(saved, tmp_path):
    """Return a folder with steps 1 and 2, each with tensors and with the step as a plain value."""
    return shutil.copytree(saved, tmp_path / "checkpoints")


def assert_falls_back(folder, reason, *, state="damaged"):
    """Check that the newest checkpoint is skipped for `reason`, and that step 1 is restored."""
    info = verify(folder / "step-0000000002")
    assert info.state == state
    assert reason in info.reason
    restored = {"value": 0, "t": torch.zeros(50)}
    assert Checkpointer(folder).restore(restored) == 1
    assert (restored["value"], restored["t"].unique().tolist()) == (1, [1.0])


def test_good_checkpoints_are_listed_newest_first_and_verify(two):
    infos = scan(two)
    assert [(info.step, info.state, info.reason) for info in infos] == [
        (2, "written", None),
        (1, "written", None),
    ]
    newest = infos[0]
    # The folder also has the manifest and the checksums of the data's blocks.
    data_bytes = sum(
        path.stat().st_size for path in newest.path.iterdir() if path.suffix in ("", ".distcp")
    )
    assert newest.size_bytes == data_bytes
    assert newest.created_at_s > infos[1].created_at_s > 1.7e9
    assert {verify(info).state for info in infos} == {"verified"}
    assert verify(str(newest.path)).state == "verified"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("seed", range(12))
def test_any_flipped_bit_is_caught(two, name, seed):
    path = two / "step-0000000002" / name
    content = bytearray(path.read_bytes())
    bit = random.Random(f"{name}{seed}").randrange(len(content) * 8)
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    assert_falls_back(two, name)


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_caught(two, name):
    path = two / "step-0000000002" / name
    os.truncate(path, path.stat().st_size - 1 - (name == "holdfast.json"))
    assert_falls_back(two, name)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_caught(two, name):
    (two / "step-0000000002" / name).unlink()
    state = "incomplete" if name == "holdfast.json" else "damaged"
    assert_falls_back(two, "no manifest" if name == "holdfast.json" else name, state=state)
    assert scan(two)[0].state == state


@pytest.mark.parametrize("name", ["__0_0.distcp", "holdfast.json"])  # the metadata may be equal
def test_a_file_of_another_step_is_caught(two, name):
    shutil.copy(two / "step-0000000001" / name, two / "step-0000000002" / name)
    assert_falls_back(two, name)


def test_a_whole_folder_of_another_step_is_caught(two):
    shutil.rmtree(two / "step-0000000002")
    shutil.copytree(two / "step-0000000001", two / "step-0000000002")
    assert_falls_back(two, "holdfast.json belongs to step 1")


def test_a_lost_page_is_caught(tmp_path):
    for step in (1, 2):
        Checkpointer(tmp_path).save(
            step, {"value": step, "t": torch.full((50_000,), float(step))}
        ).result()
    with (tmp_path / "step-0000000002" / "__0_0.distcp").open("r+b") as file:
        file.seek(8 * 4096)
        file.write(bytes(4096))
    assert verify(tmp_path / "step-0000000002").reason == "__0_0.distcp does not match its checksum"


def rewrite_manifest(path, change):
    """Change a manifest and its digest, as a person who knows the format can."""
    file = path / "holdfast.json"
    content = json.loads(file.read_text())
    del content["digest"]
    change(content)
    content["digest"] = manifest._digest(content)
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "name", ["../step-0000000001/.metadata", "/etc/passwd", "a/../../x", "", "."]
)
def test_a_manifest_that_leads_out_is_refused(two, name):
    path = two / "step-0000000002"
    rewrite_manifest(path, lambda content: content["files"][0].update(path=name))
    with pytest.raises(ManifestError, match="outside of the checkpoint"):
        read_manifest(path, step=2)
    assert_falls_back(two, "outside of the checkpoint")


def test_a_link_that_leads_out_is_refused(two):
    data = two / "step-0000000002" / "__0_0.distcp"
    data.rename(two / "elsewhere")
    data.symlink_to(two / "elsewhere")
    assert_falls_back(two, "leads out of the checkpoint")


def test_a_manifest_of_another_version_says_so(two):
    rewrite_manifest(two / "step-0000000002", lambda content: content.update(version=9))
    assert_falls_back(two, "version 9, this Holdfast reads holdfast.checkpoint")


@pytest.mark.parametrize(
    "content", ["[]", "{}", "null", '{"digest": 1}', "\\", '{"digest": {}, "files": 3}']
)
def test_a_manifest_that_is_no_manifest_is_damaged(two, content):
    (two / "step-0000000002" / "holdfast.json").write_text(content)
    assert_falls_back(two, "holdfast.json")


@pytest.mark.parametrize(
    ("old", "forged"),
    [
        ('"size_bytes": ', '"size_bytes": 1e999, "was": '),
        ('"created_at_s": ', '"created_at_s": NaN, "was": '),
        ('"created_at_s": ', '"created_at_s": 1e20, "was": '),
        ('".metadata"', r'"\u0000"'),
        ('".metadata"', r'"\ud800"'),
        ('"files": ', '"files": ' + "[" * 20_000 + "]" * 20_000 + ', "was": '),
    ],
)
def test_whatever_a_forged_manifest_says_the_others_are_listed_and_restored(two, old, forged):
    file = two / "step-0000000002" / "holdfast.json"
    file.write_text(file.read_text().replace(old, forged, 1))
    if "[[" not in forged:  # cannot be parsed, so its digest cannot be forged
        rewrite_manifest(file.parent, lambda _content: None)
    assert [(info.step, info.state) for info in scan(two)] == [(2, "damaged"), (1, "written")]
    assert Checkpointer(two).restore({"value": 0}) == 1


def test_a_replaced_checkpoint_is_a_candidate_after_the_proper_one(two):
    old, new = two / "step-0000000001", two / "step-0000000002"
    shutil.copytree(new, two / "step-0000000002.replaced")
    assert [info.path.name for info in scan(two)] == [new.name, new.name + ".replaced", old.name]
    (new / "__0_0.distcp").unlink()
    ckpt = Checkpointer(two, keep=2)
    assert ckpt.restore({"value": 0}) == 2
    # The proper folder is known to be damaged, so the replaced folder is the last copy of step 2,
    # and stays.
    ckpt.save(3, {"value": 3}).result()
    until(
        lambda: (
            [info.path.name for info in scan(two)]
            == ["step-0000000003", new.name, new.name + ".replaced"]
        )
    )
    # A new save of step 2 keeps the good folder until the new folder has the name.
    ckpt.save(2, {"value": 22}).result()
    until(lambda: [info.path.name for info in scan(two)] == ["step-0000000003", new.name])


def test_one_that_is_deleted_while_it_is_looked_at_is_left_out(two, monkeypatch):
    read_marks = catalog.read_marks

    def deleted_meanwhile(path):
        if path.name == "step-0000000001":
            path.rename(two / ".deleting-it")
        return read_marks(path)

    monkeypatch.setattr(catalog, "read_marks", deleted_meanwhile)
    assert [info.step for info in scan(two)] == [2]


def test_marks_are_those_of_the_listed_save(two, monkeypatch):
    """A step that was healthy is saved again between the reads of its marks and its manifest."""
    path = two / "step-0000000002"
    with Checkpointer(two / "again") as ckpt:
        again = ckpt.save(2, {"value": 3}).result()
    save = read_manifest(again, step=2).save
    note_healthy(path, by="me", now_s=1.0)
    read_marks = catalog.read_marks

    def saved_again_meanwhile(checkpoint):
        marks = read_marks(checkpoint)
        if checkpoint == path and again.exists():
            discard(path)
            again.rename(path)
        return marks

    monkeypatch.setattr(catalog, "read_marks", saved_again_meanwhile)
    listed = scan(two)[0]
    assert (listed.step, listed.save, listed.marks.healthy) == (2, save, None)


def test_other_things_in_the_folder_are_left_out(two):
    (two / "notes.txt").write_text("")
    (two / "step-0000000009").write_text("")
    (two / "step-9").mkdir()
    (two / ".step-0000000003.abcd.tmp").mkdir()
    assert [info.step for info in scan(two)] == [2, 1]


def test_a_link_to_another_step_is_damaged(two):
    (two / "step-0000000004").symlink_to(two / "step-0000000001")
    assert [(info.step, info.state) for info in scan(two)] == [
        (4, "damaged"),
        (2, "written"),
        (1, "written"),
    ]
    assert "belongs to step 1" in scan(two)[0].reason


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(NotFound, match="no checkpoint folder"):
        scan(tmp_path / "nowhere")
    with pytest.raises(NotFound, match="is not a checkpoint"):
        verify(tmp_path / "step-0000000001")
    with pytest.raises(NotFound, match="is not a checkpoint"):
        verify(tmp_path)


def test_marks_are_listed_and_change_nothing_of_the_checkpoint(two):
    path = two / "step-0000000002"
    before = scan(two)[0]
    marks = pin(path, by="me", now_s=1.0, why="the paper's")
    assert scan(two)[0] == replace(before, marks=marks)
    assert verify(path).state == "verified"
    (path / MARKS_NAME).write_text("no marks")
    assert scan(two)[0].marks.unreadable
    assert Checkpointer(two).restore({"value": 0}) == 2


def test_what_a_verification_found_is_noted(two):
    good = verify_and_note(scan(two)[0], by="me", now_s=5.0)
    assert good == replace(scan(two)[0], state="verified")
    assert good.marks.verified == Annotation(at_s=5.0, by="me")
    data = next(good.path.glob("*.distcp"))
    os.truncate(data, 10)
    assert verify_and_note(good, by="me", now_s=6.0).marks.damaged.why == scan(two)[0].reason


def test_one_without_a_manifest_gets_no_mark(two):
    (two / "step-0000000002" / "holdfast.json").unlink()
    info = verify_and_note(scan(two)[0], by="me", now_s=5.0)
    assert (info.state, info.marks) == ("incomplete", Annotations())
    assert not (info.path / MARKS_NAME).exists()


def test_a_verification_tells_how_far_it_is(two):
    info = scan(two)[0]
    seen = []
    verify(info, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (info.size_bytes, info.size_bytes)
    assert seen == sorted(seen)


def test_a_copy_of_another_name_is_known_by_its_manifest(two):
    copy = two / "best"
    shutil.copytree(two / "step-0000000002", copy)
    assert (verify(copy).step, verify(copy).state) == (2, "verified")
    assert checkpoints_at(copy) == [copy]
    assert checkpoints_at(two) == [two / "step-0000000002", two / "step-0000000001", copy]
    (copy / "holdfast.json").write_text("{")
    assert verify(copy).state == "damaged"
    assert [info.step for info in scan(two)] == [2, 1]


def while_it_is_read(monkeypatch, work):
    """Call `work` once in the middle of a verification."""
    check, left = catalog.check_file_contents, iter([work])

    def check_late(path, files, read):
        for each in left:
            each()
        check(path, files, read)

    monkeypatch.setattr(catalog, "check_file_contents", check_late)


def test_one_that_is_deleted_while_it_is_verified_is_not_damaged(two, monkeypatch):
    path = two / "step-0000000002"
    while_it_is_read(monkeypatch, lambda: discard(path))
    with pytest.raises(NotFound, match="was deleted while it was verified"):
        verify_and_note(catalog.inspect_checkpoint(path), by="me", now_s=1.0)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_what_is_noted_is_of_the_save_that_was_read_last(two, saved, monkeypatch, is_damaged):
    """A step is saved again during the read of its former bytes."""
    path = two / "step-0000000002"
    with Checkpointer(two / "again") as ckpt:
        again = ckpt.save(2, {"value": 3, "t": torch.full((50,), 3.0)}).result()
    if is_damaged:
        (again / "__0_0.distcp").write_bytes(bytes((again / "__0_0.distcp").stat().st_size))

    def save_again():
        discard(path)
        again.rename(path)

    while_it_is_read(monkeypatch, save_again)
    info = verify_and_note(catalog.inspect_checkpoint(path), by="me", now_s=1.0)
    assert info.state == ("damaged" if is_damaged else "verified")
    assert bool(info.marks.damaged) == is_damaged


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_what_could_not_be_read_is_told_and_not_noted_as_damage(two, monkeypatch, number):
    """The read may succeed later, and a mark of damage would hide that the step is healthy."""
    path = two / "step-0000000002"
    note_healthy(path, by="me", now_s=1.0)

    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(manifest, "check_file", fail)
    found = verify_and_note(scan(two)[0], by="me", now_s=5.0)
    assert (found.state, found.unread) == ("damaged", True)
    assert os.strerror(number) in found.reason
    assert read_marks(path) == Annotations(healthy=Annotation(at_s=1.0, by="me"))


def test_a_missing_file_and_one_of_another_version_are_told_apart_from_one_that_cannot_be_read(two):
    (two / "step-0000000002" / "__0_0.distcp").unlink()
    assert not verify(two / "step-0000000002").unread
    rewrite_manifest(two / "step-0000000001", lambda content: content.update(version=9))
    assert verify(two / "step-0000000001").unread, "a newer Holdfast's may be right"


@pytest.mark.parametrize("damaged", [False, True])
def test_a_finding_does_not_land_on_a_later_save_of_the_step(two, monkeypatch, caplog, damaged):
    path = two / "step-0000000002"
    if damaged:
        (path / "__0_0.distcp").write_bytes(b"")
    name = "note_damaged" if damaged else "note_verified"
    note = getattr(catalog, name)

    def saved_again_before(*arguments, **named):
        monkeypatch.undo()
        with Checkpointer(two, keep=None) as ckpt:
            ckpt.save(2, {"value": 22}).result()
        return note(*arguments, **named)

    monkeypatch.setattr(catalog, name, saved_again_before)
    verify_and_note(scan(two)[0], by="me", now_s=5.0)
    assert read_marks(path) == Annotations()
    assert "was saved again meanwhile" in caplog.text


def test_the_catalog_and_the_writing_process_import_nothing_that_takes_long():
    program = (
        "import sys, holdfast.checkpoint.catalog.catalog, holdfast.checkpoint.writer.process;"
        " sys.exit(any(name in sys.modules for name in ('torch', 'psutil', 'secrets')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
