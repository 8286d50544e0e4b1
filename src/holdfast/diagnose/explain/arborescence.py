"""Find the least-cost arborescence of a small graph: one parent a node, all paths from the root.

The algorithm (Chu and Liu; Edmonds): each node takes its cheapest incoming edge. A cycle that
appears is merged into one node, and the choice is repeated.
"""

from collections.abc import Mapping
from typing import TypeAlias

Incoming: TypeAlias = Mapping[int, Mapping[int, float]]
"""Maps each node to its possible parents and the costs of these edges. The root has no entry."""


def least_parents(root: int, incoming: Incoming) -> dict[int, int]:
    """Choose each node's parent so that the sum of the edge costs is least.

    Of equal edges the lower parent is chosen. Every node must be reachable from `root`. Nodes are
    numbers from 0 up, or -1 for an outside root.
    """
    parents = {node: _cheapest(edges) for node, edges in incoming.items()}
    return _without_cycles(root, incoming, parents)


def _without_cycles(root: int, incoming: Incoming, parents: Mapping[int, int]) -> dict[int, int]:
    """Merge the cycles of `parents`, each node's cheapest parent, one after another."""
    cycle = _cycle(root, parents)
    if not cycle:
        return dict(parents)
    merged = max(*incoming, root) + 1
    entered: dict[int, tuple[int, float]] = {}
    """For each node outside the cycle: the cycle's node that its edge enters, and the added cost.
    """
    for node in sorted(cycle):
        saved = incoming[node][parents[node]]
        for source, cost in incoming[node].items():
            if source not in cycle and (source not in entered or cost - saved < entered[source][1]):
                entered[source] = (node, cost - saved)
    smaller: dict[int, Mapping[int, float]] = {
        merged: {source: added for source, (_, added) in entered.items()}
    }
    cheapest = {merged: _cheapest(smaller[merged])}
    left: dict[int, int] = {}
    """For each node outside the cycle: the cycle's node with the cheapest edge to it."""
    for node, edges in incoming.items():
        if node in cycle:
            continue
        if cycle.isdisjoint(edges):
            smaller[node], cheapest[node] = edges, parents[node]
            continue
        outside = {source: cost for source, cost in edges.items() if source not in cycle}
        left[node] = _cheapest({source: edges[source] for source in cycle & edges.keys()})
        outside[merged] = edges[left[node]]
        smaller[node], cheapest[node] = outside, _cheapest(outside)
    chosen = _without_cycles(root, smaller, cheapest)
    source = chosen.pop(merged)
    opened = entered[source][0]
    return {
        **{node: parents[node] for node in cycle if node != opened},
        **{node: left[node] if parent == merged else parent for node, parent in chosen.items()},
        opened: source,
    }


def _cheapest(edges: Mapping[int, float]) -> int:
    """Return the source of the cheapest edge; of several, the lowest."""
    return min(zip(edges.values(), edges.keys(), strict=True))[1]


def _cycle(root: int, parents: Mapping[int, int]) -> set[int]:
    """Return the nodes of one cycle, or an empty set."""
    done = {root}
    for start in parents:
        path: list[int] = []
        node = start
        while node not in done:
            done.add(node)
            path.append(node)
            node = parents[node]
        if node in path:
            return set(path[path.index(node) :])
    return set()
