import pytest
import torch
from checkpoint_training import assert_same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from holdfast.checkpoint import Checkpointer
from holdfast.checkpoint.state.tree import flatten, merge_skeletons, skeleton_from_paths
from holdfast.core.errors import BadUse

scalars: st.SearchStrategy = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.complex_numbers(allow_nan=False)
)
tensors = st.lists(st.integers(-9, 9), max_size=4).map(torch.tensor)
keys = st.text("abc", min_size=1, max_size=3) | st.integers(0, 30)
states = st.recursive(
    scalars
    | tensors
    | st.lists(scalars, max_size=3)
    | st.tuples(scalars, scalars)
    | st.just({1, "two"}),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture
def ckpt(tmp_path):
    with Checkpointer(tmp_path) as made:
        yield made


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(state=st.dictionaries(st.text("abcdef", min_size=1, max_size=3), states, max_size=3))
def test_any_nested_state_comes_back_as_it_was(ckpt, state):
    """All examples use one Checkpointer, so that the state's structure changes with each save."""
    ckpt.save(1, state)
    # Into nothing: every container is created, with its own types of keys.
    target = dict.fromkeys(state)
    assert ckpt.restore(target) == 1
    assert_same(target, state)
    # And into the state itself.
    assert ckpt.restore(state) == 1
    assert_same(target, state)


@settings(max_examples=100, deadline=None)
@given(state=st.dictionaries(st.text("abcdef", min_size=1, max_size=3), states, max_size=3))
def test_flat_names_are_those_of_dcp(state):
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    assert flatten(state).leaves.keys() == planner.state_dict.keys()


def test_skeletons_of_ranks_with_different_parts_are_joined():
    parts = [
        {"m": {"a": "m.a"}, "l": ["l.0"]},
        {"m": {"b": "m.b", "a": "m.a"}, "l": ["l.0", "l.1"]},
    ]
    assert merge_skeletons(parts) == {"m": {"a": "m.a", "b": "m.b"}, "l": ["l.0", "l.1"]}
    with pytest.raises(BadUse, match="disagree about the shape"):
        merge_skeletons([{"m": "m"}, {"m": {"a": "m.a"}}])


def test_a_skeleton_from_dcps_paths():
    paths = {
        "o.state.0.x": ("o", "state", "0", "x"),
        "o.groups.1.lr": ("o", "groups", 1, "lr"),
        "o.groups.0.lr": ("o", "groups", 0, "lr"),
        "7": ("7",),
    }
    assert skeleton_from_paths(paths) == {
        "o": {
            "state": {0: {"x": "o.state.0.x"}},
            "groups": [{"lr": "o.groups.0.lr"}, {"lr": "o.groups.1.lr"}],
        },
        "7": "7",
    }
