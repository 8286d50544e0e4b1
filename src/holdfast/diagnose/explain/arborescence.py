"""Find the least-cost arborescence of a small graph: every node gets one parent, and every path begins at the root.

The algorithm (Chu and Liu; Edmonds) is short: each node takes its cheapest incoming edge; a cycle that appears
is merged into one node, and the choice is made again.
"""

from collections.abc import Mapping
from typing import TypeAlias

Incoming: TypeAlias = Mapping[int, Mapping[int, float]]
"""By node: the nodes that may be its parent, with the cost of that edge. The root has no entry."""


def least_parents(root: int, incoming: Incoming) -> dict[int, int]:
    """Choose each node's parent so that the sum of the edges is least; of equal edges the lower parent is taken.

    Every node must be reachable from `root`. Nodes are numbers from 0 up, or -1 for a root outside.
    """
    parents = {
        node: min(edges, key=lambda one: (edges[one], one)) for node, edges in incoming.items()
    }
    cycle = _cycle(root, parents)
    if not cycle:
        return parents
    merged = max(*incoming, root) + 1
    entered: dict[int, tuple[int, float]] = {}
    """By a node outside: the node of the cycle that it would enter, and what that adds."""
    for node in sorted(cycle):
        saved = incoming[node][parents[node]]
        for source, cost in incoming[node].items():
            if source not in cycle and (source not in entered or cost - saved < entered[source][1]):
                entered[source] = (node, cost - saved)
    smaller: dict[int, dict[int, float]] = {
        merged: {source: added for source, (_, added) in entered.items()}
    }
    left: dict[int, int] = {}
    """By a node outside: the node of the cycle from which its cheapest edge comes."""
    for node, edges in incoming.items():
        if node in cycle:
            continue
        outside = {source: cost for source, cost in edges.items() if source not in cycle}
        inside = [source for source in edges if source in cycle]
        if inside:
            left[node] = min(inside, key=lambda one: (edges[one], one))
            outside[merged] = edges[left[node]]
        smaller[node] = outside
    chosen = least_parents(root, smaller)
    source = chosen.pop(merged)
    opened = entered[source][0]
    return {
        **{node: parents[node] for node in cycle if node != opened},
        **{node: left[node] if parent == merged else parent for node, parent in chosen.items()},
        opened: source,
    }


def _cycle(root: int, parents: Mapping[int, int]) -> set[int]:
    """Return the nodes of one cycle; empty where there is none."""
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
