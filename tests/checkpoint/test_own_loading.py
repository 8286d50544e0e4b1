"""Test that an object's own `load_state_dict` receives the saved state, of any structure."""

import copy
from collections import Counter

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from holdfast.checkpoint import Checkpointer
from holdfast.checkpoint.convert.import_dcp import import_dcp
from holdfast.core.errors import StateMismatch


def save(folder, state):
    with Checkpointer(folder) as ckpt:
        ckpt.save(1, state).result()


def restore(folder, state):
    return Checkpointer(folder).restore(state)


class Holder:
    """Return a value as state, and accept it again."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return self.value

    def load_state_dict(self, state):
        self.value = state


def equal(one, other):
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return (
            isinstance(one, torch.Tensor)
            and isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and (one.equal(other))
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


VALUES = [
    {"t": torch.arange(6)},
    {"t": torch.arange(3)},
    {"t": torch.arange(3.0)},
    {"t": torch.tensor(1.5)},
    {"t": None},
    {"t": [torch.ones(1)]},
    {"t": [torch.ones(1), torch.zeros(2)]},
    {"t": []},
    {"t": [1.0]},
    {"t": {"a": torch.ones(1)}},
    {"t": {}},
    {},
    {"other": 1},
    {"t": torch.ones(1).expand(3)},
]


def test_what_an_object_saved_is_what_it_gets_back(tmp_path):
    save(tmp_path, {f"x{number}": Holder(value) for number, value in enumerate(VALUES)})
    for fresh in VALUES:
        copies = [{key: copy.deepcopy(value) for key, value in fresh.items()} for _ in VALUES]
        holders = {f"x{number}": Holder(value) for number, value in enumerate(copies)}
        assert restore(tmp_path, holders) == 1
        for holder, value in zip(holders.values(), VALUES, strict=True):
            assert equal(holder.value, value), (fresh, value)


def test_its_tensors_are_read_in_place_where_they_fit_and_each_into_one_place(tmp_path):
    save(tmp_path, {"x": Holder({"a": torch.ones(3), "b": torch.zeros(3), "c": torch.ones(2)})})
    place = torch.full((3,), 7.0)
    holder = Holder({"a": place, "b": place, "c": place})
    restore(tmp_path, {"x": holder})
    assert holder.value["a"] is place
    assert equal(holder.value, {"a": torch.ones(3), "b": torch.zeros(3), "c": torch.ones(2)})


def test_what_is_not_an_objects_is_compared_as_before(tmp_path):
    save(tmp_path, {"x": {"t": torch.arange(6)}})
    with pytest.raises(StateMismatch, match=r"'x\.t' is int64\[3\] in the state and int64\[6\]"):
        restore(tmp_path, {"x": {"t": torch.arange(3)}})


def test_the_kinds_of_dicts_come_from_the_object(tmp_path):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 1.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 3, 5])
    save(tmp_path, {"scheduler": scheduler})
    fresh = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1])
    restore(tmp_path, {"scheduler": fresh})
    assert fresh.milestones == Counter({3: 2, 5: 1})
    assert type(fresh.milestones) is Counter


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_empty_dict_that_dcp_forgets_is_that_of_the_object(tmp_path):
    dcp.save({"x": {"full": {"n": 1}}}, checkpoint_id=tmp_path / "dcp")
    import_dcp(tmp_path / "dcp", tmp_path / "run", step=1)
    holder = Holder({"full": {}, "empty": {}})
    restore(tmp_path / "run", {"x": holder})
    assert holder.value == {"full": {"n": 1}, "empty": {}}


class Extra(nn.Module):
    """A layer whose extra state has its own size, as in TransformerEngine."""

    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.value = value

    def get_extra_state(self):
        return self.value

    def set_extra_state(self, state):
        self.value = state


EXTRA = [
    torch.arange(5, dtype=torch.uint8),
    torch.zeros(0, dtype=torch.uint8),
    {"amax": torch.ones(3), "recipe": "delayed"},
    {"amax": torch.ones(1)},
    [torch.ones(1)],
    None,
    "text",
]


def with_extra(values):
    return nn.Sequential(nn.Linear(2, 2), *map(Extra, values))


def test_extra_state_likewise_deep_within_a_model(tmp_path):
    save(tmp_path, {"model": with_extra(EXTRA)})
    for fresh in EXTRA:
        model = with_extra([copy.deepcopy(fresh) for _ in EXTRA])
        assert restore(tmp_path, {"model": model}) == 1
        for layer, value in zip(model[1:], EXTRA, strict=True):
            assert equal(layer.value, value), (fresh, value)


class Queue(nn.Module):
    """A buffer that grows, and a name that has changed."""

    def __init__(self, size, name="seen"):
        super().__init__()
        self.register_buffer(name, torch.arange(size))

    def _load_from_state_dict(self, state, prefix, *_arguments):
        (name,) = [name for name in state if name.startswith(prefix)]
        self.register_buffer(name.removeprefix(prefix), state[name])


@pytest.mark.parametrize("fresh", [0, 3, 9])
@pytest.mark.parametrize("name", ["seen", "renamed"])
def test_a_module_that_loads_by_itself_judges_what_is_below_it(tmp_path, fresh, name):
    save(tmp_path, {"model": nn.Sequential(nn.Linear(2, 2), Queue(3))})
    model = nn.Sequential(nn.Linear(2, 2), Queue(fresh, name))
    restore(tmp_path, {"model": model})
    assert model[1].seen.equal(torch.arange(3))


def test_the_modules_beside_it_are_compared_before_anything_changes(tmp_path):
    save(tmp_path, {"model": nn.Sequential(nn.Linear(2, 2), Queue(3))})
    model = nn.Sequential(nn.Linear(3, 3), Queue(0))
    before = model[0].weight.clone()
    with pytest.raises(StateMismatch, match=r"'model\.0\.weight' is float32\[3, 3\] in the state"):
        restore(tmp_path, {"model": model})
    assert model[0].weight.equal(before)
    assert model[1].seen.numel() == 0


def test_a_batch_norm_is_no_module_that_loads_by_itself(tmp_path):
    save(tmp_path, {"model": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))})
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(3))
    before = model[0].weight.clone()
    with pytest.raises(StateMismatch, match=r"'model\.1\.weight' is float32\[3\] in the state"):
        restore(tmp_path, {"model": model})
    assert model[0].weight.equal(before)
