import copy
import json
import logging
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_training import Training, assert_same
from started_ranks import run_program
from waiting import contents, until

from holdfast.checkpoint import Best, Checkpointer, Retention, scan, verify
from holdfast.checkpoint.catalog.annotations import (
    MARKS_NAME,
    locked,
    note_metrics,
    note_verified,
    pin,
    read_marks,
    want,
)
from holdfast.checkpoint.format.manifest import read_manifest
from holdfast.checkpoint.format.paths import replaced_path
from holdfast.checkpoint.ipc import memory_reservation
from holdfast.checkpoint.restore import open as opening
from holdfast.core.errors import BadUse, NotFound, NoVerifiedCheckpoint, SaveFailed, StateMismatch


def test_objects_come_back_bit_equal_and_go_on_alike(tmp_path):
    ours = Training().run(5)
    path = Checkpointer(tmp_path).save(5, ours.objects).result()
    assert path == tmp_path / "step-0000000005"
    ours.run(4)

    fresh = Training(seed=1)
    assert Checkpointer(tmp_path).restore(fresh.objects) == 5
    fresh.run(4)
    for name, ours_object in ours.objects.items():
        assert_same(fresh.objects[name].state_dict(), ours_object.state_dict(), name)


def test_a_forced_save_is_made_whatever_every_says_and_once(tmp_path):
    with Checkpointer(tmp_path, every=100, keep=None) as ckpt:

        def forced(step):
            handle = ckpt.save(step, {"a": step}, force=True)
            assert handle.result() == tmp_path / f"step-{step:010d}"
            return handle.step

        assert ckpt.save(7, {"a": 7}).step is None
        assert (forced(8), forced(8)) == (8, None)
        assert ckpt.save(100, {"a": 100}).step == 100
        assert forced(100) is None
        assert ckpt.restore({"a": 0}) == 100
        assert ckpt.save(50, {"a": 50}).step is None  # training has gone back
        assert forced(100) == 100
    assert [info.step for info in scan(tmp_path)] == [100, 8]
    with Checkpointer(tmp_path, every=100) as ckpt:
        ckpt.restore({"a": 0})
        handle = ckpt.save(100, {"a": 100}, force=True)
        assert (handle.step, handle.result()) == (None, tmp_path / "step-0000000100")
        assert ckpt.save(101, {"a": 101}, force=True).step == 101


@pytest.mark.parametrize("on_failure", ["warn", "retry"])
def test_a_forced_save_that_failed_is_made_again_by_another_one(tmp_path, on_failure):
    folder = tmp_path / "checkpoints"
    with Checkpointer(folder, on_failure=on_failure) as ckpt:
        with pytest.raises(BadUse, match="Cannot save"):
            ckpt.save(1, {"a": object()}, force=True)
        assert ckpt.save(1, {"a": 1}, force=True).result().name == "step-0000000001"
        folder.rename(tmp_path / "away")
        with pytest.raises(SaveFailed):
            ckpt.save(2, {"a": 2}, force=True).result()
        (tmp_path / "away").rename(folder)
        assert ckpt.save(2, {"a": 2}, force=True).result().name == "step-0000000002"


def test_a_forced_save_of_a_step_that_was_restored_over_is_made(tmp_path):
    with Checkpointer(tmp_path, keep=None) as ckpt:
        for step in (5, 10):
            ckpt.save(step, {"a": step}).result()
        ckpt.wait()
        shutil.rmtree(tmp_path / "step-0000000010")
        assert ckpt.restore({"a": 0}) == 5
        assert ckpt.save(10, {"a": 11}, force=True).step == 10


def test_a_due_step_between_a_restored_one_and_the_next_is_made_up_for(tmp_path):
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(95, {"a": 95}).result()
    with Checkpointer(tmp_path, every=100) as ckpt:
        ckpt.restore({"a": 0})
        assert ckpt.save(103, {"a": 103}).step == 103


