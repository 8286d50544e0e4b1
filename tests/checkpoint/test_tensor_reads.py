"""Test reads of any box of any saved tensor, byte by byte from the files."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from holdfast.checkpoint import Checkpointer
from holdfast.checkpoint.format.manifest import read_manifest
from holdfast.checkpoint.restore.open import open_checkpoint
from holdfast.checkpoint.restore.tensor_reads import read_items

SHAPES = [(), (7,), (5, 6), (3, 4, 5), (2, 3, 4, 3), (1, 8), (300, 700)]
SAVED = {
    f"t{number}": torch.randn(shape, dtype=torch.float64) for number, shape in enumerate(SHAPES)
}


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranges")
    with Checkpointer(folder) as ckpt:
        path = ckpt.save(1, {"saved": SAVED}).result()
    return open_checkpoint(path, read_manifest(path, step=1))


class Planner:
    """Return one target for each item."""

    def __init__(self, targets):
        self.targets = targets
        self.committed = []

    def resolve_tensor(self, item):
        return self.targets[item.dest_index.fqn]

    def commit_tensor(self, item, tensor):
        self.committed.append(item.dest_index.fqn)


def item_of(name, offsets, lengths):
    zeros = torch.Size([0] * len(offsets))
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(name),
        dest_offsets=zeros,
        storage_index=MetadataIndex(name, zeros),
        storage_offsets=torch.Size(offsets),
        lengths=torch.Size(lengths),
    )


@st.composite
def boxes(draw):
    name = draw(st.sampled_from(sorted(SAVED)))
    offsets, lengths = [], []
    for size in SAVED[name].shape:
        offsets.append(draw(st.integers(0, size - 1)))
        lengths.append(draw(st.integers(1, size - offsets[-1])))
    return name, offsets, lengths


def part_of(name, offsets, lengths):
    part = SAVED[name]
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        part = part.narrow(dim, offset, length)
    return part


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(box=boxes(), kind=st.sampled_from(["plain", "transposed", "of another type"]))
def test_any_box_is_read_into_any_target(opened, box, kind):
    name, offsets, lengths = box
    wanted = part_of(*box)
    target = torch.zeros(
        lengths, dtype=torch.float32 if kind == "of another type" else torch.float64
    )
    if kind == "transposed":
        target = torch.zeros(lengths[::-1], dtype=torch.float64).permute(
            tuple(reversed(range(len(lengths))))
        )
    planner = Planner({f"saved.{name}": target})
    read_items([item_of(f"saved.{name}", offsets, lengths)], planner, opened.metadata, opened.files)
    assert planner.committed == [f"saved.{name}"]
    assert torch.equal(target, wanted.to(target.dtype))


def test_a_target_that_is_negated_gets_what_was_saved(opened):
    wanted = SAVED["t2"]
    target = torch._neg_view(torch.zeros_like(wanted))
    assert target.is_neg()
    item = item_of("saved.t2", [0] * wanted.dim(), wanted.shape)
    read_items([item], Planner({"saved.t2": target}), opened.metadata, opened.files)
    assert torch.equal(target, wanted)
