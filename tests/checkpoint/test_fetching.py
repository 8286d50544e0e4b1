"""Show that a restore fetches what a lost or damaged folder lacks, and goes on where storage fails."""

import functools
from pathlib import Path

import pytest
from pushed_steps import flip, state_of
from storage_world import BRIEF, QUICK, SMALL, make_checkpoint, new_bucket, proxy
from waiting import until

from holdfast.checkpoint import Checkpointer
from holdfast.checkpoint.distributed import collectives
from holdfast.checkpoint.format.paths import step_path
from holdfast.checkpoint.storage import uploader
from holdfast.checkpoint.storage.object_store import Objects, Patience
from holdfast.checkpoint.storage.remote import Remote
from holdfast.core.errors import NoVerifiedCheckpoint, StorageFailed

pytestmark = pytest.mark.usefixtures("no_pusher_is_left")


def test_a_new_node_restores_what_was_pushed(tmp_path, there):
    with Checkpointer(tmp_path / "lost", push_to=there.as_uri()) as ckpt:
        ckpt.save(7, state_of(7))
    state = state_of(0)
    assert Checkpointer(tmp_path / "new", push_to=there.as_uri()).restore(state) == 7
    assert state["value"] == 7
    assert state["t"].eq(7).all()


def test_a_damaged_one_is_fetched_again(tmp_path, there):
    folder = tmp_path / "here"
    with Checkpointer(folder, push_to=there.as_uri()) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step)).result()
    flip(step_path(folder, 2) / "__0_0.distcp")
    state = state_of(0)
    assert Checkpointer(folder, push_to=there.as_uri()).restore(state) == 2
    assert state["t"].eq(2).all()


def test_one_that_is_damaged_there_too_is_passed_over(tmp_path, there):
    folder = tmp_path / "here"
    with Checkpointer(folder, push_to=there.as_uri()) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step)).result()
    for path in (
        *there.glob("step-0000000002.*/__0_0.distcp"),
        step_path(folder, 2) / "__0_0.distcp",
    ):
        flip(path)
    state = state_of(0)
    assert Checkpointer(folder, push_to=there.as_uri()).restore(state) == 1
    assert state["t"].eq(1).all()


def test_a_damaged_one_that_storage_has_not_is_passed_over(tmp_path, there):
    """The newest checkpoint is often not pushed yet."""
    folder = tmp_path / "here"
    with Checkpointer(folder, push_to=there.as_uri()) as ckpt:
        ckpt.save(1, state_of(1))
    with Checkpointer(folder) as ckpt:
        ckpt.save(2, state_of(2))
    flip(step_path(folder, 2) / "__0_0.distcp")
    state = state_of(0)
    assert Checkpointer(folder, push_to=there.as_uri()).restore(state) == 1
    assert state["t"].eq(1).all()


@pytest.mark.parametrize("local", [(3,), (1, 3)])
def test_an_older_one_is_fetched_where_what_is_here_is_damaged(tmp_path, there, local):
    """The fetched step is not the damaged step, and newer than the other local steps."""
    folder = tmp_path / "here"
    with Checkpointer(tmp_path / "lost", push_to=there.as_uri()) as ckpt:
        ckpt.save(2, state_of(2))
    with Checkpointer(folder) as ckpt:
        for step in local:
            ckpt.save(step, state_of(step)).result()
    flip(step_path(folder, 3) / "__0_0.distcp")
    state = state_of(0)
    assert Checkpointer(folder, push_to=there.as_uri()).restore(state) == 2
    assert state["t"].eq(2).all()


@pytest.mark.parametrize("damage", [flip, Path.unlink])
def test_storage_that_has_nothing_whole_is_no_reason_to_begin_anew(tmp_path, there, damage):
    with Checkpointer(tmp_path / "lost", push_to=there.as_uri()) as ckpt:
        ckpt.save(1, state_of(1))
    damage(next(there.glob("step-*/__0_0.distcp")))
    ckpt = Checkpointer(tmp_path / "new", push_to=there.as_uri())
    assert ckpt.has_any()
    with pytest.raises(
        NoVerifiedCheckpoint, match=r"No checkpoint in storage verifies \(step 1: .*__0_0.distcp"
    ):
        ckpt.restore(state_of(0))


