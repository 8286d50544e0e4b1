"""Count the faulty nodes found and the healthy ones blamed, on 2 to 64 emulated nodes.

A faulty node fails each of its tests with the rate p. One node in sixteen is faulty, at least one;
two nodes have a spare. The peers are:

- the study's two rounds (Acme, NSDI 2024, section 6.1): worlds of two, then each suspect with a
  healthy node; a node is faulty if it fails both,
- DLRover's rule: two rounds of pairs, the second ordered by elapsed times, which are random here; a
  node is faulty if it fails both.

All see the same faults, drawn from one seed. Emulated tests take no time: rounds are the job's
wait.
"""

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.table import Must, Row, parse_arguments, report
from holdfast.recover.localise.pairing import BASE_PRIOR, MAX_ROUNDS, Pairing, WorldTest
from holdfast.testing.bad_nodes import EmulatedNodes

SIZES = (2, 3, 4, 5, 8, 16, 32, 64)
RATES = (0.3, 0.5, 1.0)
TRIALS, QUICK_TRIALS = 500, 25
RECALL, PRECISION = 0.95, 0.99
MUST_FROM_RATE = 0.5

Finder = Callable[[EmulatedNodes, random.Random], tuple[set[str], int]]
"""Tests a cluster; returns the blamed nodes and the number of rounds."""


@dataclass(kw_only=True)
class Tally:
    """The results of one method over all trials."""

    faulty: int = 0
    blamed: int = 0
    right: int = 0
    rounds: int = 0
    trials: int = 0

    @property
    def recall(self) -> float:
        """Return the share of the faulty nodes that is blamed."""
        return self.right / self.faulty

    @property
    def precision(self) -> float | None:
        """Return the share of blamed nodes that are faulty; None if no node is blamed."""
        return self.right / self.blamed if self.blamed else None


def ours(cluster: EmulatedNodes, _source: random.Random) -> tuple[set[str], int]:
    """Test by adaptive pairing."""
    pairing = Pairing(priors=dict.fromkeys(cluster.names, BASE_PRIOR))
    while worlds := pairing.next_round():
        pairing.record([WorldTest(nodes=one, passed=cluster.passes(one)) for one in worlds])
    judgement = pairing.judge()
    return set(judgement.bad), pairing.rounds


def study(cluster: EmulatedNodes, source: random.Random) -> tuple[set[str], int]:
    """Test in two rounds, the second with suspects and healthy nodes.

    Without a healthy node, no node is blamed.
    """
    worlds = in_pairs(source.sample(cluster.names, len(cluster.names)))
    suspects = [name for one in worlds if not cluster.passes(one) for name in one]
    healthy = [name for name in cluster.names if name not in suspects]
    if not suspects:
        return set(), 1
    if not healthy:
        return set(), 1
    pairs = [(name, healthy[number % len(healthy)]) for number, name in enumerate(suspects)]
    return {pair[0] for pair in pairs if not cluster.passes(pair)}, 2


def dlrover(cluster: EmulatedNodes, source: random.Random) -> tuple[set[str], int]:
    """Test in two rounds of pairs; a node that fails both is faulty."""
    failed: dict[str, int] = dict.fromkeys(cluster.names, 0)
    for _ in range(2):
        for world in in_pairs(source.sample(cluster.names, len(cluster.names))):
            if not cluster.passes(world):
                for name in world:
                    failed[name] += 1
    return {name for name, count in failed.items() if count == 2}, 2


def in_pairs(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return worlds of two, one of three if the number is odd."""
    worlds = [tuple(names[start : start + 2]) for start in range(0, len(names), 2)]
    if len(worlds) > 1 and len(worlds[-1]) == 1:
        last = worlds.pop()
        worlds[-1] += last
    return worlds


WAYS: dict[str, Finder] = {"ours": ours, "the study": study, "DLRover": dlrover}


def tallies(size: int, rate: float, trials: int, seed: int) -> dict[str, Tally]:
    """Have each method look for the same faults."""
    found = {way: Tally() for way in WAYS}
    for trial in range(trials):
        for way, finder in WAYS.items():
            source = random.Random(f"{seed} {size} {rate} {trial}")
            nodes = max(size, 3)  # two nodes and a spare
            cluster = EmulatedNodes.drawn(nodes, bad=max(1, size // 16), rate=rate, source=source)
            blamed, rounds = finder(cluster, source)
            tally = found[way]
            tally.trials += 1
            tally.faulty += len(cluster.rates)
            tally.blamed += len(blamed)
            tally.right += len(blamed & set(cluster.rates))
            tally.rounds += rounds
    return found


def main() -> int:
    options = parse_arguments(__doc__ or "", None)
    trials = QUICK_TRIALS if options.quick else TRIALS
    rows = []
    for rate in RATES:
        whole = {way: Tally() for way in WAYS}
        for size in SIZES:
            # The pure Python of 64 nodes takes some 30 ms a trial.
            found = tallies(size, rate, max(10, trials * 4 // max(4, size)), options.seed)
            for way, tally in found.items():
                for name, value in vars(tally).items():
                    setattr(whole[way], name, getattr(whole[way], name) + value)
            if not options.quick:
                rows += _rows(f"{size} nodes, p {rate:g}", found, rate)
        rows += _rows(f"2 to 64 nodes, p {rate:g}", whole, rate)
    report(
        "Localising faulty nodes",
        rows,
        notes=[
            f"{trials} trials of 4 nodes; fewer of more. Two nodes have a spare.",
        ],
        json_file=options.json,
    )
    return 0 if all(row.met is not False for row in rows) else 1


def _rows(where: str, found: dict[str, Tally], rate: float) -> list[Row]:
    mine = found["ours"]
    has_must = rate >= MUST_FROM_RATE and where.startswith("2 to")
    rows = []
    for way in ("the study", "DLRover"):
        peer = found[way]
        figures = {
            "recall": (mine.recall, peer.recall, "of faulty nodes", Must(">=", RECALL)),
            "precision": (mine.precision, peer.precision, "of blamed", Must(">=", PRECISION)),
            "rounds": (
                mine.rounds / mine.trials,
                peer.rounds / peer.trials,
                "rounds",
                Must("<=", MAX_ROUNDS),
            ),
        }
        rows += [
            Row(
                measure=f"{where}: {name}, beside {way}",
                unit=unit,
                ours=own,
                peer=other,
                must=must if has_must else None,
            )
            for name, (own, other, unit, must) in figures.items()
        ]
    return rows


if __name__ == "__main__":
    sys.exit(main())
