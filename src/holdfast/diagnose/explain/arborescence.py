"""Find the least-cost arborescence of a small graph: a tree whose edges lead away from the root.

The algorithm is by Chu and Liu, and by Edmonds: each node takes its cheapest incoming edge. If a
cycle appears, the cycle is merged into one node, and the choice is repeated.
"""

from collections.abc import Mapping
from typing import TypeAlias

Incoming: TypeAlias = Mapping[int, Mapping[int, float]]
"""Maps each node to its possible parents, with the costs of the edges. The root has no entry."""


def least_parents(root: int, incoming: Incoming) -> dict[int, int]:
    """Choose the parent of each node such that the sum of the edge costs is least.

    Between edges of equal cost, the parent with the lower number is chosen. Every node must be
    reachable from `root`. Nodes are numbers from 0 up; -1 is allowed for a root outside the graph.
    """
    parents = {node: _cheapest(edges) for node, edges in incoming.items()}
    return _without_cycles(root, incoming, parents)


def _without_cycles(root: int, incoming: Incoming, parents: Mapping[int, int]) -> dict[int, int]:
    """Merge cycles until there are none; `parents` maps each node to its cheapest parent."""
    cycle = _cycle(root, parents)
    if not cycle:
        return dict(parents)
    merged = max(*incoming, root) + 1
    entered: dict[int, tuple[int, float]] = {}
    """For each node outside the cycle, the node of the cycle that its edge enters, and the added
    cost.
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
    """Return the source of the cheapest edge; of equal edges, the lowest number."""
    return min(zip(edges.values(), edges.keys(), strict=True))[1]


def _cycle(root: int, parents: Mapping[int, int]) -> set[int]:
    """Return the nodes of one cycle, or an empty set if there is no cycle."""
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
