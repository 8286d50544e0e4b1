"""Compute closed forms with which the simulator must agree, with source and regime."""

import math


def young_interval_s(stall_s: float, mean_s: float) -> float:
    """Return Young's interval between saves (CACM 17, 1974): sqrt(2 C M), for C far below M."""
    return math.sqrt(2 * stall_s * mean_s)


def daly_interval_s(stall_s: float, mean_s: float) -> float:
    """Return Daly's first-order interval between saves (FGCS 22, 2006).

    The interval is sqrt(2 C M) - C, and M where C >= M / 2.
    """
    return mean_s if stall_s >= mean_s / 2 else young_interval_s(stall_s, mean_s) - stall_s


def nvidia_period_s(stall_s: float, mean_s: float, restart_s: float) -> float:
    """Return the period of saves with the greatest availability (arXiv 2410.18124).

    A period is an interval and its save.
    """
    return stall_s + math.sqrt(2 * (mean_s + restart_s) * stall_s + stall_s**2)


def daly_ettr(interval_s: float, stall_s: float, mean_s: float, restart_s: float) -> float:
    """Return the effective training time ratio with exponential failures.

    Failures strike restarts and saves as well. This is Daly's complete expectation:
    W / E[T] = t / (M exp(R / M) (exp((t + C) / M) - 1)).
    """
    wall_s = mean_s * math.exp(restart_s / mean_s) * math.expm1((interval_s + stall_s) / mean_s)
    return interval_s / wall_s


def meta_ettr(interval_s: float, stall_s: float, mean_s: float, restart_s: float) -> float:
    """Return the expected ratio of Kokolis et al. (HPCA 2025), for u0 + t / 2 far below M."""
    return (1 - (restart_s + interval_s / 2) / mean_s) / (1 + stall_s / interval_s)


def machine_repair(machines: int, technicians: int, load: float) -> list[float]:
    """Return the probabilities of 0 … N broken machines in M/M/R//N.

    Args:
        machines: N; each fails while it runs.
        technicians: R.
        load: mean repair time over mean time to failure of one machine.
    """
    odds = [1.0]
    for broken in range(1, machines + 1):
        ratio = (machines - broken + 1) / min(broken, technicians) * load
        odds.append(odds[-1] * ratio)
    total = sum(odds)
    return [one / total for one in odds]


def poisson_spares(mean_broken: float, confidence: float) -> int:
    """Return the fewest spares that cover, with `confidence`, the nodes under repair.

    Their number is Poisson with the mean `mean_broken`: failures a second times the mean repair
    time in seconds.
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
    """Return the part of time in which all servers of a loss system are busy.

    For spares: the part of time in which all spares are under repair.
    """
    blocked = 1.0
    for number in range(1, servers + 1):
        blocked = load * blocked / (number + load * blocked)
    return blocked
