"""Measure the seconds from a fault of a rank to the first new step, beside the peers.

A random rank is killed with SIGKILL, frozen with SIGSTOP, or deadlocked, at a random moment. A job is struck
once right after its start (`cold`). After `WARM_STARTS` the job has imported all modules for its
next ranks, like a job of hours, and is struck again and again (`warm`). A job that does not recover
ends; the next round starts another one.
"""

import math
import random
import statistics
import time
from collections.abc import Iterable, Sequence

from common.jobs import say
from common.machine import Quiet
from common.table import Must, Row
from recovering.jobs import (
    HANG_FLOOR_S,
    HANGS,
    RECOVERY_BOUND_S,
    Contender,
    Found,
    Job,
    StandStill,
    contenders,
    fresh_start_s,
    training,
)

WARM_STARTS = 3
"""A job is warm after it has trained for this number of times the seconds of a fresh start.

Imports for the next ranks begin 5 s after the first step, and the ranks train meanwhile.
"""
WARM_S = 8.0
"""The seconds of training before each strike at a warm job."""
GROUP = 25
"""The warm strikes at one of Holdfast's jobs."""
PEERS_EVERY = 2
"""The peers are struck once in so many groups of Holdfast's strikes."""
COLD, WARM = "cold", "warm"


class Measurement:
    """All rounds, by contender, in a random order."""

    def __init__(
        self, source: random.Random, quiet: Quiet, *, world_size: int, is_quick: bool
    ) -> None:
        self._source = source
        self._quiet = quiet
        self._world_size = world_size
        self._is_quick = is_quick
        self._still = StandStill()
        self.found: Found = {}
        self.starts_s: list[float] = []

    def fresh_start(self) -> None:
        """Start ranks without a launcher; a quick run starts one."""
        self._quiet.wait()
        self.starts_s.append(fresh_start_s(1 if self._is_quick else self._world_size))
        say(f"fresh start: first step after {self.starts_s[-1]:.2f} s")

    def strike(self, contender: Contender, cold: str | None, warm: Sequence[str]) -> int:
        """Strike a new job by `cold`, then by each of `warm`; return the number of warm strikes."""
        self._quiet.wait()
        made = 0
        with training(contender, self._world_size, self._source.randrange(6, 16)) as found:
            if cold is not None and not self._strike_once(found, COLD, cold):
                return made
            if warm:
                time.sleep(WARM_STARTS * self.starts_s[-1])
            for fault in warm:
                time.sleep(WARM_S)
                made += 1
                if not self._strike_once(found, WARM, fault):
                    break
        return made

    def _strike_once(self, job_: Job, when: str, fault: str) -> bool:
        # On a machine where a bare start takes long, a restart does too.
        bound_s = max(RECOVERY_BOUND_S[fault], 4 * self.starts_s[-1])
        one = job_.strike(fault, self._source, self._still, bound_s)
        rounds = self.found.setdefault((job_.contender.name, when, fault), [])
        rounds.append(one)
        took = (
            "not recovered"
            if one.first_step_s is None
            else f"first new step after {one.first_step_s:.2f} s"
        )
        say(f"{job_.contender.name}, {when} {fault} {len(rounds)}: {took}")
        return one.first_step_s is not None


