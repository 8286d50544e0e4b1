"""Check the assignment of chunks: each once, and evenly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.evaluate.types.model_manifest import Chunk, ModelFile, ModelManifest
from holdfast.evaluate.weights.assign import assign, reassign


def model(sizes):
    chunks = [Chunk(file=0, offset=0, size_bytes=size_bytes) for size_bytes in sizes]
    return ModelManifest(
        source="x", form="huggingface", files=[ModelFile(path="x", size_bytes=0)], chunks=chunks
    )


MODELS = st.lists(st.integers(1, 1000), min_size=1, max_size=80).map(model)
NODES = st.sets(st.integers(0, 70), min_size=1, max_size=64)


def loads(manifest, owners, nodes):
    read = dict.fromkeys(nodes, 0)
    for chunk, owner in zip(manifest.chunks, owners, strict=True):
        read[owner] += chunk.size_bytes
    return read


@given(MODELS, NODES)
def test_every_chunk_is_read_by_one_node_and_the_bytes_are_shared_out_evenly(manifest, nodes):
    owners = assign(manifest, nodes)
    read = loads(manifest, owners, nodes)
    largest = max(chunk.size_bytes for chunk in manifest.chunks)
    # Graham's bound on list scheduling: the mean of the others, and one chunk.
    assert (
        max(read.values())
        <= manifest.size_bytes / len(nodes) + largest * (1 - 1 / len(nodes)) + 1e-9
    )
    assert sum(read.values()) == manifest.size_bytes
    assert owners == assign(manifest, sorted(nodes, reverse=True))


@given(MODELS, NODES, NODES, st.data())
def test_what_somebody_has_or_is_about_to_read_is_not_read_again(manifest, before, after, data):
    owners = assign(manifest, before)
    numbers = st.sets(st.integers(0, len(owners) - 1))
    have = {node: data.draw(numbers) for node in before | after}
    new = reassign(manifest, owners, have, after)
    assert set(new) <= after
    for number, (old, owner) in enumerate(zip(owners, new, strict=True)):
        held = {node for node in after if number in have[node]}
        if held:
            assert owner in held, "who has it hands it out"
        elif old in after:
            assert owner == old, "who is reading it goes on"


@given(MODELS, NODES, st.data())
def test_chunks_of_nodes_that_left_go_to_those_with_least_to_read(manifest, before, data):
    owners = assign(manifest, before)
    after = data.draw(st.sets(st.sampled_from(sorted(before)), min_size=1))
    new = reassign(manifest, owners, {}, after)
    largest = max(chunk.size_bytes for chunk in manifest.chunks)
    kept = [owner if owner in after else -1 for owner in owners]
    base = loads(manifest, kept, after | {-1})
    del base[-1]
    final = loads(manifest, new, after)
    gained = [node for node in after if final[node] > base[node]]
    assert all(final[node] - largest <= min(final.values()) for node in gained)


@given(MODELS, st.integers(1, 6), st.lists(st.integers(0, 3), max_size=12), st.data())
def test_bytes_are_read_once_while_nodes_only_join(manifest, first, steps, data):
    nodes = set(range(first))
    owners = assign(manifest, nodes)
    read = {}
    have = {node: set() for node in nodes}
    for step in [*steps, 3]:
        pending = [number for number in range(len(owners)) if number not in read]
        for number in (
            pending
            if step == 3
            else data.draw(st.sets(st.sampled_from(pending)))
            if pending
            else []
        ):
            read[number] = read.get(number, 0) + 1
            have[owners[number]].add(number)
        node = len(nodes)
        nodes.add(node)
        have[node] = set()
        owners = reassign(manifest, owners, have, nodes)
        for number in read:
            assert number in have[owners[number]], "it would be read again"
    assert all(count == 1 for count in read.values())
    assert len(read) == len(manifest.chunks)


def test_a_late_node_is_served_by_all_that_have_the_model():
    manifest = model([10] * 12)
    everything = set(range(12))
    new = reassign(manifest, [0] * 12, {0: everything, 1: everything, 2: everything}, [0, 1, 2, 3])
    # Node 0 keeps its chunks, since it has them.
    assert new == [0] * 12
    new = reassign(manifest, [7] * 12, {0: everything, 1: everything, 2: everything}, [0, 1, 2, 3])
    assert sorted(new) == [0] * 4 + [1] * 4 + [2] * 4


def test_no_nodes_are_refused():
    for ask in (lambda: assign(model([1]), []), lambda: reassign(model([1]), [0], {}, [])):
        with pytest.raises(ValueError, match="needs a node"):
            ask()
