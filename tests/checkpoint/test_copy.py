import ctypes

import pytest
import torch
from torch.nn import Parameter

from holdfast.checkpoint.distributed.collectives import Ranks
from holdfast.checkpoint.ipc.shared_buffer import Arena
from holdfast.checkpoint.snapshot.copy import (
    ChangeTracker,
    copy_into,
    live_digests,
    names_of,
    overlong,
    sources,
)
from holdfast.checkpoint.snapshot.early_copy import (
    SMALL_ALL_BYTES,
    SMALL_BYTES,
    SMALL_COUNT,
    EarlyCopies,
    small_places,
)
from holdfast.checkpoint.snapshot.plan import make_plan
from holdfast.checkpoint.state.capture import collect
from holdfast.checkpoint.writer.direct_io import write_file

LARGE = (1 << 17) // 4 + 5
"""The number of float32 elements of a tensor that is copied on its own."""


class Staged:
    """A planned state, in an arena of its own."""

    def __init__(self, state, early=(), shard_bytes=1 << 40):
        self.contents = collect(0, state, None)
        self.plan = make_plan(Ranks(), self.contents, shard_bytes=shard_bytes)
        tensors = self.contents.tensors
        self.snapshot = ChangeTracker(tensors, EarlyCopies().take(tensors, early))
        self.arena = Arena.make(self.plan.image.size_bytes)
        self.plan.image.write_frames(self.arena.image)
        self.views = self.plan.image.views(torch.frombuffer(self.arena.image, dtype=torch.uint8))

    def sources(self):
        return sources(self.plan, self.contents.leaves(self.plan.structure), self.snapshot)

    def copy(self):
        copy_into(self.plan, self.arena.image, self.views, self.sources())
        return self

    def __getitem__(self, name):
        return next(
            view
            for index, view in zip(self.plan.items, self.views, strict=True)
            if index.fqn == name
        )

    def changed(self):
        """Return the names of the tensors that were written to."""
        changed = {id(self.contents.tensors[place]) for place in self.snapshot.changed()}
        return [name for name, leaf in self.contents.leaves(None).items() if id(leaf) in changed]

    def close(self):
        self.views.clear()
        self.arena.close()


@pytest.fixture
def stage():
    made = []

    def staged(*arguments, **named):
        made.append(Staged(*arguments, **named))
        return made[-1]

    yield staged
    for each in made:
        each.close()


def raw(tensor):
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""


def inference(*shape):
    with torch.inference_mode():
        return torch.randn(*shape)