def test_a_forced_save_is_not_left_out_nor_is_one_that_was(tmp_path):
    tensor = torch.ones(9 << 20)
    with Checkpointer(tmp_path, when_busy="skip", keep=None, max_write_mib_s=60) as ckpt:
        for step in range(4):
            ckpt.before_update()
            last = ckpt.save(step, {"t": tensor})
        assert last.result() is None, "the disk is slow"
        assert ckpt.save(3, {"t": tensor}, force=True).result() == tmp_path / "step-0000000003"


def test_a_wrapped_model_that_does_not_fit_is_named_as_that(tmp_path):
    bare, wrapped = torch.nn.Linear(2, 2), torch.nn.ModuleDict({"module": torch.nn.Linear(2, 2)})
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"model": bare}).result()
        with pytest.raises(
            StateMismatch,
            match=r"'model' has .* wrapped .*: pass the model that is inside the wrapper",
        ):
            ckpt.restore({"model": wrapped})
        ckpt.save(2, {"model": wrapped}).result()
        with pytest.raises(
            StateMismatch,
            match=r"'model' has .* wrapped .*: pass the model in the wrapper that it was",
        ):
            ckpt.restore({"model": bare})


def test_a_fresh_optimizers_plain_state_dict_gets_its_missing_keys_in_place(tmp_path):
    ours = Training().run(3)
    saved = copy.deepcopy(ours.optimizer.state_dict())
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(3, {"optimizer": ours.optimizer.state_dict()}).result()

        fresh = Training(seed=1)
        theirs = fresh.optimizer.state_dict()
        state = {"optimizer": theirs}
        ckpt.restore(state)
    assert state["optimizer"] is theirs
    assert_same(theirs, saved)
    fresh.optimizer.load_state_dict(theirs)
    assert_same(fresh.optimizer.state_dict(), saved)


def test_tensors_and_state_dicts_are_filled_in_place_and_plain_values_replaced(tmp_path):
    state = {
        "weights": {"a": torch.arange(4.0), "deep": [{"b": torch.ones(2, 2)}, torch.tensor(3)]},
        "alone": torch.full((3,), 5, dtype=torch.int16),
        "step": 12,
        "losses": [1.5, 2.5],
    }
    Checkpointer(tmp_path).save(1, state).result()
    target = {
        "weights": {"a": torch.zeros(4), "deep": [{"b": torch.zeros(2, 2)}, torch.tensor(0)]},
        "alone": torch.zeros(3, dtype=torch.int16),
        "step": 0,
        "losses": [],
    }
    kept = [
        target["weights"],
        target["weights"]["a"],
        target["weights"]["deep"][0]["b"],
        target["alone"],
    ]
    kept.append(target["losses"])
    assert Checkpointer(tmp_path).restore(target) == 1
    assert_same(target, state)
    now = [
        target["weights"],
        target["weights"]["a"],
        target["weights"]["deep"][0]["b"],
        target["alone"],
    ]
    now.append(target["losses"])
    assert all(left is right for left, right in zip(kept, now, strict=True))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).view(3, 4).t(),
        torch.tensor(float("nan")),
        torch.zeros(0, 3),
        torch.randn(4).to(torch.bfloat16),
        torch.tensor([True, False]),
        torch.randn(3, dtype=torch.complex64),
        torch.arange(10)[2:5],
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=["transposed", "nan", "empty", "bfloat16", "bool", "complex", "slice", "parameter"],
)
def test_every_kind_of_tensor(tmp_path, tensor):
    Checkpointer(tmp_path).save(0, {"t": tensor}).result()
    target = torch.zeros_like(tensor).requires_grad_(tensor.requires_grad)
    Checkpointer(tmp_path).restore({"t": target})
    assert_same(target.detach(), tensor.detach())


def test_random_generators_continue_where_they_were(tmp_path):
    def draw():
        return (
            random.random(),
            random.gauss(0, 1),
            np.random.randn(3).tolist(),
            torch.randn(3).tolist(),
        )

    draw()
    ckpt = Checkpointer(tmp_path)
    ckpt.save(1, {}).result()
    expected = draw()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    ckpt.restore({})
    assert draw() == expected


