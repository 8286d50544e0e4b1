"""Compute the closed forms with which the replay must agree."""

from collections.abc import Sequence
from itertools import pairwise


def erlang_c(servers: int, load: float) -> float:
    """Return the part of the arrivals that wait in M/M/c (Erlang, 1917).

    Args:
        servers: c.
        load: arrival rate times mean run time, below c.
    """
    blocked = 1.0
    for number in range(1, servers + 1):
        blocked = load * blocked / (number + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked))


def mean_wait_s(servers: int, load: float, run_s: float) -> float:
    """Return the mean wait in M/M/c, in the order of arrival: C(c, a) s / (c - a)."""
    return erlang_c(servers, load) * run_s / (servers - load)


def priority_wait_s(servers: int, loads: Sequence[float], run_s: float) -> list[float]:
    """Return the mean wait of each class in M/M/c with priorities and one mean run time.

    A class comes before the later classes of the list. No running job is ended. The wait of class k
    is W / ((1 - u of classes 1 to k - 1) (1 - u of classes 1 to k)), with W = C(c, a) s / c (Cobham,
    1954, Operations Research 2:70).

    Args:
        servers: c.
        loads: arrival rate times mean run time of each class; below c together.
        run_s: s.
    """
    load = sum(loads)
    busy_s = erlang_c(servers, load) * run_s / servers
    used = [sum(loads[:number]) / servers for number in range(len(loads) + 1)]
    return [busy_s / ((1 - before) * (1 - with_it)) for before, with_it in pairwise(used)]
