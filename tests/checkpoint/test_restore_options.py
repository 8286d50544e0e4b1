"""Test the choice of the checkpoint, partial restores, and the listing of steps."""

import random
import shutil

import pytest
import torch
from torch import nn

from holdfast.checkpoint import Checkpointer
from holdfast.checkpoint.catalog.annotations import note_damaged, note_metrics
from holdfast.checkpoint.catalog.catalog import scan
from holdfast.checkpoint.format.paths import step_path
from holdfast.core.errors import BadUse, NotFound, NoVerifiedCheckpoint, StateMismatch


def save(folder, *states, **options):
    with Checkpointer(folder, keep=None, **options) as ckpt:
        for step, state in enumerate(states, start=1):
            ckpt.save(step, state).result()


def damage(folder, step):
    path = next(step_path(folder, step).glob("*.distcp"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save(folder, *({"n": torch.tensor([step, step])} for step in (1, 2, 3)))
    return folder


@pytest.fixture
def three(saved, tmp_path):
    """Return a copy of a folder with the steps 1 to 3."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.parametrize("step", [1, 2, 3, None])
def test_a_step_that_is_asked_for_is_restored(three, step):
    state = {"n": torch.zeros(2, dtype=torch.int64)}
    assert Checkpointer(three).restore(state, step=step) == (step or 3)
    assert state["n"].tolist() == [step or 3] * 2


def test_a_step_that_is_not_there_is_refused_with_those_that_are(three):
    state = {"n": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(
        NotFound, match=r"no checkpoint of step 4 in .*\. The steps there are: 1, 2, 3\."
    ):
        Checkpointer(three).restore(state, step=4)
    with pytest.raises(NotFound, match="The steps there are: none"):
        Checkpointer(three / "empty").restore(state, step=4)
    assert not state["n"].any()


def test_a_damaged_step_is_not_replaced_by_another_one(three):
    damage(three, 2)
    with pytest.raises(
        NoVerifiedCheckpoint, match=r"step 2: .*Step 2 was requested: give another one"
    ):
        Checkpointer(three).restore({"n": torch.zeros(2, dtype=torch.int64)}, step=2)
    assert Checkpointer(three).restore({}) == 3


@pytest.mark.parametrize("step", [-1, 1.5, "1", True])
def test_a_step_that_is_no_number_of_one_is_refused(three, step):
    with pytest.raises(BadUse, match=r"step is .*; allowed is a whole number from 0 on"):
        Checkpointer(three).restore({}, step=step)


@pytest.mark.parametrize("loss", ["is gone", "is damaged"])
def test_a_step_comes_from_storage_where_it_is_not_whole_here(three, tmp_path_factory, loss):
    there = tmp_path_factory.mktemp("there").as_uri()
    with Checkpointer(three, push_to=there, keep=None) as ckpt:
        ckpt.save(4, {"n": torch.tensor([4, 4])}).result()
    new = tmp_path_factory.mktemp("new")
    if loss == "is damaged":
        shutil.copytree(three, new, dirs_exist_ok=True)
        damage(new, 4)
    save(new, {"n": torch.tensor([1, 1])})
    state = {"n": torch.zeros(2, dtype=torch.int64)}
    with Checkpointer(new, push_to=there) as ckpt:
        assert ckpt.restore(state, step=4) == 4
        with pytest.raises(NotFound):
            ckpt.restore(state, step=9)
    assert state["n"].tolist() == [4, 4]


def test_the_steps_there_are(three):
    ckpt = Checkpointer(three)
    assert (ckpt.all_steps(), ckpt.latest_step()) == ([1, 2, 3], 3)
    (step_path(three, 3) / "holdfast.json").unlink()
    assert (ckpt.all_steps(), ckpt.latest_step()) == ([1, 2], 2)
    note_damaged(step_path(three, 2), "it was", by="test", now_s=1.0)
    assert (ckpt.all_steps(), ckpt.latest_step()) == ([1], 1)
    empty = Checkpointer(three / "empty")
    assert (empty.all_steps(), empty.latest_step(), empty.best_step("loss")) == ([], None, None)


def test_the_best_step(three):
    ckpt = Checkpointer(three)
    assert ckpt.best_step("loss") is None
    for step, loss in ((1, 0.5), (2, 0.25), (3, float("nan"))):
        note_metrics(step_path(three, step), {"loss": loss, "same": 1.0}, now_s=1.0)
    assert (ckpt.best_step("loss"), ckpt.best_step("loss", mode="max"), ckpt.best_step("same")) == (
        2,
        1,
        3,
    )
    with pytest.raises(BadUse, match="mode of 'loss' is 'least'"):
        ckpt.best_step("loss", mode="least")


def test_the_generators_are_left_alone(tmp_path, caplog):
    save(tmp_path, {"n": torch.ones(1)})
    random.seed(5)
    torch.manual_seed(5)
    python, torchs = random.getstate(), torch.get_rng_state()
    caplog.clear()
    assert Checkpointer(tmp_path).restore({"n": torch.zeros(1)}, rng=False) == 1
    assert random.getstate() == python
    assert torch.get_rng_state().equal(torchs)
    assert not [record for record in caplog.records if record.name == "holdfast"]
    Checkpointer(tmp_path).restore({"n": torch.zeros(1)})
    assert not torch.get_rng_state().equal(torchs)


def model(*names, dtype=torch.float32, size=2):
    return nn.ModuleDict({name: nn.Linear(size, size, bias=False, dtype=dtype) for name in names})


def test_what_fits_is_restored_and_the_rest_is_named(tmp_path):
    old = model("a", "b")
    save(tmp_path, {"model": old, "data": {"x": torch.ones(1), "y": 2}, "n": 3})
    new = model("b", "c")
    kept = new["c"].weight.clone()
    state = {"model": new, "data": {"x": torch.zeros(1), "z": 5}, "m": 4, "all": {}}
    with pytest.raises(StateMismatch):
        Checkpointer(tmp_path).restore(state)
    restored = Checkpointer(tmp_path).restore(state, strict=False)
    assert restored == 1
    assert isinstance(restored, int)
    assert restored.missing == ("model.c.weight", "data.z", "m")
    assert restored.unexpected == ("model.a.weight", "data.y")
    assert new["b"].weight.equal(old["b"].weight)
    assert new["c"].weight.equal(kept)
    assert (state["data"]["x"].item(), state["data"]["z"], state["m"]) == (1.0, 5, 4)
    assert state["data"].keys() == {"x", "z"}


def test_what_fits_wholly_has_no_such_names(tmp_path):
    save(tmp_path, {"model": model("a")})
    restored = Checkpointer(tmp_path).restore({"model": model("a")}, strict=False)
    assert (restored, restored.missing, restored.unexpected) == (1, (), ())
    none = Checkpointer(tmp_path / "empty").restore({"model": model("a")}, strict=False)
    assert (none, none.missing, none.unexpected) == (0, (), ())
    assert type(Checkpointer(tmp_path).restore({"model": model("a")})) is int


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_floating_point_gets_the_type_of_the_state(tmp_path, dtype):
    old = model("a")
    save(tmp_path, {"model": old, "n": torch.ones(2, dtype=torch.int64)})
    new = model("a", dtype=dtype)
    place = new["a"].weight.data_ptr()
    with pytest.raises(StateMismatch, match=r"'model\.a\.weight' is"):
        Checkpointer(tmp_path).restore({"model": new})
    Checkpointer(tmp_path).restore({"model": new}, strict=False)
    assert new["a"].weight.dtype is dtype
    assert new["a"].weight.data_ptr() == place
    assert new["a"].weight.equal(old["a"].weight.to(dtype))


@pytest.mark.parametrize(
    ("target", "named"),
    [
        (
            lambda: {"model": model("a", size=3)},
            r"'model\.a\.weight' is float32\[3, 3\] in the state",
        ),
        (
            lambda: {"n": torch.ones(2)},
            r"'n' is float32\[2\] in the state and int64\[2\] in the checkpoint",
        ),
    ],
)
def test_other_shapes_and_kinds_are_refused_all_the_same(tmp_path, target, named):
    save(tmp_path, {"model": model("a"), "n": torch.ones(2, dtype=torch.int64)})
    with pytest.raises(StateMismatch, match=named):
        Checkpointer(tmp_path).restore(target(), strict=False)


def stepped(of, names):
    optimizer = torch.optim.AdamW([of[name].weight for name in names], lr=0.5)
    for number, name in enumerate(names, start=1):
        of[name].weight.grad = torch.full_like(of[name].weight, float(number))
    optimizer.step()
    return optimizer


def test_an_optimizer_keeps_the_state_of_the_parameters_that_are_left(tmp_path):
    old = model("a", "b")
    optimizer = stepped(old, "ab")
    save(tmp_path, {"model": old, "optimizer": optimizer})
    new = model("b", "c")
    other = torch.optim.AdamW(new.parameters(), lr=1.0)
    restored = Checkpointer(tmp_path).restore({"model": new, "optimizer": other}, strict=False)
    assert set(restored.missing) == {"model.c.weight", "optimizer: model.c.weight"}
    assert set(restored.unexpected) == {"model.a.weight", "optimizer: model.a.weight"}
    assert other.state[new["b"].weight]["exp_avg"].equal(
        optimizer.state[old["b"].weight]["exp_avg"]
    )
    assert new["c"].weight not in other.state
    assert other.param_groups[0]["lr"] == 0.5
    for name in "bc":
        new[name].weight.grad = torch.ones_like(new[name].weight)
    other.step()


class Renamed(nn.Module):
    """The former form of `model("a", "b")`, within other modules."""

    def __init__(self):
        super().__init__()
        self.layers = model("x", "y")


RENAMES = {
    "after the entry": {"a.weight": "layers.x.weight", "b.weight": "layers.y.weight"},
    "whole": {"model.a.weight": "model.layers.x.weight", "model.b.weight": "model.layers.y.weight"},
    "map": {"patterns": {r"a\.(.*)": r"layers.x.\1"}, "names": {"b.{n}": "layers.y.{n}"}},
    "prefix": {
        "prefix": "model.",
        "names": {"a.weight": "layers.x.weight", "b.weight": "layers.y.weight"},
    },
}


@pytest.mark.parametrize(
    ("way", "order"), [("whole", "xy"), *((way, "yx") for way in (*RENAMES, "file"))]
)
def test_names_of_the_checkpoint_become_those_of_the_state(tmp_path, way, order):
    old = model("a", "b")
    optimizer = stepped(old, "ab")
    save(tmp_path, {"model": old, "optimizer": optimizer})
    if way == "file":
        rename = tmp_path / "names.toml"
        rename.write_text(
            '[names]\n"a.weight" = "layers.x.weight"\n"b.weight" = "layers.y.weight"\n'
        )
    else:
        rename = RENAMES[way]
    new = Renamed()
    other = torch.optim.AdamW([new.layers[name].weight for name in order])
    assert Checkpointer(tmp_path).restore({"model": new, "optimizer": other}, rename=rename) == 1
    for before, after in (("a", "x"), ("b", "y")):
        assert new.layers[after].weight.equal(old[before].weight)
        moment = other.state[new.layers[after].weight]["exp_avg"]
        assert moment.equal(optimizer.state[old[before].weight]["exp_avg"])


def test_an_entry_may_get_another_name_and_what_is_dropped_is_left_out(tmp_path):
    old = model("a", "b")
    save(tmp_path, {"net": old, "n": 1})
    new = model("a")
    rename = {"names": {"net.a.weight": "model.a.weight"}, "drop": ["net.b.weight"]}
    restored = Checkpointer(tmp_path).restore({"model": new, "n": 0}, rename=rename, strict=False)
    assert (restored, restored.missing, restored.unexpected) == (1, (), ())
    assert new["a"].weight.equal(old["a"].weight)


@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(3, 2, bias=False), dict, lambda: {"weight": torch.zeros(2, 3)}]
)
def test_a_transposed_tensor_is_turned(tmp_path, make):
    old = nn.Linear(2, 3, bias=False)
    save(tmp_path, {"model": old})
    state = {"model": make()}
    Checkpointer(tmp_path).restore(state, rename={"transposed": ["weight"]})
    new = state["model"] if isinstance(state["model"], dict) else state["model"].state_dict()
    assert new["weight"].equal(old.weight.detach().t())


@pytest.mark.parametrize(
    ("rename", "named"),
    [
        (
            {"z.weight": "a.weight"},
            r"rename names tensors that are not in the checkpoint: 'z\.weight'",
        ),
        ({"b.weight": "a.weight"}, r"two tensors of the checkpoint become 'model\.a\.weight'"),
        ({"patterns": {"(": "a"}}, "is not an RE2 pattern"),
        ({"nmaes": {}}, "rename has an entry 'nmaes'"),
        ("missing.toml", r"missing\.toml cannot be read"),
    ],
)
def test_a_name_map_that_is_wrong_is_told_and_nothing_changes(tmp_path, rename, named):
    save(tmp_path, {"model": model("a", "b")})
    new = model("a", "b")
    before = new["a"].weight.clone()
    with pytest.raises(BadUse, match=named):
        Checkpointer(tmp_path).restore({"model": new}, rename=rename)
    assert new["a"].weight.equal(before)
    assert [info.step for info in scan(tmp_path)] == [1]


class Hooked(nn.Linear):
    """A module with a hook before loading, which checks its own names."""

    def __init__(self):
        super().__init__(2, 2)
        self.register_load_state_dict_pre_hook(lambda *_arguments: None)


def test_what_a_module_that_judges_by_itself_leaves_out_is_named_too(tmp_path):
    old = nn.Linear(2, 2)
    del old.bias
    old.register_parameter("scale", nn.Parameter(torch.ones(2)))
    old.bias = None
    save(tmp_path, {"model": old})
    new = Hooked()
    restored = Checkpointer(tmp_path).restore({"model": new}, strict=False)
    assert (restored.missing, restored.unexpected) == (("model.bias",), ("model.scale",))
    assert new.weight.equal(old.weight)
