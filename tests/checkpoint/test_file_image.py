import io
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.format.file_image import (
    ALIGNMENT,
    LARGE_BYTES,
    MIN_PIECE_BYTES,
    Need,
    lay_out,
    slot_bytes,
    template,
)
from holdfast.checkpoint.format.plain_values import serialized
from holdfast.checkpoint.format.rank_layout import CHUNK_BYTES, PAGE_BYTES, pieces_of

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
]
SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (64,), (5, 3), (2, 3, 4, 5), (1000,)]


def filled(dtype, shape):
    """Return a tensor of random bytes."""
    count = torch.Size(shape).numel() * dtype.itemsize
    if dtype is torch.bool:
        return torch.randint(0, 2, shape).bool()
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def raw(tensor):
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


def image_of(needs, values, shard_bytes=1 << 40):
    image = lay_out(needs, prefix="__0_", shard_bytes=shard_bytes)
    memory = bytearray(max(image.size_bytes, 1))
    image.write_frames(memoryview(memory))
    for view, blob, value in zip(
        image.views(torch.frombuffer(memory, dtype=torch.uint8)), image.blobs, values, strict=True
    ):
        if view is None:
            memory[blob.data_offset : blob.data_offset + len(value)] = value
        else:
            view.copy_(value)
    return image, memory


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stock_torch_reads_every_type_and_shape_bit_for_bit(dtype):
    values = [filled(dtype, shape) for shape in SHAPES]
    image, memory = image_of([Need(dtype=dtype, shape=shape) for shape in SHAPES], values)
    for blob, value in zip(image.blobs, values, strict=True):
        content = bytes(memory[blob.offset : blob.offset + blob.length])
        found = torch.load(io.BytesIO(content), weights_only=True)
        assert (found.dtype, found.shape, found.is_contiguous()) == (value.dtype, value.shape, True)
        assert raw(found) == raw(value)
        # The tensor's bytes are at the image's offset, and can be mapped there.
        assert bytes(memory[blob.data_offset : blob.data_offset + blob.data_bytes]) == raw(value)
        assert blob.data_offset % ALIGNMENT == 0


def test_two_blobs_of_one_shape_hold_what_was_copied_into_each():
    values = [torch.full((50,), float(number)) for number in range(3)]
    image, memory = image_of([Need(dtype=torch.float32, shape=(50,))] * 3, values)
    for blob, value in zip(image.blobs, values, strict=True):
        found = torch.load(
            io.BytesIO(memory[blob.offset : blob.offset + blob.length]), weights_only=True
        )
        assert torch.equal(found, value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        -(1 << 1999),
        2.5,
        "text",
        b"",
        b"bytes",
        [1, [2, 3]],
        ({"a": {1: None}},),
        torch.Size([2]),
        "x" * 5000,
    ],
    ids=repr,
)
def test_a_plain_value_is_read_by_stock_torch_whatever_follows_it_in_its_slot(value):
    written = serialized(value)
    need = Need(dtype=None, slot_bytes=slot_bytes(len(written)))
    image, memory = image_of([need, need], [written, written])
    for blob in image.blobs:
        content = bytes(memory[blob.offset : blob.offset + blob.length])
        assert len(content) == need.slot_bytes > len(written)
        with torch.serialization.safe_globals([bytes]):
            found = torch.load(io.BytesIO(content), weights_only=True)
        assert (type(found), found) == (type(value), value)


@given(st.integers(0, 1 << 40))
def test_a_slot_has_room_for_a_quarter_more_and_is_not_wasteful(length):
    assert length * 5 // 4 <= slot_bytes(length) <= max(512, length * 2.5 + 2)


needs = st.lists(
    st.one_of(
        st.builds(Need, dtype=st.none(), slot_bytes=st.sampled_from([512, 1024, 1 << 16])),
        st.builds(
            Need,
            dtype=st.sampled_from([torch.float32, torch.bool, torch.complex128]),
            shape=st.sampled_from([*SHAPES, (10_000,), (PAGE_BYTES,)]),
        ),
    ),
    max_size=30,
)