def test_saving_does_not_draw_from_the_generators(tmp_path):
    before = (random.getstate(), torch.get_rng_state())
    Checkpointer(tmp_path).save(1, {"a": torch.ones(2)}).result()
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_stock_pytorch_loads_it(tmp_path):
    ours = Training().run(3)
    path = Checkpointer(tmp_path).save(3, ours.objects, per_rank={"position": 7}).result()
    fresh = Training(seed=1).run(1)
    theirs = {"model": fresh.model.state_dict(), "optimizer": fresh.optimizer.state_dict()}
    with pytest.warns(UserWarning, match=r"torch.distributed is disabled"):
        dcp.load(theirs, checkpoint_id=path)
    assert_same(theirs["model"], ours.model.state_dict())
    assert_same(theirs["optimizer"], ours.optimizer.state_dict())


def test_entries_that_nobody_asks_for_are_left_out(tmp_path):
    Checkpointer(tmp_path).save(1, {"a": 1, "b": torch.ones(2)}).result()
    state = {"a": 0}
    assert Checkpointer(tmp_path).restore(state) == 1
    assert state == {"a": 1}


@pytest.mark.parametrize(
    ("target", "named"),
    [
        ({"model": {"w": torch.zeros(3), "extra": torch.zeros(1)}}, "no 'model.extra'"),
        ({"model": {"w": torch.zeros(3)}, "other": 1}, "no 'other'"),
        ({"model": {"w": torch.zeros(2)}}, "'model.w' is float32[2] in the state and float32[3]"),
        ({"model": {"w": torch.zeros(3, dtype=torch.float64)}}, "'model.w' is float64[3]"),
        ({"model": {"w": {"x": 1}}}, "'model.w' is a dict"),
        ({"model": torch.zeros(3)}, "'model' is a tensor"),
        ({"model": [{}]}, "'model' is a list"),
        ({"items": [torch.zeros(1), torch.zeros(1), torch.zeros(1)]}, "'items' has 3 items"),
        ({"items": {"0": torch.zeros(1)}}, "'items' is a dict"),
        ({"plain": torch.zeros(1)}, "'plain' is a tensor in the state and a plain value"),
    ],
)
def test_a_state_that_does_not_fit_is_named_and_left_alone(tmp_path, target, named):
    saved = {
        "model": {"w": torch.ones(3)},
        "items": [torch.ones(1), torch.ones(1)],
        "plain": 4,
        "first": 9,
    }
    Checkpointer(tmp_path).save(1, saved).result()
    # `first` fits, and would be filled before the error in the next entry.
    target = {"first": 0, **target}
    before = copy.deepcopy(target)
    rng_before = torch.get_rng_state()
    with pytest.raises(StateMismatch) as raised:
        Checkpointer(tmp_path).restore(target)
    assert named in str(raised.value)
    assert_same(target, before)
    assert torch.equal(torch.get_rng_state(), rng_before)


def test_an_empty_folder_restores_nothing(tmp_path):
    state = {"a": 1}
    assert Checkpointer(tmp_path / "new" / "folder").restore(state) == 0
    assert state == {"a": 1}


def test_nothing_is_done_and_the_callable_not_called_unless_due(tmp_path):
    ckpt = Checkpointer(tmp_path, every=10)
    handle = ckpt.save(9, lambda: pytest.fail("called"))
    assert (handle.step, handle.done(), handle.result(0)) == (None, True, None)
    assert contents(tmp_path) == []
    handle = ckpt.save(10, lambda: {"a": 1})
    assert (handle.step, handle.result(10)) == (10, tmp_path / "step-0000000010")


