"""Compute the closed form with which the replay must agree."""


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