def measure(measurement: Measurement, world_size: int, *, is_quick: bool, rounds: int) -> None:
    """Strike `rounds` times by each fault while warm, in groups of `GROUP`.

    Each group begins with one cold strike. The peers come in one of `PEERS_EVERY` groups, since a
    torchrun that does not recover takes the whole bound.
    """
    ours, *peers = contenders(world_size)
    source = random.Random(rounds)
    if is_quick:
        measurement.fresh_start()
        # The node that is killed later starts again cold.
        measurement.strike(ours, None, ("SIGKILL", "SIGSTOP"))
        return
    left = [fault for fault in ("SIGKILL", "SIGSTOP") for _ in range(rounds)]
    source.shuffle(left)
    number = 0
    while left:
        measurement.fresh_start()
        plan: list[tuple[Contender, str, Sequence[str]]] = [(ours, "SIGKILL", left[:GROUP])]
        if number % PEERS_EVERY == 0:
            plan += [(peer, "SIGKILL", ("SIGKILL", "SIGKILL")) for peer in peers]
        if number == 0:
            plan += [(peer, "SIGSTOP", ()) for peer in peers]
        source.shuffle(plan)
        for contender, cold, warm in plan:
            made = measurement.strike(contender, cold, warm)
            if contender is ours:
                del left[:made]
        number += 1


def measure_deadlocks(measurement: Measurement, world_size: int, *, rounds: int) -> None:
    """Strike a warm job of Holdfast, again and again."""
    measurement.fresh_start()
    left = rounds
    while left:
        made = measurement.strike(contenders(world_size)[0], None, ["deadlock"] * left)
        left -= max(1, made)


def rows_of(found: Found, limit_s: float) -> list[Row]:
    """Return the table."""
    rows = []
    shown = ((COLD, "SIGKILL"), (WARM, "SIGKILL"), (WARM, "SIGSTOP"), (WARM, "deadlock"))
    for when, fault in shown:
        ours = found.get(("holdfast", when, fault), [])
        if not ours:  # a quick run has no cold strike
            continue
        what, count = f"{when} {fault}", len(ours)
        all_rounds = {"limit": count, "unit": "rounds", "must": Must("=", count)}
        recovered_s = _present(one.first_step_s for one in ours)
        calm_s = _present(one.first_step_s for one in ours if not one.stood_still)
        right = sum(one.right_rank for one in ours)
        # Nobody can know of a silence before it has lasted as long as the limit says.
        silence_s = HANG_FLOOR_S if fault in HANGS else 0.0
        least_s = limit_s if when == COLD else silence_s
        rows += [
            Row(measure=f"{what}: recovered, of {count}", ours=len(recovered_s), **all_rounds),
            Row(measure=f"{what}: right rank and kind, of {count}", ours=right, **all_rounds),
            Row(
                measure=f"{what} → detected, median",
                ours=_quantile(_present(one.detected_s for one in ours), 0.5),
                limit=silence_s,
                unit="s",
            ),
        ]
        musts: tuple[Must | None, Must | None] = (None, None)
        if when == WARM:
            musts = (
                (Must("<=", 0.7), Must("<=", 2.0))
                if fault == "SIGKILL"
                else (Must("<=", 3.0), None)
            )
        unshared_s = _present(
            one.first_step_s for one in found.get(("torchrun, unshared store", when, fault), [])
        )
        rows += [
            Row(
                measure=f"{what} → first new step, median",
                ours=_quantile(recovered_s, 0.5),
                peer=_quantile(unshared_s, 0.5),
                limit=least_s,
                unit="s",
                must=musts[0],
            ),
            Row(
                measure=f"{what} → first new step, 95th percentile of the {len(calm_s)} without a standstill",
                ours=_quantile(calm_s, 0.95),
                peer=_quantile(unshared_s, 0.95),
                limit=least_s,
                unit="s",
                must=musts[1],
            ),
        ]
        if recovered_s and unshared_s:
            ratio = statistics.median(recovered_s) / statistics.median(unshared_s)
            rows.append(
                Row(measure=f"{what}: medians, ours ÷ peer", ours=ratio, peer=1, unit="ratio")
            )
    for (name, when, fault), theirs in found.items():
        if name != "holdfast":
            recovered = len(_present(one.first_step_s for one in theirs))
            measure = f"{name}, {when} {fault}: recovered, of {len(theirs)}"
            rows.append(Row(measure=measure, peer=recovered, limit=len(theirs), unit="rounds"))
    return rows


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _quantile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least a share of the values does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None