def test_a_stop_saves_whatever_is_due_and_leaves(tmp_path, stop_at):
    link = stop_at(7)
    ckpt = Checkpointer(tmp_path, every=100)
    assert ckpt.save(6, {"a": 6}).step is None
    assert link.left_at is None
    ckpt.save(7, {"a": 7}).result()
    assert link.left_at == 7
    state = {"a": 0}
    assert ckpt.restore(state) == 7


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
    ckpt = Checkpointer(tmp_path, keep=None)
    for step in range(5):
        ckpt.save(step, {"a": step}).result()
    assert len(scan(tmp_path)) == 5


def test_damaged_ones_neither_count_nor_push_out_good_ones(tmp_path, caplog):
    for step in (1, 2, 3):
        Checkpointer(tmp_path, keep=None).save(step, {"a": step}).result()
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


def test_a_save_below_older_ones_keeps_itself(tmp_path):
    for step in (100, 200):
        Checkpointer(tmp_path, keep=None).save(step, {"a": step}).result()
    Checkpointer(tmp_path, keep=1).save(1, {"a": 1}).result()
    until(lambda: [info.step for info in scan(tmp_path)] == [200, 1])


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
    assert "the marks of the one that it replaced are not known" in found.pinned.why
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


def test_too_little_memory_for_one_snapshot_is_one_sentence(tmp_path):
    ckpt = Checkpointer(tmp_path, max_memory_gib=1 / 1024, on_failure="raise")
    with pytest.raises(
        SaveFailed,
        match=r"A snapshot needs 4,\d{3},\d{3} bytes of memory, and max_memory_gib allows 1,048,",
    ):
        ckpt.save(1, {"t": torch.ones(1 << 20)})
    assert ckpt.save(2, {"t": torch.ones(1 << 10)}).result()


def test_too_little_memory_for_two_snapshots_is_enough_for_one_after_the_other(tmp_path, caplog):
    with Checkpointer(tmp_path, max_memory_gib=6 / 1024, keep=None) as ckpt:
        for step in range(4):
            ckpt.save(step, {"t": torch.full((1 << 20,), float(step))})
            assert len(ckpt._engine._seats._seats) <= 1
            ckpt.before_update()
    assert caplog.text.count("max_memory_gib allows one snapshot of 4,") == 1
    assert [verify(info).state for info in scan(tmp_path)] == ["verified"] * 4


def test_it_raises_only_where_checkpoints_exist_and_none_verifies(tmp_path):
    ckpt = Checkpointer(tmp_path)
    (ckpt.save(1, {"a": 1}).result() / "holdfast.json").unlink()
    state = {"a": 0}
    with pytest.raises(NoVerifiedCheckpoint, match=r"step 1: there is no manifest.*start over"):
        ckpt.restore(state)
    assert state == {"a": 0}


def test_per_rank_states_come_back_and_can_be_listed(tmp_path):
    ckpt = Checkpointer(tmp_path)
    ckpt.save(
        1,
        {"a": 1},
        per_rank={"data": {"position": 41, 7: [torch.ones(2)]}, "seen": torch.arange(3)},
    ).result()
    mine = {"data": {"position": 0}}
    ckpt.restore({"a": 0}, per_rank=mine)
    assert_same(mine, {"data": {"position": 41, 7: [torch.ones(2)]}})
    (theirs,) = ckpt.per_rank_states(1)
    assert_same(theirs, {"data": {"position": 41, 7: [torch.ones(2)]}, "seen": torch.arange(3)})
    with pytest.raises(NotFound, match=r"There is no checkpoint of step 2"):
        ckpt.per_rank_states(2)
    with pytest.raises(StateMismatch, match="no 'other'"):
        ckpt.restore({"a": 0}, per_rank={"other": 1})


