"""Assign every chunk to one node, which reads it from the source and sends it to the others.

The functions are pure. As long as no node is lost, every byte is read from the source once, however
many nodes there are.
"""

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence

from holdfast.evaluate.types.model_manifest import ModelManifest


def assign(manifest: ModelManifest, nodes: Collection[int]) -> list[int]:
    """Assign an owner to each chunk, so that all nodes read about the same number of bytes.

    By Graham's LPT rule (SIAM J. Appl. Math. 17(2), 1969), the largest chunk is assigned first, to
    the node with the fewest bytes so far. The node with the most bytes then has at most 4/3 of the
    optimum. The result does not depend on the order of `nodes`.

    Returns:
        For each chunk, the number of its owner.

    Raises:
        ValueError: there are no nodes.
    """
    if not nodes:
        raise ValueError("a model needs a node to be read by")
    owners = [-1] * len(manifest.chunks)
    _deal(manifest, range(len(owners)), dict.fromkeys(nodes, 0), owners)
    return owners


def reassign(
    manifest: ModelManifest,
    owners: Sequence[int],
    have: Mapping[int, Collection[int]],
    nodes: Collection[int],
) -> list[int]:
    """Reassign chunks after nodes joined or left; a chunk that a node has is not read again.

    The owner of each chunk is chosen by these rules, in this order:

    1. If some of `nodes` have the chunk and the owner is not among them, one of them becomes the
       owner.
    2. An owner that is still among `nodes` keeps the chunk, since it has the chunk or will read it.
    3. A chunk of an owner that left goes to the node with the fewest bytes to read.

    Args:
        manifest: the model.
        owners: the previous owner of each chunk.
        have: node to the chunks that it is known to have; nodes may be missing.
        nodes: the present nodes.

    Raises:
        ValueError: there are no nodes.
    """
    if not nodes:
        raise ValueError("a model needs a node to be read by")
    living = set(nodes)
    holders: dict[int, list[int]] = {}
    for node in sorted(living & set(have)):
        for number in have[node]:
            holders.setdefault(number, []).append(node)
    after = [owner if owner in living else -1 for owner in owners]
    served = dict.fromkeys(sorted(living), 0)
    to_read = dict.fromkeys(sorted(living), 0)
    orphans = []
    for number, chunk in enumerate(manifest.chunks):
        holding = holders.get(number)
        if holding and after[number] not in holding:
            after[number] = min(holding, key=lambda node: (served[node], node))
        if after[number] == -1:
            orphans.append(number)
        elif holding:
            served[after[number]] += chunk.size_bytes
        else:
            to_read[after[number]] += chunk.size_bytes
    _deal(manifest, orphans, to_read, after)
    return after


def _deal(
    manifest: ModelManifest, chunks: Iterable[int], loads: Mapping[int, int], owners: list[int]
) -> None:
    """Assign owners to `chunks` in place.

    `loads` maps each node to the bytes that it must already read.
    """
    heap = [(load_bytes, node) for node, load_bytes in loads.items()]
    heapq.heapify(heap)
    for number in sorted(chunks, key=lambda number: (-manifest.chunks[number].size_bytes, number)):
        load_bytes, node = heap[0]
        owners[number] = node
        heapq.heapreplace(heap, (load_bytes + manifest.chunks[number].size_bytes, node))
