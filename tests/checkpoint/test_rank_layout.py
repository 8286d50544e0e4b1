from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format import rank_layout
from holdfast.checkpoint.format.rank_layout import Layout, Piece, Shard, pieces_of

CHUNK = rank_layout.CHUNK_BYTES
PAGE = 4096
numbers = st.integers(0, 2**62)


@given(
    rank=st.integers(0, 10_000),
    world_size=st.integers(1, 10_000),
    torch=st.text(),
    shards=st.lists(st.builds(Shard, st.text(min_size=1), numbers, numbers)),
    pieces=st.lists(st.builds(Piece, numbers, numbers)),
    metadata=st.binary(),
)
def test_what_is_packed_is_unpacked(rank, world_size, torch, shards, pieces, metadata):
    layout = Layout(
        rank=rank,
        world_size=world_size,
        torch=torch,
        shards=tuple(shards),
        pieces=tuple(pieces),
        metadata=metadata,
    )
    again = Layout.unpack(layout.pack())
    assert again == layout
    assert {type(each) for each in again.pieces} <= {Piece}
    assert {type(each) for each in again.shards} <= {Shard}
    assert again.size_bytes == sum(shard.size_bytes for shard in shards)


lengths = st.one_of(
    st.integers(0, 5 * PAGE), st.integers(CHUNK - 100, CHUNK + 100), st.integers(0, 3 * CHUNK)
)
files = st.lists(
    st.lists(st.tuples(st.integers(1, 2000), lengths, st.integers(0, 200)), min_size=1), min_size=1
)


@given(files)
def test_pieces_are_all_the_data_in_order_and_no_chunk_of_a_file_cuts_one(files):
    """`files` has the lengths of each tensor's head, data and tail."""
    data, shards, at = [], [], 0
    for number, blobs in enumerate(files):
        begin = at
        for head, length, tail in blobs:
            data.append((at + head, length))
            at += head + length + tail
        shards.append(Shard(f"{number}", begin, at - begin))
        at = -(-at // PAGE) * PAGE
    found = pieces_of(data, shards)

    # Joined again, the pieces are the data of the right tensor.
    joined = {}
    for (offset, length), index in found:
        assert length > 0
        begin, so_far = joined.get(index, (offset, 0))
        assert offset == begin + so_far
        joined[index] = (begin, so_far + length)
    assert joined == {index: piece for index, piece in enumerate(data) if piece[1]}
    assert [piece.offset for piece, _ in found] == sorted(piece.offset for piece, _ in found)

    for (offset, length), _ in found:
        (shard,) = (
            each for each in shards if each.offset <= offset < each.offset + each.size_bytes
        )
        assert offset + length <= shard.offset + shard.size_bytes
        assert (offset - shard.offset) // CHUNK == (offset + length - 1 - shard.offset) // CHUNK


def test_nothing_is_cut_where_nothing_need_be():
    shards = [Shard("a", 0, CHUNK), Shard("b", CHUNK, CHUNK + 10)]
    found = pieces_of([(64, CHUNK - 64), (CHUNK, CHUNK + 10)], shards)
    assert found == (
        (Piece(64, CHUNK - 64), 0),
        (Piece(CHUNK, CHUNK), 1),
        (Piece(2 * CHUNK, 10), 1),
    )
