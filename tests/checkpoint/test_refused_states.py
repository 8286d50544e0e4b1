"""Show that a state that cannot be saved or filled is refused by name and left as it was."""

import copy
import warnings

import numpy as np
import pytest
import torch
from checkpoint_training import assert_same
from waiting import contents

from holdfast.checkpoint import Checkpointer
from holdfast.core.errors import BadUse, StateMismatch


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


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a folder with a checkpoint, which no test changes."""
    folder = tmp_path_factory.mktemp("saved")
    state = {
        "model": {"w": torch.ones(3)},
        "items": [torch.ones(1), torch.ones(1)],
        "plain": 4,
        "first": 9,
    }
    with Checkpointer(folder) as ckpt:
        ckpt.save(1, state).result()
    return folder


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
def test_a_state_that_does_not_fit_is_named_and_left_alone(saved, target, named):
    # `first` fits, and would be filled before the error in the next entry.
    target = {"first": 0, **target}
    before = copy.deepcopy(target)
    rng_before = torch.get_rng_state()
    with pytest.raises(StateMismatch) as raised:
        Checkpointer(saved).restore(target)
    assert named in str(raised.value)
    assert_same(target, before)
    assert torch.equal(torch.get_rng_state(), rng_before)


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
