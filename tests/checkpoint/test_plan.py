import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn import Parameter

from holdfast.checkpoint.distributed.collectives import Ranks
from holdfast.checkpoint.snapshot import plan
from holdfast.checkpoint.snapshot.plan import make_plan
from holdfast.checkpoint.state.capture import collect
from holdfast.core.errors import BadUse

T = torch.arange(3.0)


def fits(planned, state):
    return make_plan(Ranks(), collect(0, planned, None), shard_bytes=1 << 40).fits(
        collect(0, state, None)
    )


@pytest.mark.parametrize(
    ("planned", "state"),
    [
        ({}, {}),
        ({"a": T, "b": {"c": [T, {}], "d": 1}}, {"a": T + 1, "b": {"c": [T * 2, {}], "d": 2}}),
        ({"a": {"x": T, "y": T}}, {"a": {"x": Parameter(T), "y": T}}),  # saved alike
        ({"a": 1}, {"a": True}),  # any plain value has a slot
        ({"a": None}, {"a": "text"}),
        ({"a": {}, "b": [1, 2]}, {"a": {}, "b": [3]}),
    ],
)
def test_a_state_of_the_same_shape_needs_no_plan_of_its_own(planned, state):
    assert fits(planned, state)


@pytest.mark.parametrize(
    ("planned", "state"),
    [
        ({"a": T}, {}),
        ({"a": T}, {"b": T}),
        ({"a": T}, {"a": T, "b": T}),
        ({"a": T}, {"a": T[:2]}),
        ({"a": T}, {"a": T.double()}),
        ({"a": T}, {"a": T.to("meta")}),  # as after a move to a GPU
        ({"a": T}, {"a": 1.0}),
        ({"a": 1.0}, {"a": T}),
        ({"a": {"x": T, "y": T}}, {"a": {"y": T, "x": T}}),
        ({"a": {"x": 1, "y": 2}}, {"a": {"y": 2, "x": 1}}),
        ({"a": 1, "b": {"c": {}}}, {"b": {"c": {}}, "a": 1}),
        ({"a": {"b": {}, "c": {}}}, {"a": {"c": {}, "b": {}}}),
        ({"a": {1: T}}, {"a": {True: T}}),
        ({"a": {1: T}}, {"a": {1.0: T}}),
        ({"a": {1: T}}, {"a": {"1": T}}),
        ({"a": {1: 5}}, {"a": {True: 5}}),
        ({"a": {1: {}}}, {"a": {True: {}}}),
        ({"a": {None: {}}}, {"a": {"None": {}}}),
        ({"a": {0: T}}, {"a": [T]}),
        ({"a": {}}, {"a": []}),
        ({"a": {"b": {}}}, {"a": {}}),
    ],
)
def test_a_state_of_another_shape_does_not_fit(planned, state):
    assert not fits(planned, state)


def test_a_shard_that_is_not_what_its_placement_says_is_refused():
    """Otherwise bytes beyond its end would be read, or bytes would be missing."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for rows in (6, 10):
            part = DTensor.from_local(
                torch.zeros(rows), mesh, [Shard(0)], run_check=False, shape=(8,), stride=(1,)
            )
            with pytest.raises(
                BadUse, match=rf"'t' is not sharded as .* has \({rows},\) of \(8,\), not \(8,\)"
            ):
                make_plan(Ranks(), collect(0, {"t": part}, None), shard_bytes=1 << 40)
    finally:
        dist.destroy_process_group()


def test_parts_that_are_still_to_be_added_up_are_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        part = DTensor.from_local(T, init_device_mesh("cpu", (1,)), [Partial()], run_check=False)
        with pytest.raises(
            BadUse, match=r"Cannot save 't': it is a partial tensor. Save its full_tensor"
        ):
            make_plan(Ranks(), collect(0, {"t": part}, None), shard_bytes=1 << 40)
    finally:
        dist.destroy_process_group()


def test_large_tensors_not_in_a_row_are_packed_as_far_as_there_is_room(monkeypatch, caplog):
    """On a GPU; here the CPU stands in for one."""
    monkeypatch.setattr(plan, "_GPU", "cpu")
    large = {f"turned-{mib}": torch.zeros(mib << 9, 512).t() for mib in (3, 1, 2)}
    state = {**large, "row": torch.zeros(1 << 18), "small": torch.zeros(3, 2).t()}
    for room_mib, packed in ((6, 3), (5.9, 2), (3, 2), (2.9, 1), (0, 0), (-1, 0)):
        caplog.clear()
        made = make_plan(
            Ranks(),
            collect(0, state, None),
            shard_bytes=1 << 40,
            room_bytes=lambda _, room=room_mib: room * (1 << 20),
        )
        [part] = made.on_devices
        names = made.names
        smallest = [f"turned-{mib}" for mib in (1, 2, 3)][:packed]
        assert {*smallest, "small"} <= set(names[part.first : part.direct])
        assert names[part.direct : part.end] == ["row"]
        assert set(large) - set(smallest) <= set(names[part.end :])
        assert ("holds up training" in caplog.text) == (packed < 3)