def test_of_two_saves_of_a_step_the_other_is_fetched_where_the_newer_is_damaged(tmp_path, there):
    url = there.as_uri()
    for value in (1, -1):
        with Checkpointer(tmp_path / str(value), push_to=url) as ckpt:
            ckpt.save(2, state_of(value))
    newer, _ = Remote(url).scan()
    flip(there / newer.name / "__0_0.distcp")
    state = state_of(0)
    assert Checkpointer(tmp_path / "new", push_to=url).restore(state) == 2
    assert state["value"] == 1


def test_storage_that_cannot_be_reached_stops_nothing_but_a_restore_from_nothing(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setattr(uploader, "Remote", functools.partial(Remote, patience=BRIEF))
    with Checkpointer(tmp_path / "here") as ckpt:
        ckpt.save(1, state_of(1))
    state = state_of(0)
    assert Checkpointer(tmp_path / "here", push_to="s3://bucket/run").restore(state) == 1
    assert "The checkpoint in storage was not fetched" in caplog.text
    with Checkpointer(tmp_path / "here") as ckpt:
        ckpt.save(2, state_of(2))
    flip(step_path(tmp_path / "here", 2) / "__0_0.distcp")
    assert Checkpointer(tmp_path / "here", push_to="s3://bucket/run").restore(state) == 1
    assert "Step 2 could not be fetched from storage either" in caplog.text
    with pytest.raises(StorageFailed):
        Checkpointer(tmp_path / "empty", push_to="s3://bucket/run").restore(state)


def test_while_a_fetch_gets_on_the_time_of_its_section_begins_anew(
    tmp_path, there, link, monkeypatch
):
    with Checkpointer(tmp_path / "lost", push_to=there.as_uri()) as ckpt:
        ckpt.save(7, state_of(7))
    monkeypatch.setattr(collectives, "_LOOK_EVERY_S", 0.01)
    real = Objects.read_range

    def at_length(self, *which):
        until(lambda: real(self, *which) and link.sections.count("restore") > 1)
        return real(self, *which)

    monkeypatch.setattr(Objects, "read_range", at_length)
    assert Checkpointer(tmp_path / "new", push_to=there.as_uri()).restore(state_of(0)) == 7


def test_what_does_not_get_on_has_no_more_time_than_its_section(link, monkeypatch):
    monkeypatch.setattr(collectives, "_LOOK_EVERY_S", 0.01)
    looks = []
    collectives.Ranks().first_at_length(
        lambda: until(lambda: len(looks) > 3), signs=lambda: looks.append(0) or 0, section="restore"
    )
    assert link.sections == []


def test_storage_that_only_stalls_does_not_keep_a_job_with_a_checkpoint_waiting(
    s3, tmp_path, monkeypatch, caplog
):
    hurried = Patience(request_timeout_s=1.0, tries=2, attempts=1, first_pause_s=0.001)
    monkeypatch.setattr(uploader, "_HURRIED", hurried)
    make_checkpoint(tmp_path, 1, sizes=SMALL)
    with proxy(s3, lambda *_: "stall") as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.url)
        uploader.fetch_newer(Remote(f"s3://{new_bucket(s3)}/run", patience=QUICK), tmp_path)
        until(lambda: len(between.requests) >= 2)  # one that was given up may arrive later
        assert len(between.requests) == 2
    assert "The checkpoint in storage was not fetched; step 1 of" in caplog.text


def test_a_look_at_storage_that_gets_on_gives_signs_where_there_is_a_checkpoint_here_too(
    tmp_path, there
):
    make_checkpoint(tmp_path, 1, sizes=SMALL)
    remote = Remote(there.as_uri())
    uploader.fetch_newer(remote, tmp_path)
    assert remote.signs > 0
