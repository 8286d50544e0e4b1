"""Show which pushed checkpoints are not fetched: deleted ones, abandoned ones, and those of another run."""

import pytest
from pushed_steps import flip, state_of, steps_of
from waiting import until

from holdfast.checkpoint import Checkpointer, Retention, scan
from holdfast.checkpoint.format.paths import step_path
from holdfast.checkpoint.storage.push import pushed_names
from holdfast.checkpoint.storage.remote import Remote
from holdfast.core.errors import BadUse

pytestmark = pytest.mark.usefixtures("no_pusher_is_left")


def is_pushed(folder, url, step):
    """Return True if the step's current save in storage was pushed from `folder`."""
    return (
        Remote(url).find(step).name in pushed_names(folder, url) if step in steps_of(url) else False
    )


def save_all(folder, url, *steps, sign=1, **options):
    """Save and push each step, and restore nothing."""
    with Checkpointer(folder, push_to=url, keep=None, **options) as ckpt:
        for step in steps:
            ckpt.save(step, state_of(sign * step)).result()
            until(lambda step=step: is_pushed(folder, url, step))


def restored(folder, url, **options):
    state = state_of(0)
    step = Checkpointer(folder, push_to=url, **options).restore(state)
    return step, state["value"]


def test_what_was_taken_away_after_it_was_pushed_does_not_come_back(tmp_path, there, caplog):
    folder, url = tmp_path / "here", there.as_uri()
    with Checkpointer(folder, push_to=url) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step)).result()
            until(lambda step=step: steps_of(url)[:1] == [step])
    step_path(folder, 2).rename(tmp_path / "away")
    assert Checkpointer(folder, push_to=url).restore(state_of(0)) == 1
    assert (
        f"Step 2 is in storage but was removed from {folder}, so it is not fetched" in caplog.text
    )
    assert (
        Checkpointer(tmp_path / "new", push_to=url).restore(state_of(0)) == 2
    )  # if there is nothing else
    with Checkpointer(tmp_path / "elsewhere", push_to=url) as ckpt:
        ckpt.save(3, state_of(3))
    assert Checkpointer(folder, push_to=url).restore(state_of(0)) == 3


def test_what_is_damaged_was_not_taken_away(tmp_path, there):
    folder, url = tmp_path / "here", there.as_uri()
    with Checkpointer(folder, push_to=url) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step)).result()
    (step_path(folder, 2) / "__0_0.distcp").unlink()
    state = state_of(0)
    assert Checkpointer(folder, push_to=url).restore(state) == 2
    assert state["t"].eq(2).all()


def test_what_another_node_pushed_was_not_taken_away(tmp_path, there):
    """After going back, the job continued on another node and came back, up to the same steps."""
    folder, elsewhere, url = tmp_path / "here", tmp_path / "elsewhere", there.as_uri()
    with Checkpointer(folder, push_to=url) as ckpt:
        for step in (1, 20, 30):
            ckpt.save(step, state_of(step)).result()
            until(lambda step=step: steps_of(url)[:1] == [step])
    for step in (20, 30):
        step_path(folder, step).rename(tmp_path / f"away{step}")
    for step in (10, 20):
        with Checkpointer(elsewhere, push_to=url) as ckpt:
            ckpt.save(step, state_of(-step))
        state = state_of(0)
        assert Checkpointer(folder, push_to=url).restore(state) == step
        assert state["value"] == -step


def test_what_was_taken_away_stays_so_after_further_pushes_of_lower_steps(tmp_path, there):
    folder, url = tmp_path / "here", there.as_uri()
    with Checkpointer(folder, push_to=url) as ckpt:
        for step in (1, 20, 30):
            ckpt.save(step, state_of(step)).result()
            until(lambda step=step: steps_of(url)[:1] == [step])
    for step in (20, 30):
        step_path(folder, step).rename(tmp_path / f"away{step}")
    with Checkpointer(folder, push_to=url) as ckpt:
        assert ckpt.restore(state_of(0)) == 1
        ckpt.save(10, state_of(10))
    assert steps_of(url) == [30, 20, 10, 1]
    assert Checkpointer(folder, push_to=url).restore(state_of(0)) == 10


