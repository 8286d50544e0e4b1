import math
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed.checkpoint as dcp

from holdfast.checkpoint import Checkpointer
from holdfast.checkpoint.convert import diff as comparing
from holdfast.checkpoint.convert.diff import EntryDifference, compare_checkpoints
from holdfast.checkpoint.convert.inspect import open_for_reading, reading_verified, take_inventory
from holdfast.checkpoint.restore.dcp_reader import read
from holdfast.core.errors import CheckpointError, NotFound


def stock(path, state):
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path))
    return open_for_reading(path)


@pytest.fixture
def differences(tmp_path):
    """Return a function that saves two states and compares the checkpoints."""

    def find(a, b):
        return compare_checkpoints(stock(tmp_path / "a", a), stock(tmp_path / "b", b))

    return find


def test_the_same_state_is_the_same_whatever_is_in_it(differences):
    state = {
        "t": torch.tensor([1.0, math.nan, -0.0, math.inf]),
        "c": torch.tensor([1 + 2j], dtype=torch.complex128),
        "f8": torch.ones(5).to(torch.float8_e4m3fn),
        "none": torch.zeros(0, 3),
        "bool": torch.tensor([True]),
        "plain": (1, math.nan, "x", None, b"", {"k": [torch.ones(2)]}),
    }
    found = differences(state, state)
    assert (found.is_same, found.same) == (True, 6)


def test_each_difference_is_told(differences):
    found = differences(
        {
            "same": 1,
            "only a": 1,
            "n": 1,
            "t": torch.zeros(4),
            "d": torch.zeros(4),
            "kind": torch.ones(1),
            "i": torch.arange(4),
        },
        {
            "same": 1,
            "only b": torch.ones(1),
            "n": 1.0,
            "t": torch.zeros(2, 2),
            "d": torch.tensor([0, 0.5, -0.25, 0]),
            "kind": 1,
            "i": torch.tensor([0, 1, 2, 9]),
        },
    )
    assert not found.is_same
    assert (found.only_in_a, found.only_in_b, found.same) == (["only a"], ["only b"], 1)
    assert found.different == [
        EntryDifference(
            name="d",
            a="float32[4]",
            b="float32[4]",
            elements=4,
            differing=2,
            max_abs_difference=0.5,
        ),
        EntryDifference(name="i", a="int64[4]", b="int64[4]", elements=4, differing=1),
        EntryDifference(name="kind", a="float32[1]", b="plain value"),
        EntryDifference(name="n", a="plain value", b="plain value"),
        EntryDifference(name="t", a="float32[4]", b="float32[2, 2]"),
    ]


@pytest.mark.parametrize(
    ("a", "b", "differing", "largest"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0]), 1, 0.0),
        (torch.tensor([1.0, 2.0]), torch.tensor([math.inf, 2.0]), 1, math.inf),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 3j]), 1, 2.0),
        (
            torch.tensor([1 + 1j], dtype=torch.complex128),
            torch.tensor([4 + 5j], dtype=torch.complex128),
            1,
            5.0,
        ),
        (torch.ones(3).to(torch.float8_e5m2), torch.full((3,), 2.0).to(torch.float8_e5m2), 3, 1.0),
        (torch.ones(3).bfloat16(), torch.full((3,), 2.0).bfloat16(), 3, 1.0),
        (torch.tensor([True, False]), torch.tensor([True, True]), 1, None),
    ],
)
def test_elements_are_compared_by_their_bits(differences, a, b, differing, largest):
    (found,) = differences({"t": a}, {"t": b}).different
    assert (found.differing, found.max_abs_difference) == (differing, largest)


def test_a_difference_to_no_number_is_none(differences, monkeypatch):
    """Pieces are compared one by one: a NaN in one piece must survive a number in a later piece."""
    monkeypatch.setattr(comparing, "_AT_ONCE", 2)
    a, b = torch.zeros(7), torch.tensor([0, 1.0, 0, math.nan, 0, 0, 3.0])
    (found,) = differences({"t": a}, {"t": b}).different
    assert found.differing == 3
    assert math.isnan(found.max_abs_difference)