def nested():
    with warnings.catch_warnings(action="ignore"):  # a new warning
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def quantized():
    with warnings.catch_warnings(action="ignore"):  # a deprecation
        return torch.quantize_per_tensor(torch.zeros(3, 3), 0.5, 0, torch.qint8)


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"config": {"path": object()}}, r"'config.path': a builtins.object"),
        ({"loss": np.float64(1.0)}, r"'loss': a numpy.float64.*\.item\(\)"),
        ({"losses": [1.0, np.zeros(2)]}, r"'losses': a numpy.ndarray"),
        ({"nested": {"model": torch.nn.Linear(1, 1)}}, r"'nested.model'.*at the top level"),
        ({"n": [1 << 2500]}, r"'n': an integer of 2501 bits"),
        ({"d": {(1, 2): 3}}, r"a key of 'd': a builtins.tuple"),
        ({"d": {1: 1, "1": 2}}, r"Two entries of the state have the name 'd.1'"),
        ({"a.b": 1, "a": {"b": 2}}, r"the name 'a.b'"),
        (
            {"m": {"t": torch.eye(3).to_sparse()}},
            r"'m.t': it is a sparse tensor. Save the dense tensors",
        ),
        ({"t": quantized()}, r"'t': it is a quantized tensor"),
        (
            {"m": torch.nn.LazyLinear(3)},
            r"'m.weight': it is an uninitialized tensor. Run the model once first",
        ),
        (
            {"t": torch.zeros(64, dtype=torch.uint8).view(torch.int4)},
            r"'t': PyTorch stores no tensor of torch.int4",
        ),
        ({"t": nested()}, r"'t': it is a nested tensor"),
        ({"t": torch.empty(3, device="meta")}, r"'t': it is a meta tensor. Give it memory first"),
        ({"holdfast": 1}, r"entry 'holdfast'"),
        ({3: 1}, r"entry 3"),
        ([1], r"must be a dict"),
    ],
)
def test_a_state_that_could_not_be_read_back_is_refused_at_save(tmp_path, state, named):
    with pytest.raises(BadUse, match=named):
        Checkpointer(tmp_path).save(1, state).result()
    assert contents(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (
            {"every": 0},
            "every is 0; allowed is a whole number of steps from 1 on, a datetime.timedelta above 0, or",
        ),
        ({"every": "10min"}, "every is '10min'"),
        ({"every": True}, "every is True"),
        ({"keep": 0}, "keep is 0"),
        ({"on_failure": "exit"}, "on_failure is 'exit'; allowed are 'raise', 'warn' and 'retry'"),
        ({"when_busy": "drop"}, "when_busy is 'drop'; allowed are 'wait' and 'skip'"),
        ({"when_busy": "replace"}, 'does not exist any more. Use when_busy="skip"'),
        ({"timeout_s": 0}, "timeout_s is 0; allowed is a number above 0"),
        ({"max_write_mib_s": -1}, "max_write_mib_s is -1; allowed is a number above 0"),
        ({"max_memory_gib": 0}, "max_memory_gib is 0; allowed is a number above 0"),
        (
            {"max_device_memory_gib": -1},
            "max_device_memory_gib is -1; allowed is a number from 0 on",
        ),
        ({"sigterm_grace_s": 0}, "sigterm_grace_s is 0; allowed is a number above 0"),
    ],
)
def test_bad_arguments_are_named_before_any_work(tmp_path, arguments, named):
    with pytest.raises(BadUse) as raised:
        Checkpointer(tmp_path / "new", **arguments)
    assert named in str(raised.value)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "step", [-1, 1.0, True, "8", None, torch.tensor(7.0), torch.tensor(True), np.array([1, 2])]
)
def test_a_bad_step_is_named(tmp_path, step):
    with pytest.raises(BadUse, match="step is"):
        Checkpointer(tmp_path).save(step, {}).result()


@pytest.mark.parametrize("number", [np.int64, np.uint8, np.array, torch.tensor])
def test_a_number_of_another_type_is_taken_as_the_number_it_is(tmp_path, number):
    """Loaders and schedulers count steps in such types."""
    keep = Retention(
        last=number(2),
        every_steps=number(50),
        best=(Best(metric="loss", count=number(1), mode="min"),),
    )
    with Checkpointer(tmp_path, every=number(10), keep=keep) as ckpt:
        for step in (5, 10, 20, 50, 60, 70):
            handle = ckpt.save(number(step), {"a": step}, per_rank={"b": step})
            handle.result()
        assert type(handle.step) is int
        assert ckpt.per_rank_states(number(50)) == [{"b": 50}]
    assert [info.step for info in scan(tmp_path)] == [70, 60, 50]
    assert type(read_manifest(tmp_path / "step-0000000070", step=70).step) is int
    with Checkpointer(tmp_path, keep=number(1)) as ckpt:
        ckpt.save(number(80), {"a": 80}).result()
    assert [info.step for info in scan(tmp_path)] == [80]


