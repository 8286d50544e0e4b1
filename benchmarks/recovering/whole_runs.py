"""Measure the wall time of whole runs with faults: ours, torchrun with checkpoints, no fault.

The protocol is Clockwork's for TorchPass, reduced: a number of steps with injected faults, up to
the last step. The ranks are killed at steps that are drawn once for all. The peer saves each
`PEER_SAVE_EVERY` steps as in that protocol. Holdfast saves each 5 steps, since its saves cost less,
and in further runs as seldom as the peer.
"""

import os
import random
import signal
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from common.jobs import job, last_words, say, wait_until
from common.machine import Quiet
from common.table import Row
from recovering.jobs import Contender, contenders, read_steps

PEER_SAVE_EVERY = 100
OURS_SAVE_EVERY = 5
BOUND_FACTOR = 10.0
"""A run is given up after so many times the time of its steps."""
STEP_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The steps of a run, and the faults: each one's step and rank."""

    steps: int
    faults: tuple[tuple[int, int], ...]
    world_size: int

    @classmethod
    def drawn(cls, source: random.Random, *, steps: int, faults: int, world_size: int) -> "Plan":
        """Draw faults that are at least half of their mean distance apart."""
        apart = steps // (faults + 1)
        drawn = [
            (number * apart + source.randrange(apart // 2), source.randrange(world_size))
            for number in range(1, faults + 1)
        ]
        return cls(steps=steps, faults=tuple(drawn), world_size=world_size)


def wall_s(contender: Contender, plan: Plan, *, save_every: int) -> float | None:
    """Return the seconds from the first to the last step of a run; None without a last step."""
    words = ("--steps", str(plan.steps), "--save-every", str(save_every))
    waiting = list(plan.faults)
    with tempfile.TemporaryDirectory(prefix="holdfast-whole-") as name:
        folder = Path(name)
        with job(
            (*contender.command, *words), folder, environment=contender.environment
        ) as process:

            def goes_on() -> bool:
                steps = {rank: read_steps(folder, rank) for rank in range(plan.world_size)}
                least = min((some[-1].step if some else 0) for some in steps.values())
                if waiting and least >= waiting[0][0]:
                    os.kill(steps[waiting.pop(0)[1]][-1].pid, signal.SIGKILL)
                return process.poll() is None

            wait_until(lambda: not goes_on(), timeout_s=60 + BOUND_FACTOR * plan.steps * STEP_S)
            first = read_steps(folder, 0)
            if process.poll() != 0 or not first or first[-1].step < plan.steps:
                say(f"{contender.name} did not come to its end:\n{last_words(folder)}")
                return None
            return first[-1].at_s - first[0].at_s


def whole_run_rows(
    source: random.Random, quiet: Quiet, *, rounds: int, steps: int, faults: int, world_size: int
) -> list[Row]:
    """Make the runs, in a random order each round."""
    ours, *peers = contenders(world_size)
    peer = next(one for one in peers if "unshared" in one.name)
    runs = [
        ("no fault", peer, PEER_SAVE_EVERY, False),
        ("checkpoint restart", peer, PEER_SAVE_EVERY, True),
        ("ours", ours, OURS_SAVE_EVERY, True),
        ("ours, saves as seldom", ours, PEER_SAVE_EVERY, True),
    ]
    found: dict[str, list[float]] = {name: [] for name, *_ in runs}
    for number in range(rounds):
        plan = Plan.drawn(source, steps=steps, faults=faults, world_size=world_size)
        source.shuffle(runs)
        for name, contender, save_every, is_struck in runs:
            quiet.wait()
            one = wall_s(
                contender, plan if is_struck else replace(plan, faults=()), save_every=save_every
            )
            say(f"{faults} faults in {steps} steps, round {number + 1}, {name}: {one}")
            if one is not None:
                found[name].append(one)
    medians = {name: statistics.median(some) for name, some in found.items() if some}
    undisturbed_s, peer_s = medians.get("no fault"), medians.get("checkpoint restart")
    what = f"{faults} kills in {steps} steps"
    rows = []
    for name in ("ours", "ours, saves as seldom"):
        words = "" if name == "ours" else f", saving each {PEER_SAVE_EVERY} steps too"
        rows.append(
            Row(
                measure=f"{what}: wall time, median{words}",
                ours=medians.get(name),
                peer=peer_s,
                limit=undisturbed_s,
                unit="s",
            )
        )
        if name in medians and peer_s is not None:
            ratio = peer_s / medians[name]
            rows.append(
                Row(measure=f"{what}: peer ÷ ours{words}", ours=ratio, peer=1, unit="ratio")
            )
    return rows