TENSORS = {
    "large": lambda: torch.randn(LARGE),
    "small": lambda: torch.randn(3),
    "0-d": lambda: torch.tensor(3),
    "empty": lambda: torch.zeros(0, 4),
    "bool": lambda: torch.rand(100) > 0.5,
    "bfloat16": lambda: torch.randn(LARGE).to(torch.bfloat16),
    "float8": lambda: torch.randn(500).to(torch.float8_e4m3fn),
    "nan": lambda: torch.full((5,), float("nan")),
    "transposed": lambda: torch.randn(7, 5).t(),
    "large transposed": lambda: torch.randn(300, 200).t(),
    "strided": lambda: torch.arange(2 * LARGE)[::2],
    "slice": lambda: torch.randn(3 * LARGE)[5 : LARGE + 5],
    "expanded": lambda: torch.randn(1, 5).expand(100, 5),
    "conjugated": lambda: torch.randn(10, dtype=torch.complex64).conj(),
    "large conjugated": lambda: torch.randn(LARGE, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(10, dtype=torch.complex64).conj().imag,
    "large negated": lambda: torch.randn(LARGE, dtype=torch.complex64).conj().imag,
    "negated in a row": lambda: torch._neg_view(torch.randn(10)),
    "parameter": lambda: Parameter(torch.randn(4, 4)),
    "of an inference": lambda: inference(5),
    "channels last": lambda: torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("early", [True, False], ids=["early", "late"])
def test_every_kind_is_copied_bit_for_bit_and_its_digests_are_those_of_what_is_written(
    stage, tmp_path, kind, early
):
    tensor = TENSORS[kind]()
    expected = raw(tensor)
    staged = stage({"t": tensor}, early=range(100) if early else ()).copy()
    assert staged["t"].dtype == tensor.dtype
    assert staged["t"].shape == tensor.shape
    assert raw(staged["t"]) == expected
    live = live_digests(staged.plan, staged.sources())
    written = b"".join(
        write_file(
            tmp_path / shard.name,
            staged.arena.image[shard.offset :],
            shard.size_bytes,
            [
                piece
                for piece in staged.plan.layout.pieces
                if 0 <= piece.offset - shard.offset < shard.size_bytes
            ],
        ).pieces
        for shard in staged.plan.layout.shards
    )
    assert live == written


def test_what_is_many_times_as_many_as_fit_one_call_is_copied_each_to_its_place(stage):
    state = {"many": [torch.full((number % 7,), float(number)) for number in range(700)]}
    staged = stage(state).copy()
    for number in range(700):
        assert torch.equal(staged[f"many.{number}"], state["many"][number])


def test_the_digests_of_a_tensor_longer_than_a_chunk_are_those_of_its_pieces(stage, tmp_path):
    staged = stage(
        {"a": torch.randn(10), "t": torch.randint(0, 256, (40 << 20,), dtype=torch.uint8)}
    ).copy()
    (shard,) = staged.plan.layout.shards
    assert len(set(staged.plan.pieces)) < len(staged.plan.pieces)
    written = write_file(
        tmp_path / "file", staged.arena.image, shard.size_bytes, staged.plan.layout.pieces
    )
    assert live_digests(staged.plan, staged.sources()) == written.pieces


def test_one_bit_of_one_tensor_changes_its_digest_alone_and_it_is_named(stage):
    state = {name: torch.randn(100) for name in "abc"}
    staged = stage(state)
    before = live_digests(staged.plan, staged.sources())
    state["b"].view(torch.int32)[99] ^= 1
    after = live_digests(staged.plan, staged.sources())
    differing = [
        place
        for place in range(len(before) // 8)
        if before[place * 8 :][:8] != after[place * 8 :][:8]
    ]
    assert names_of(staged.plan, differing) == ["b"]


IN_PLACE = {
    "add_": lambda tensor: tensor.add_(1),
    "copy_": lambda tensor: tensor.copy_(torch.zeros_like(tensor)),
    "index": lambda tensor: tensor.__setitem__(0, 5.0),
    "a view": lambda tensor: tensor[1:2].zero_(),
    "detached": lambda tensor: tensor.detach().zero_(),
    "out": lambda tensor: torch.add(tensor, 1, out=tensor),
    "foreach": lambda tensor: torch._foreach_add_([tensor], 1),
}


@pytest.mark.parametrize("how", IN_PLACE)
def test_a_tensor_that_was_written_to_since_the_call_is_found(stage, how):
    state = {"a": torch.ones(3), "b": torch.ones(3), "c": Parameter(torch.ones(3))}
    staged = stage(state)
    assert staged.changed() == []
    with torch.no_grad():
        IN_PLACE[how](state["b"])
    assert staged.changed() == ["b"]


def test_a_step_of_an_optimizer_is_found_in_all_that_it_changes(stage):
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    staged = stage({"model": model, "optimizer": optimizer})
    model(torch.ones(3)).sum().backward()
    assert staged.changed() == []
    optimizer.step()
    names = {"weight", "bias"}
    assert {
        name.removeprefix("model.") for name in staged.changed() if name.startswith("model.")
    } == names
    for part in ("exp_avg", "exp_avg_sq", "step"):
        assert f"optimizer.state.0.{part}" in staged.changed()


def test_a_tensor_made_in_inference_does_not_hide_the_changes_of_others(stage):
    state = {"average": inference(3), "b": torch.ones(3)}
    staged = stage(state)
    state["b"].add_(1)
    assert staged.changed() == ["b"]


def test_those_that_were_copied_in_the_call_have_the_values_of_the_call_and_are_not_told(stage):
    state = {"early": torch.zeros(5), "late": torch.zeros(5)}
    staged = stage(state, early=[0])
    state["early"].fill_(7)
    state["late"].fill_(7)
    staged.copy()
    assert staged["early"].eq(0).all()
    assert staged["late"].eq(7).all()
    assert staged.changed() == ["late"]


def test_places_beyond_the_tensors_are_no_matter(stage):
    stage({"a": torch.zeros(2)}, early=range(1000)).copy()


def test_small_ones_are_early_large_ones_and_more_than_enough_are_not():
    small = torch.empty(SMALL_BYTES, dtype=torch.uint8)
    large = torch.empty(SMALL_BYTES + 1, dtype=torch.uint8)
    assert small_places([large, small, large, torch.tensor(1)]) == [3, 1], "the smallest first"
    enough = SMALL_ALL_BYTES // SMALL_BYTES
    assert small_places([small] * enough) == list(range(enough))
    counts = [torch.tensor(1)] * 7
    assert small_places([small] * (enough + 1) + counts) == list(range(enough + 1, enough + 8)), (
        "some are as none"
    )
    steps = [torch.tensor(1.0)] * (SMALL_COUNT + 1)
    assert small_places(steps + counts) == list(range(SMALL_COUNT + 1, SMALL_COUNT + 8)), (
        "each takes its time"
    )


def test_the_buffers_of_a_batch_norm_are_early():
    model = torch.nn.BatchNorm1d(4096)
    tensors = collect(0, {"model": model}, None).tensors
    early = {id(tensors[place]) for place in small_places(tensors)}
    assert all(id(tensor) in early for tensor in tensors if tensor.shape in ((), (4096,)))


def test_a_plain_value_fills_its_slot_and_leaves_nothing_of_the_one_before(stage):
    import io

    staged = stage({"v": "x" * 300})
    for text in ("y" * 310, "z"):
        staged.contents = collect(0, {"v": text}, None)
        staged.copy()
        (blob,) = (
            blob
            for index, blob in zip(staged.plan.items, staged.plan.image.blobs, strict=True)
            if index.fqn == "v"
        )
        content = bytes(staged.arena.image[blob.offset : blob.offset + blob.length])
        assert torch.load(io.BytesIO(content), weights_only=True) == text
        assert b"x" * 10 not in content
        assert text == "y" * 310 or b"y" * 10 not in content


def test_a_plain_value_that_outgrew_its_slot_is_seen(stage):
    staged = stage({"v": "x" * 300})
    assert not overlong(staged.plan, staged.sources())
    staged.contents = collect(0, {"v": "x" * 3000}, None)
    assert overlong(staged.plan, staged.sources())


def test_early_copies_are_made_in_the_memory_of_those_before():
    """They are small and many, and allocation takes as long as the copy."""
    tensors, copies = [torch.full((5,), 1.0), torch.ones(3, dtype=torch.int64)], EarlyCopies()
    first = copies.take(tensors, [1, 0])
    addresses = {copy.data_ptr() for copy in first.values()}
    for tensor in tensors:
        tensor.add_(1)
    second = copies.take(tensors, [0, 1])
    assert {copy.data_ptr() for copy in second.values()} == addresses
    assert all(torch.equal(second[id(tensor)], tensor) for tensor in tensors)
    tensors[0].add_(1)
    assert second[id(tensors[0])].eq(2).all(), "it is a copy"


@pytest.mark.parametrize(
    "other", [torch.ones(4), torch.ones(5, dtype=torch.float64), Parameter(torch.ones(5))]
)
def test_early_copies_are_of_what_is_there_now(other):
    copies = EarlyCopies()
    copies.take([torch.zeros(5)], [0])
    assert torch.equal(copies.take([other], [0])[id(other)], other)
    assert copies.take([other], [0])[id(other)].dtype is other.dtype
    assert copies.take([], [0]) == {}


def test_early_copies_made_in_inference_mode_are_written_to_outside_of_it():
    tensors, copies = [torch.zeros(5)], EarlyCopies()
    with torch.inference_mode():
        copies.take(tensors, [0])
    tensors[0].add_(1)
    assert copies.take(tensors, [0])[id(tensors[0])].eq(1).all()
