"""Show which checkpoints a save keeps, deletes and replaces, and what a replaced one passes on."""

import logging
import shutil
import threading

from waiting import contents, until

from holdfast.checkpoint import Checkpointer, scan, verify
from holdfast.checkpoint.catalog.annotations import (
    MARKS_NAME,
    locked,
    note_metrics,
    note_verified,
    pin,
    read_marks,
    want,
)
from holdfast.checkpoint.format.paths import replaced_path


def save(folder, *steps):
    with Checkpointer(folder, keep=None) as ckpt:
        for step in steps:
            ckpt.save(step, {"a": step}).result()


def test_only_the_newest_are_kept(tmp_path):
    with Checkpointer(tmp_path, keep=2) as ckpt:
        for step in range(5):
            ckpt.save(step, {"a": step}).result()
    assert [info.step for info in scan(tmp_path)] == [4, 3]
    assert sorted(path.name for path in contents(tmp_path)) == [
        "step-0000000003",
        "step-0000000004",
    ]


def test_all_are_kept_with_none(tmp_path):
    save(tmp_path, *range(5))
    assert len(scan(tmp_path)) == 5


def test_a_save_below_older_ones_keeps_itself(tmp_path):
    save(tmp_path, 100, 200)
    Checkpointer(tmp_path, keep=1).save(1, {"a": 1}).result()
    until(lambda: [info.step for info in scan(tmp_path)] == [200, 1])


def test_damaged_ones_neither_count_nor_push_out_good_ones(tmp_path, caplog):
    save(tmp_path, 1, 2, 3)
    data = tmp_path / "step-0000000003" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    ckpt = Checkpointer(tmp_path, keep=2)
    state = {"a": 0}
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert ckpt.restore(state) == 2
    assert "Passed over the checkpoint of step 3" in caplog.text
    assert "__0_0.distcp does not match its checksum" in caplog.text
    ckpt.save(4, {"a": 4}).result()
    until(lambda: [info.step for info in scan(tmp_path)] == [4, 3, 2])
    # Training has gone back, and saves this step again, which replaces the damaged checkpoint.
    ckpt.save(3, {"a": 33}).result()
    until(
        lambda: (
            [(info.step, info.abandoned) for info in scan(tmp_path)]
            == [(4, True), (3, False), (2, False)]
        )
    )
    assert Checkpointer(tmp_path).restore(state) == 3
    assert list(tmp_path.glob("*.replaced")) == []


def test_saving_a_step_again_replaces_it(tmp_path):
    ckpt = Checkpointer(tmp_path)
    for value in (1, 2):
        ckpt.save(5, {"a": value}).result()
    state = {"a": 0}
    ckpt.restore(state)
    assert state == {"a": 2}
    assert [path.name for path in contents(tmp_path)] == ["step-0000000005"]


def test_a_step_saved_again_keeps_its_pin_and_its_wants_and_nothing_that_was_found_of_the_former_bytes(
    tmp_path,
):
    with Checkpointer(tmp_path) as ckpt:
        path = ckpt.save(5, {"a": 1}).result()
        pin(path, by="me", now_s=1.0, why="kept")
        want(path, "evaluation", now_s=2.0)
        note_verified(path, by="me", now_s=3.0)
        note_metrics(path, {"loss": 1.0}, now_s=4.0)
        before = read_marks(path)
        ckpt.save(5, {"a": 2}).result()
        found = read_marks(path)
        assert (found.pinned, found.wanted) == (before.pinned, before.wanted)
        assert (found.verified, found.metrics) == (None, {})
        (path / MARKS_NAME).write_text("{")
        ckpt.save(5, {"a": 3}).result()
    found = read_marks(path)
    assert "the marks of the replaced checkpoint cannot be read" in found.pinned.why
    assert [each.name for each in contents(tmp_path)] == [path.name]
    assert verify(path).state == "verified"


def test_a_pin_waits_for_the_step_that_is_saved_again_and_holds_for_that(tmp_path):
    ckpt = Checkpointer(tmp_path)
    path = ckpt.save(5, {"a": 1}).result()
    with locked(path):
        pinning = threading.Thread(target=pin, args=(path,), kwargs={"by": "me", "now_s": 1.0})
        pinning.start()
        handle = ckpt.save(5, {"a": 2})
    pinning.join()
    handle.result()
    assert read_marks(path).pinned.by == "me"


def test_a_step_whose_former_save_a_crash_left_aside_keeps_the_pins_of_both(tmp_path):
    ckpt = Checkpointer(tmp_path)
    path = ckpt.save(5, {"a": 1}).result()
    want(path, "one", now_s=1.0)
    path.rename(replaced_path(path))
    ckpt.save(5, {"a": 2}).result()
    assert set(read_marks(path).wanted) == {"one"}
    shutil.copytree(path, replaced_path(path))
    want(replaced_path(path), "two", now_s=1.0)
    ckpt.save(5, {"a": 3}).result()
    assert set(read_marks(path).wanted) == {"one", "two"}
    assert not replaced_path(path).exists()