def test_a_folder_below_a_file_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    for place in ("file", "file/checkpoints"):
        with pytest.raises(BadUse, match=r"is a file\. Give Checkpointer a folder"):
            Checkpointer(tmp_path / place)


def test_closing_twice_does_no_harm_and_saving_after_is_refused(tmp_path):
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {}).result()
        ckpt.wait()
    ckpt.close()
    with pytest.raises(BadUse, match="closed"):
        ckpt.save(2, {}).result()


def test_the_catalog_imports_no_torch():
    program = "import sys, holdfast.checkpoint, holdfast.checkpoint.catalog.catalog; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_who_is_read_only_restores_and_changes_nothing(tmp_path):
    with Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"a": 5})
    before = sorted((tmp_path / "run").rglob("*"))
    with Checkpointer(tmp_path / "run", read_only=True) as ckpt:
        state = {"a": 0}
        assert ckpt.restore(state) == 1
        assert state == {"a": 5}
        with pytest.raises(BadUse, match="read_only"):
            ckpt.save(2, state)
    assert sorted((tmp_path / "run").rglob("*")) == before
    with pytest.raises(NotFound, match=r"There is no checkpoint folder .*/other\. Give"):
        Checkpointer(tmp_path / "other", read_only=True)
    assert not (tmp_path / "other").exists(), "a wrong name makes no folder"
    with pytest.raises(BadUse, match="read_only"):
        Checkpointer(tmp_path / "run", read_only=True, push_to=str(tmp_path))


def test_a_trainer_with_very_many_open_files_saves(tmp_path):
    """For example a trainer that maps thousands of data files."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = 1200  # select(2) accepts 1,024
    if most < 2 * many:
        pytest.skip(f"this process may have {most} files open at most")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before, 2 * many), most))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(many)]
    try:
        with Checkpointer(tmp_path) as ckpt:
            ckpt.save(1, {"t": torch.ones(3)}).result(30)
            os.kill(ckpt._engine._writer.pid, signal.SIGKILL)
            ckpt.save(2, {"t": torch.ones(3)}).result(30)
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))
    assert [info.step for info in scan(tmp_path)] == [2, 1]


def test_a_node_short_of_memory_fails_the_save_and_no_training_that_is_only_to_be_warned(
    tmp_path, monkeypatch, link
):
    monkeypatch.setattr(memory_reservation, "available_memory_bytes", lambda: 0)
    with Checkpointer(tmp_path, on_failure="warn") as ckpt:
        with pytest.raises(
            SaveFailed, match=r"Step 1 was not saved: A snapshot needs .* of memory, and 0 are free"
        ):
            ckpt.save(1, {"t": torch.ones(3)}).result()
        monkeypatch.undo()
        ckpt.save(2, {"t": torch.ones(3)}).result()
    assert [info.step for info in scan(tmp_path)] == [2]


@pytest.mark.parametrize(
    "target",
    [
        torch.eye(3).to_sparse(),
        quantized(),
        torch.empty(3, 3, device="meta"),
    ],
    ids=["sparse", "quantized", "meta"],
)
def test_what_cannot_be_read_into_is_named_and_nothing_is_changed(tmp_path, target):
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"a": 1, "t": torch.eye(3)})
    state = {"a": 0, "t": target}
    with pytest.raises(StateMismatch, match=r"'t' is a (sparse|quantized|meta) tensor"):
        Checkpointer(tmp_path).restore(state)
    assert state["a"] == 0


def test_another_generator_of_numpy_continues_where_it_was(tmp_path):
    """The test runs in a new process, because other tests use NumPy's generator here."""
    script = (
        "import sys, numpy as np, holdfast\n"
        "for kind in ('PCG64', 'SFC64'):\n"
        "    for seed in (1, 2):\n"
        "        np.random.set_bit_generator(getattr(np.random, kind)(seed))\n"
        "        with holdfast.Checkpointer(f'{sys.argv[1]}/{kind}') as ckpt:\n"
        "            np.random.randn(3)\n"
        "            ckpt.save(1, {}).result() if seed == 1 else ckpt.restore({})\n"
        "        print(np.random.randn(3).tolist())\n"
    )
    drawn = run_program(script, tmp_path).stdout.splitlines()
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]
    for kind in ("PCG64", "SFC64"):
        with pytest.raises(BadUse, match=f"was a {kind} when this was saved, and is a MT19937"):
            Checkpointer(tmp_path / kind).restore({})


