"""Which rank holds whose snapshot: pairs across nodes, and across failure domains where that can be had."""

from collections.abc import Sequence

from holdfast.checkpoint.distributed.place import Place


def partners(places: Sequence[Place]) -> list[int | None]:
    """For each rank the one that holds its snapshot; None for all where there is one node.

    The nodes stand in a ring, those of a domain side by side, and each is held by the one half the ring away. So each
    holds for one other, and as many pairs as that permits are of two domains: all, where no domain has more than half
    of the nodes. The ranks of a node are held by those of the other one in their order, in turn where it has fewer.

    Args:
        places: of the ranks, in their order.
    """
    nodes: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        nodes.setdefault(place.node, []).append(rank)
    domains: dict[tuple[str, str], list[str]] = {}
    for node, ranks in nodes.items():
        domain = places[ranks[0]].domain
        domains.setdefault((domain, "" if domain else node), []).append(node)
    ring = [node for together in domains.values() for node in together]
    found: list[int | None] = [None] * len(places)
    if len(ring) > 1:
        for at, node in enumerate(ring):
            holders = nodes[ring[(at + len(ring) // 2) % len(ring)]]
            for local, rank in enumerate(nodes[node]):
                found[rank] = holders[local % len(holders)]
    return found