def test_where_the_save_that_replaced_another_was_taken_away_the_other_does_not_come_either(
    tmp_path, there
):
    elsewhere, folder, url = tmp_path / "elsewhere", tmp_path / "here", there.as_uri()
    for into, sign in ((elsewhere, -1), (folder, 1)):
        with Checkpointer(into, push_to=url) as ckpt:
            for step in (1, 2):
                ckpt.save(step, state_of(sign * step)).result()
                until(lambda into=into, step=step: is_pushed(into, url, step))
    step_path(folder, 2).rename(tmp_path / "away")
    state = state_of(0)
    assert Checkpointer(folder, push_to=url).restore(state) == 1
    assert state["value"] == 1


def test_what_a_policy_deleted_comes_in_the_place_of_a_damaged_one(tmp_path, there):
    folder, url = tmp_path / "here", there.as_uri()
    with Checkpointer(folder, push_to=url, keep=Retention(last=1, every_steps=50)) as ckpt:
        for step in (50, 60, 80):
            ckpt.save(step, state_of(step)).result()
            until(lambda step=step: is_pushed(folder, url, step))
    with Checkpointer(folder, keep=Retention(last=1, every_steps=50)) as ckpt:
        ckpt.save(90, state_of(90))
    assert [info.step for info in scan(folder)] == [90, 50]
    flip(step_path(folder, 90) / "__0_0.distcp")
    assert Checkpointer(folder, push_to=url).restore(state_of(0)) == 80


def test_of_storage_that_two_runs_share_each_has_its_own(tmp_path, there):
    url = there.as_uri()
    save_all(tmp_path / "old", url, 3000, run="old")
    with pytest.raises(
        BadUse,
        match=r"another run \(run 'old', step 3000\).*this is run 'new'.*--resume old.*fresh=True.*fetch\(",
    ):
        restored(tmp_path / "refused", url, run="new")
    fresh = {"run": "new", "fresh": True}
    ckpt = Checkpointer(tmp_path / "begun", push_to=url, **fresh)
    assert not ckpt.has_any()
    assert ckpt.restore(state_of(0)) == 0
    ckpt.close()
    save_all(tmp_path / "new", url, 10, 20, **fresh)
    assert restored(tmp_path / "lost 1", url, run="new") == (20, 20)
    assert Checkpointer(tmp_path / "lost 2", push_to=url, **fresh).has_any()
    assert restored(tmp_path / "lost 2", url, **fresh) == (20, 20)
    assert restored(tmp_path / "lost 3", url, run="old") == (3000, 3000)
    assert restored(tmp_path / "new", url, run="new") == (
        20,
        20,
    )  # has local steps: newer ones belong to another run


def test_what_another_run_has_in_storage_is_not_fetched_in_the_place_of_a_damaged_one(
    tmp_path, there
):
    folder, url = tmp_path / "new", there.as_uri()
    save_all(tmp_path / "old", url, 15, run="old")
    save_all(folder, url, 10, run="new")
    with Checkpointer(folder, run="new") as ckpt:
        ckpt.restore(state_of(0))
        ckpt.save(20, state_of(20)).result()
    flip(step_path(folder, 20) / "__0_0.distcp")
    assert restored(folder, url, run="new") == (10, 10)


def test_what_training_left_behind_is_not_fetched_unless_its_step_is_asked_for(tmp_path, there):
    folder, url = tmp_path / "lost", there.as_uri()
    save_all(folder, url, 20, 30, 40)
    with Checkpointer(folder, push_to=url, keep=None) as ckpt:
        assert ckpt.restore(state_of(0), step=20) == 20
        ckpt.save(25, state_of(-25)).result()
    new = tmp_path / "new"
    assert restored(new, url) == (25, -25)
    assert restored(new, url) == (25, -25)  # the only one there
    flip(step_path(new, 25) / "__0_0.distcp")
    flip(next(there.glob("step-0000000025.*/__0_0.distcp")))
    assert restored(new, url) == (20, 20)
    state = state_of(0)
    assert Checkpointer(tmp_path / "asked", push_to=url).restore(state, step=40) == 40


def test_what_training_left_behind_takes_no_place_of_those_that_stay_in_storage(tmp_path, there):
    folder, url = tmp_path / "here", there.as_uri()
    save_all(folder, url, 20, 30, 40)
    with Checkpointer(folder, push_to=url, keep=None, keep_pushed=2) as ckpt:
        assert ckpt.restore(state_of(0), step=20) == 20
        for step in (25, 45):
            ckpt.save(step, state_of(-step)).result()
            until(lambda step=step: is_pushed(folder, url, step))
    assert steps_of(url) == [45, 40, 30, 25]