def test_a_step_that_is_saved_again_while_it_is_restored_is_restored_as_it_is_then(
    tmp_path, monkeypatch
):
    first, again = tmp_path / "first", tmp_path / "again"
    for folder, value in ((first, 1.0), (again, 2.0)):
        with Checkpointer(folder) as ckpt:
            ckpt.save(0, {"t": torch.zeros(5000)})
            ckpt.save(1, {"t": torch.full((5000,), value)})
    real = opening.open_checkpoint

    def open_and_replace(path, manifest, memory=None):
        opened = real(path, manifest, memory)
        if again.exists():
            shutil.rmtree(path)
            (again / path.name).rename(path)
            shutil.rmtree(again)
        return opened

    monkeypatch.setattr(opening, "open_checkpoint", open_and_replace)
    state = {"t": torch.zeros(5000)}
    assert Checkpointer(first).restore(state) == 1
    assert state["t"].eq(2).all()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("s3://bucket/run", "push_to='s3://bucket/run'"),
        ("gs://bucket/run", "push_to='gs://bucket/run'"),
        ("hf+x://a", "push_to='hf[+]x://a'"),
        (pathlib.PurePosixPath("s3://bucket/run"), "push_to='s3://bucket/run'"),
        ("file:///data/x", "plain path: /data/x$"),
        ("$STORAGE/run", "push_to='s3://bucket/run'"),
        ("", "is empty"),
        (" ", "is empty"),
        (None, "The path is None"),
        ("$NOT_SET_HERE/run", "[$]NOT_SET_HERE, which is not set"),
        ("${NOT_SET_HERE}/run", "[$]{NOT_SET_HERE}, which is not set"),
        ("~no-such-user/run", "a user without a home"),
    ],
)
def test_what_is_no_local_folder_is_refused_and_none_of_that_name_is_made(
    tmp_path, monkeypatch, given, said
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STORAGE", "s3://bucket")
    monkeypatch.delenv("NOT_SET_HERE", raising=False)
    with pytest.raises(BadUse, match=said):
        Checkpointer(given)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("given", ["~/run", "$HOME/run", "${HOME}/run", b"~/run", "../home/run"])
def test_home_and_variables_are_expanded(tmp_path, monkeypatch, given):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with Checkpointer(given) as ckpt:
        path = ckpt.save(1, {"a": 1}).result()
    assert path.resolve() == tmp_path / "home" / "run" / "step-0000000001"
    assert list((tmp_path / "work").iterdir()) == []


def test_a_folder_whose_name_looks_like_a_variable_is_taken_as_it_is(tmp_path, monkeypatch):
    monkeypatch.delenv("NOT_SET_HERE", raising=False)
    (tmp_path / "a$NOT_SET_HERE").mkdir()
    with Checkpointer(tmp_path / "a$NOT_SET_HERE") as ckpt:
        assert ckpt.save(1, {"a": 1}).result().parent == tmp_path / "a$NOT_SET_HERE"