def test_a_value_that_may_not_be_unpickled_is_compared_by_its_bytes(differences):
    found = differences(
        {"p": timedelta(1), "q": timedelta(2)}, {"p": timedelta(1), "q": timedelta(3)}
    )
    assert [each.name for each in found.different] == ["q"]


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ({}, True),
        ({"tensor": torch.tensor([1.0, 3.0])}, False),
        ({"set": {1, 2, 4}}, False),
        ({"list": ["x", 1.0]}, False),
        ({"list": ["x"]}, False),
        ({"list": ("x", 1)}, False),
    ],
)
def test_plain_values_are_compared_by_what_they_are(differences, change, is_same):
    """The stored bytes differ: one value shares a text object, the other has two equal ones."""
    text = "text" * 20
    value = {
        "tensor": torch.tensor([1.0, 2.0]),
        "set": {1, 2, 3},
        "list": ["x", 1],
        "none": math.nan,
    }
    found = differences(
        {"p": (text, text, value)}, {"p": (text, "".join(list(text)), {**value, **change})}
    )
    assert found.is_same == is_same


def test_one_of_holdfast_and_one_of_dcp_alone_compare(tmp_path):
    model = torch.nn.Linear(3, 2)
    with Checkpointer(tmp_path / "ours") as ckpt:
        path = ckpt.save(1, {"model": model, "n": 5}).result()
    theirs = stock(tmp_path / "theirs", {"model": model.state_dict(), "n": 5})
    seen = []
    found = compare_checkpoints(
        open_for_reading(path), theirs, progress=lambda done, total: seen.append((done, total))
    )
    assert (found.same, found.different, found.only_in_b) == (3, [], [])
    assert {name.partition(".")[0] for name in found.only_in_a} == {"holdfast"}
    assert seen[-1] == (32, 32)


def test_the_inventory_names_every_tensor_and_adds_up(tmp_path):
    model = torch.nn.Linear(3, 2).bfloat16()
    with Checkpointer(tmp_path) as ckpt:
        opened = open_for_reading(
            ckpt.save(1, {"model": model, "n": 5, "deep": {"x": [torch.ones(2)]}}).result()
        )
    inventory = take_inventory(opened)
    ours = {each.name: each for each in inventory.tensors if each.entry != "holdfast"}
    assert {name: (each.dtype, each.shape, each.size_bytes) for name, each in ours.items()} == {
        "deep.x.0": ("float32", (2,), 8),
        "model.bias": ("bfloat16", (2,), 4),
        "model.weight": ("bfloat16", (2, 3), 12),
    }
    totals = {
        each.entry: (each.tensors, each.plain_values, each.size_bytes) for each in inventory.entries
    }
    assert totals.pop("holdfast")[1] > 1
    assert totals == {"deep": (1, 0, 8), "model": (2, 0, 16), "n": (0, 1, 0)}
    assert {name for each in inventory.tensors for name in each.files} <= opened.files.keys()
    assert "holdfast.json" not in opened.files


def test_a_copy_of_another_name_opens(tmp_path):
    with Checkpointer(tmp_path) as ckpt:
        path = ckpt.save(7, {"n": 5}).result()
    path.rename(tmp_path / "best")
    assert open_for_reading(tmp_path / "best").manifest.step == 7


def test_what_cannot_be_opened_is_said(tmp_path):
    with pytest.raises(
        NotFound, match=r"There is no checkpoint .*nowhere\. Give the folder of one step\."
    ):
        open_for_reading(tmp_path / "nowhere")
    with pytest.raises(NotFound, match=r"is not a checkpoint: it has no \.metadata"):
        open_for_reading(tmp_path)
    with Checkpointer(tmp_path) as ckpt:
        path = ckpt.save(1, {"t": torch.ones(100)}).result()
    data = next(path.glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    opened = open_for_reading(path)
    with (
        pytest.raises(
            CheckpointError, match=r"is damaged: .* does not match its checksum, .*\. Take another"
        ),
        reading_verified(opened) as files,
    ):
        read(path, opened.metadata, {"t": torch.empty(100)}, files)
    (path / ".metadata").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"is damaged: \.metadata"):
        open_for_reading(path)
