"""Who reads what: every chunk has one node that reads it from the source; the others get it from that node.

Pure functions. While no node is lost every byte is read from the source once, however many nodes there are.
"""

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence

from holdfast.evaluate.types.model_manifest import ModelManifest


def assign(manifest: ModelManifest, nodes: Collection[int]) -> list[int]:
    """The owner of each chunk, balanced by bytes: longest chunk first, to the node that has least.

    Graham's LPT rule (SIAM J. Appl. Math. 17(2), 1969): the fullest node has at most 4/3 of the least possible.
    The same for every order of `nodes`.

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
    """The owner of each chunk after nodes joined or left; what some node has is not read from the source again.

    A chunk's owner is kept while it is among `nodes`: it has the chunk or is about to read it. The chunk of an owner
    that left goes to a node that has it, else to the node with least to read. Where an owner that stays is not yet
    known to have its chunk and another node is, that one becomes the owner.

    Args:
        manifest: the model.
        owners: as it was.
        have: node to the chunks it is known to have; nodes may be missing.
        nodes: those there are now.

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
    """Give each of `chunks` an owner in place; `loads` is what each node has to read already, in bytes."""
    heap = [(load_bytes, node) for node, load_bytes in loads.items()]
    heapq.heapify(heap)
    for number in sorted(chunks, key=lambda number: (-manifest.chunks[number].size_bytes, number)):
        load_bytes, node = heap[0]
        owners[number] = node
        heapq.heapreplace(heap, (load_bytes + manifest.chunks[number].size_bytes, node))
