"""Compute closed forms with which the simulator must agree.

In the formulas, t is the interval between saves, C the stall of a save, M the mean time between
failures, and R the time of a restart, all in seconds. Each function names its source, and the range
in which its formula holds.
"""

import math


def young_interval_s(stall_s: float, mean_s: float) -> float:
    """Return Young's interval between saves (CACM 17, 1974): sqrt(2 C M), if C is far below M."""
    return math.sqrt(2 * stall_s * mean_s)


def daly_interval_s(stall_s: float, mean_s: float) -> float:
    """Return Daly's first-order interval between saves (FGCS 22, 2006).

    The interval is sqrt(2 C M) - C, or M if C >= M / 2.
    """
    return mean_s if stall_s >= mean_s / 2 else young_interval_s(stall_s, mean_s) - stall_s


def nvidia_period_s(stall_s: float, mean_s: float, restart_s: float) -> float:
    """Return the period of saves that maximises availability (arXiv 2410.18124).

    The period is the interval between saves plus the stall of a save.
    """
    return stall_s + math.sqrt(2 * (mean_s + restart_s) * stall_s + stall_s**2)


def daly_ettr(interval_s: float, stall_s: float, mean_s: float, restart_s: float) -> float:
    """Return the effective training time ratio if the times between failures are exponential.

    Failures can also strike during restarts and saves. The formula is Daly's complete expectation:
    W / E[T] = t / (M exp(R / M) (exp((t + C) / M) - 1)), where W is the work and T the time that
    the work takes.
    """
    wall_s = mean_s * math.exp(restart_s / mean_s) * math.expm1((interval_s + stall_s) / mean_s)
    return interval_s / wall_s


def meta_ettr(interval_s: float, stall_s: float, mean_s: float, restart_s: float) -> float:
    """Return the expected ETTR of Kokolis et al. (HPCA 2025), if R + t / 2 is far below M."""
    return (1 - (restart_s + interval_s / 2) / mean_s) / (1 + stall_s / interval_s)


def machine_repair(machines: int, technicians: int, load: float) -> list[float]:
    """Return the probabilities of 0 … N broken machines in the machine repair model M/M/R//N.

    Args:
        machines: N, the number of machines, which fail only while they run.
        technicians: R, the number of repairs at a time.
        load: the mean repair time divided by the mean time to failure of one machine.
    """
    odds = [1.0]
    for broken in range(1, machines + 1):
        ratio = (machines - broken + 1) / min(broken, technicians) * load
        odds.append(odds[-1] * ratio)
    total = sum(odds)
    return [one / total for one in odds]


def poisson_spares(mean_broken: float, confidence: float) -> int:
    """Return the least number of spares that replace all nodes under repair at a random time.

    The number of nodes under repair has a Poisson distribution.

    Args:
        mean_broken: the mean of this distribution: failures per second times the mean repair time
            in seconds.
        confidence: the probability with which the spares suffice.
    """
    spares, part = 0, math.exp(-mean_broken)
    covered = part
    while covered < confidence and spares < 1_000_000:
        spares += 1
        part *= mean_broken / spares
        covered += part
        if part == 0.0 and spares > mean_broken:
            break
    return spares


def erlang_b(servers: int, load: float) -> float:
    """Return the share of time in which all servers of a loss system are busy (Erlang B).

    With spares as servers, the result is the share of time in which all spares are under repair.
    """
    blocked = 1.0
    for number in range(1, servers + 1):
        blocked = load * blocked / (number + load * blocked)
    return blocked
