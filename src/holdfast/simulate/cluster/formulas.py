"""Compute closed forms of queueing theory, with which the replay must agree."""

from collections.abc import Sequence
from itertools import pairwise


def erlang_c(servers: int, load: float) -> float:
    """Return the share of arrivals that must wait in an M/M/c queue (Erlang, 1917).

    Args:
        servers: c, the number of servers.
        load: a, the arrival rate times the mean run time; below c.
    """
    blocked = 1.0
    for number in range(1, servers + 1):
        blocked = load * blocked / (number + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked))


def mean_wait_s(servers: int, load: float, run_s: float) -> float:
    """Return the mean wait in an M/M/c queue, first come, first served: C(c, a) s / (c - a)."""
    return erlang_c(servers, load) * run_s / (servers - load)


def priority_wait_s(servers: int, loads: Sequence[float], run_s: float) -> list[float]:
    """Return the mean wait in seconds of each priority class in an M/M/c queue.

    All classes have the same mean run time. A class has priority over all later classes of the
    list, but no running job is preempted. The wait of class k is W / ((1 - u of classes 1 to k - 1)
    (1 - u of classes 1 to k)), with W = C(c, a) s / c, where u is the load of the classes divided
    by c (Cobham, 1954, Operations Research 2:70).

    Args:
        servers: c, the number of servers.
        loads: for each class, the arrival rate times the mean run time; the sum is below c.
        run_s: s, the mean run time in seconds.
    """
    load = sum(loads)
    busy_s = erlang_c(servers, load) * run_s / servers
    used = [sum(loads[:number]) / servers for number in range(len(loads) + 1)]
    return [busy_s / ((1 - before) * (1 - with_it)) for before, with_it in pairwise(used)]
