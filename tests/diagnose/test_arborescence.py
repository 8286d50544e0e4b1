"""Test the least-cost arborescence against all arborescences of small graphs."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.diagnose.explain.arborescence import least_parents

ROOT = 0
COSTS = st.integers(0, 5)


@st.composite
def graphs(draw):
    """Draw up to five nodes besides the root; the root may be the parent of each."""
    nodes = range(1, draw(st.integers(2, 6)))
    return {
        node: {
            ROOT: float(draw(COSTS)),
            **{
                other: float(draw(COSTS))
                for other in nodes
                if other != node and draw(st.booleans())
            },
        }
        for node in nodes
    }


def reaches_root(node, parents):
    seen = set()
    while node != ROOT and node not in seen:
        seen.add(node)
        node = parents[node]
    return node == ROOT


def cost_of(parents, incoming):
    return sum(incoming[node][parent] for node, parent in parents.items())


@settings(max_examples=300, deadline=None)
@given(graphs())
def test_no_arborescence_costs_less(incoming):
    parents = least_parents(ROOT, incoming)
    assert set(parents) == set(incoming)
    assert all(reaches_root(node, parents) for node in parents)
    choices = (dict(zip(incoming, chosen, strict=True)) for chosen in product(*incoming.values()))
    least = min(
        cost_of(one, incoming) for one in choices if all(reaches_root(node, one) for node in one)
    )
    assert cost_of(parents, incoming) == pytest.approx(least)


def test_a_cycle_that_is_cheap_within_is_entered_where_that_costs_least():
    incoming = {
        1: {0: 9.0, 2: 0.1},
        2: {0: 5.0, 3: 0.1},
        3: {0: 7.0, 1: 0.1},
    }
    assert least_parents(ROOT, incoming) == {2: 0, 1: 2, 3: 1}


def test_a_cycle_within_a_cycle():
    incoming = {
        1: {2: 1.0, 0: 10.0},
        2: {1: 1.0, 3: 2.0},
        3: {1: 2.0, 4: 9.0},
        4: {3: 1.0, 0: 3.0},
    }
    parents = least_parents(ROOT, incoming)
    assert all(reaches_root(node, parents) for node in parents)
    assert cost_of(parents, incoming) == 14.0


def test_a_root_alone_has_no_children():
    assert least_parents(ROOT, {}) == {}
