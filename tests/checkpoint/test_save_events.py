"""Show which events a save and a restore report, and that a slow or broken listener loses no save."""

import json
import threading
import time

from overlapping_saves import large, slow
from waiting import ENDS_S, until

from holdfast.checkpoint import Checkpointer, scan


def test_what_is_told(tmp_path, link):
    ckpt = Checkpointer(tmp_path, every=2)
    ckpt.save(1, {"a": 1}).result()
    assert (link.events, link.sections) == ([], [])
    path = ckpt.save(2, {"a": 1}).result()
    (event,) = link.of("checkpoint")
    assert event.pop("stall_s") == event.pop("call_s") + event.pop("fence_s") > 0
    assert event.pop("durable_s") > 0
    assert event.pop("write_gb_per_s") > 0
    size_bytes = scan(tmp_path)[0].size_bytes
    assert event.pop("lost_s") > 0
    assert event.pop("digest") == json.loads((path / "holdfast.json").read_text())["digest"]
    told = {
        "step": 2,
        "path": str(path),
        "size_bytes": size_bytes,
        "tier": "disk",
        "attested": True,
        "slowdown_s": None,
    }
    assert event == told
    ckpt.save(4, {"a": 1}).result().joinpath("__0_0.distcp").write_bytes(b"x")
    ckpt.restore({"a": 0})
    (event,) = link.of("restored")
    assert event.pop("restore_s") > 0
    (passed,) = event.pop("passed_over")
    assert event.pop("bytes_read") >= 4096
    assert event == {"step": 2, "path": str(path), "tier": "disk"}
    assert (passed["step"], passed["path"]) == (4, str(tmp_path / "step-0000000004"))
    assert "__0_0.distcp has 1 bytes" in passed["reason"]
    assert set(link.sections[:-1]) == {"save"}
    assert link.sections[-1] == "restore"


def test_what_it_cost_is_told(tmp_path, link):
    ckpt = slow(tmp_path, 0.3)
    # Four chunks; the last chunk waits for at least two large ones, whichever it is.
    ckpt.save(1, large(1, mib=49)).result(ENDS_S)
    ckpt.save(2, large(2, mib=49)).result(ENDS_S)
    for event in link.of("checkpoint"):
        assert event["durable_s"] >= 0.3 > 0
        assert event["stall_s"] < event["durable_s"]
        assert event["write_gb_per_s"] < 0.1


def test_waiting_returns_once_every_handle_is_done(tmp_path, link, monkeypatch):
    ckpt = Checkpointer(tmp_path)
    emit = link.emit

    def slowly(kind, data):
        time.sleep(0.1)
        emit(kind, data)

    monkeypatch.setattr(link, "emit", slowly)
    ckpt.save(1, {"a": 1})
    handle = ckpt.save(2, {"a": 1})
    ckpt.wait()
    assert handle.done()
    assert len(link.of("checkpoint")) == 2


def test_a_checkpoint_that_is_gone_before_it_is_told_of_was_saved_all_the_same(
    tmp_path, link, monkeypatch
):
    """With `keep=1` the next save may delete the checkpoint while this process is busy."""
    ckpt = Checkpointer(tmp_path, keep=1)
    gate, emit = threading.Event(), link.emit

    def held_back(kind, data):
        assert gate.wait(ENDS_S)
        emit(kind, data)

    monkeypatch.setattr(link, "emit", held_back)
    handles = [ckpt.save(step, {"a": step}) for step in (1, 2)]
    # The writing process goes on while the thread that receives its messages does not.
    until(
        lambda: (
            (tmp_path / "step-0000000002").exists() and not (tmp_path / "step-0000000001").exists()
        )
    )
    handles.append(ckpt.save(3, {"a": 3}))
    until(
        lambda: (
            (tmp_path / "step-0000000003").exists() and not (tmp_path / "step-0000000002").exists()
        )
    )
    gate.set()
    assert [handle.result(ENDS_S).name[-1] for handle in handles] == ["1", "2", "3"]
    assert all(
        event["digest"] for event in link.of("checkpoint")
    )  # reported, not read: storage may hang


def test_a_listener_that_breaks_does_not_keep_the_handle_waiting(tmp_path, link, monkeypatch):
    def breaks(kind, data):
        raise OSError("the line is dead")

    monkeypatch.setattr(link, "emit", breaks)
    assert Checkpointer(tmp_path).save(1, {"a": 1}).result(ENDS_S)
