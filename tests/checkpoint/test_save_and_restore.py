"""Show that a restore returns what a save was given, bit by bit."""

import copy
import random
import shutil

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_training import Training, assert_same
from started_ranks import run_program

from holdfast.checkpoint import Checkpointer
from holdfast.checkpoint.restore import open as opening
from holdfast.core.errors import BadUse, NotFound, NoVerifiedCheckpoint, StateMismatch


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


def test_every_kind_of_tensor(tmp_path):
    kinds = {
        "transposed": torch.arange(12).view(3, 4).t(),
        "nan": torch.tensor(float("nan")),
        "empty": torch.zeros(0, 3),
        "bfloat16": torch.randn(4).to(torch.bfloat16),
        "bool": torch.tensor([True, False]),
        "complex": torch.randn(3, dtype=torch.complex64),
        "slice": torch.arange(10)[2:5],
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    Checkpointer(tmp_path).save(0, kinds).result()
    targets = {
        kind: torch.zeros_like(tensor).requires_grad_(tensor.requires_grad)
        for kind, tensor in kinds.items()
    }
    Checkpointer(tmp_path).restore(targets)
    for kind, tensor in kinds.items():
        assert_same(targets[kind].detach(), tensor.detach(), kind)


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


def test_an_empty_folder_restores_nothing(tmp_path):
    state = {"a": 1}
    assert Checkpointer(tmp_path / "new" / "folder").restore(state) == 0
    assert state == {"a": 1}


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