@settings(deadline=None)
@given(needs, st.sampled_from([1, 1000, 5000, 100_000, 1 << 40]))
def test_nothing_overlaps_and_files_are_cut_at_whole_blobs(needs, shard_bytes):
    image = lay_out(needs, prefix="__3_", shard_bytes=shard_bytes)
    assert [blob.need for blob in image.blobs] == needs
    for blob in image.blobs:
        assert blob.offset % ALIGNMENT == 0
        assert (
            blob.offset
            <= blob.data_offset
            <= blob.data_offset + blob.data_bytes
            <= blob.offset + blob.length
        )
        if blob.need.dtype is not None:
            made = template(blob.need.dtype, blob.need.shape)
            assert blob.data_bytes == torch.Size(blob.need.shape).numel() * blob.need.dtype.itemsize
            assert (blob.data_offset - blob.offset, blob.length) == (
                len(made.head),
                len(made.head) + made.data_bytes + len(made.tail),
            )
            assert blob.data_offset % ALIGNMENT == 0
    for before, after in itertools.pairwise(image.blobs):
        assert before.offset + before.length <= after.offset

    assert [shard.name for shard in image.shards] == [
        f"__3_{number}.distcp" for number in range(len(image.shards))
    ]
    for before, after in itertools.pairwise(image.shards):
        assert before.offset + before.size_bytes <= after.offset
        # A file ends only before a blob that would make it too long.
        first = next(blob for blob in image.blobs if blob.file == after.name)
        assert before.size_bytes + first.length > shard_bytes
    for shard in image.shards:
        assert shard.offset % PAGE_BYTES == 0
        own = [blob for blob in image.blobs if blob.file == shard.name]
        assert own[0].offset == shard.offset
        for blob in own:
            assert blob.file_offset == blob.offset - shard.offset
            assert blob.file_offset + blob.length <= shard.size_bytes
        assert len(own) == 1 or own[-1].file_offset + own[-1].length <= shard_bytes
    assert {blob.file for blob in image.blobs} == {shard.name for shard in image.shards}
    assert image.size_bytes >= max(
        (shard.offset + shard.size_bytes for shard in image.shards), default=0
    )
    assert image.size_bytes % PAGE_BYTES == 0


def test_a_template_takes_no_memory_of_the_tensors_size():
    made = template(torch.float32, (1 << 38,))
    assert made.data_bytes == 1 << 40
    assert len(made.head) + len(made.tail) < 5000


@pytest.mark.parametrize("shard_bytes", [40 << 20, 1 << 40])
def test_chunks_end_in_no_small_blob_and_cut_no_short_piece_off_the_data_of_a_large_one(
    shard_bytes,
):
    moved = 0
    for more in range(-3000, 600, 50):  # the first chunk ends in each part after the first tensor
        counts = (
            CHUNK_BYTES + more,
            700,
            CHUNK_BYTES - 700,
            LARGE_BYTES - 1,
            2 * CHUNK_BYTES + more,
        )
        needs = [Need(dtype=torch.uint8, shape=(count,)) for count in counts]
        image = lay_out(
            [*needs, Need(dtype=None, slot_bytes=512)], prefix="__0_", shard_bytes=shard_bytes
        )
        parts = [(blob, part) for blob in image.blobs for part in blob.parts]
        for piece, part in pieces_of([each for _, each in parts], image.shards):
            blob, (offset, _) = parts[part]
            if not blob.is_large:
                assert piece == (blob.offset, blob.length)
            elif offset == blob.data_offset:
                assert piece.length >= MIN_PIECE_BYTES
                assert (piece.offset - blob.data_offset) % ALIGNMENT == 0, "a GPU reads it in words"
        pairs = [
            (one, other) for one, other in itertools.pairwise(image.blobs) if one.file == other.file
        ]
        gaps = [other.offset - one.offset - one.length for one, other in pairs]
        assert min(gaps, default=0) >= 0
        moved += sum(gap >= ALIGNMENT for gap in gaps)
    assert moved, "some had to be"
