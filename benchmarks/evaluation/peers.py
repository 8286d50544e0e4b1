"""Compare Holdfast's policy with others in the simulator, on 200 random suites.

The generator and its seeds were fixed beforehand. For every suite, the figure is the makespan of
Holdfast without any history, over the makespan of each other policy in its best case
(`evaluation.peer_policies`).
"""

import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from common.jobs import say
from common.machine import Quiet
from common.table import Must, Row, print_table
from evaluation.peer_policies import simulate_peer
from evaluation.suites import RANDOM_SUITES, random_suite
from holdfast.simulate.evaluate import simulate

POLICIES = ("opencompass-size", "opencompass-workers", "olmo", "paper")
NAMES = {
    "opencompass-size": "OpenCompass' size partitioner",
    "opencompass-workers": "OpenCompass' worker partitioner",
    "olmo": "olmo-eval's queue",
    "paper": "the paper's policy",
}
NEVER_SLOWER = ("opencompass-size", "opencompass-workers", "olmo")
SHARES = (0, 1, 5, 25, 50, 75, 95, 99, 100)
WORKERS = 2


def rows(folder: Path, quiet: Quiet, *, quick: bool, rounds: int, seed: int) -> Iterator[Row]:
    """Yield one row per policy, and print the distribution."""
    del folder, rounds, seed  # its seeds are its own
    count = 2 if quick else RANDOM_SUITES
    quiet.wait()
    found: list[tuple[float, ...]] = []
    with ProcessPoolExecutor(WORKERS) as workers:
        for number, one in enumerate(workers.map(_one, range(count)), start=1):
            found.append(one)
            if number % 20 == 0:
                say(f"simulated {number} of {count} random suites")
    table = []
    for place, policy in enumerate(POLICIES):
        ratios = sorted(one[0] / one[1 + place] for one in found)
        name = NAMES[policy]
        table.append([name, *(_at(ratios, share) for share in SHARES)])
        slower = sum(ratio > 1.02 for ratio in ratios)
        asked = policy in NEVER_SLOWER
        yield Row(
            measure=f"{count} random suites: our makespan over that of {name}, most",
            ours=ratios[-1],
            peer=1,
            unit="ratio",
            must=Must("<=", 1.02) if asked else None,
        )
        yield Row(
            measure=f"{count} random suites: those more than 2% slower than with {name}",
            ours=slower,
            limit=0,
            unit="suites",
        )
        yield Row(
            measure=f"{count} random suites: our makespan over that of {name}, median",
            ours=statistics.median(ratios),
            peer=1,
            unit="ratio",
        )
    print_table(f"Our makespan over theirs, {count} random suites: percentiles",
                ("policy", *(f"{share}%" for share in SHARES)), table)  # fmt: skip


def _at(ordered: Sequence[float], share: int) -> float:
    return ordered[round(share / 100 * (len(ordered) - 1))]


def _one(number: int) -> tuple[float, ...]:
    workload, cluster = random_suite(number)
    ours_s = simulate(workload, cluster, seed=number).makespan_s
    return ours_s, *(simulate_peer(policy, workload, cluster, seed=number) for policy in POLICIES)
