"""Seconds from a fault to the first new step: `holdfast run` beside torchrun's own restarts.

Two gloo ranks train (`workers/training.py`, the same script with the same Checkpointer for all); a random one of them
is killed with SIGKILL, or frozen with SIGSTOP, at a random moment. Moments are those of the signal and of the lines
that the ranks write after each step. The peers are `torchrun --standalone --max-restarts=3` as it is, and the same
with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which gives each restart a store of its own.

The limit is the start of a fresh group without launcher, supervisor or checkpoint, to its first step: interpreter,
`import torch`, gloo, one step. No restart of processes can be faster.
"""

import itertools
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from common.jobs import (
    HOLDFAST,
    TORCHRUN,
    WORKERS,
    DoesNotWork,
    adopt_orphans,
    job,
    last_words,
    say,
    wait_until,
)
from common.machine import OthersLoad, Quiet
from common.table import Must, Row, parse_arguments, report
from holdfast.core.ledger import Ledger
from holdfast.core.paths import ledger_url

SCRIPT = str(WORKERS / "training.py")
WORLD_SIZE = 2
HANG_FLOOR_S = 1.0
START_TIMEOUT_S = 60.0
RECOVERY_BOUND_S = {"SIGKILL": 45.0, "SIGSTOP": 20.0}
"""How long a round waits for a new step; then it counts as not recovered, and everything is killed."""
QUICK_BOUND_S = 15.0
PICKS = (("median", statistics.median), ("min", min), ("max", max))
STARTS_A_ROUND = 2
FAULTS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A launcher that restarts the job."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


TORCHRUN_RESTARTS = (
    *TORCHRUN,
    "--standalone",
    f"--nproc-per-node={WORLD_SIZE}",
    "--max-restarts=3",
    SCRIPT,
)
HOLDFAST_RUN = (
    *HOLDFAST,
    "run",
    "--name",
    "r",
    "--nproc",
    str(WORLD_SIZE),
    "--hang-floor-s",
    str(HANG_FLOOR_S),
)
OURS = Contender(name="holdfast", command=(*HOLDFAST_RUN, "--", sys.executable, SCRIPT))
SHARED = Contender(name="torchrun, its default store", command=TORCHRUN_RESTARTS)
UNSHARED = Contender(
    name="torchrun, unshared store",
    command=TORCHRUN_RESTARTS,
    environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
)
PEERS = (SHARED, UNSHARED)


class Step(NamedTuple):
    """A line that a rank wrote."""

    at_s: float
    pid: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one fault led to. Seconds since the signal; None where it did not come within the bound."""

    first_step_s: float | None
    detected_s: float | None = None
    right_rank: bool = False
    parts_s: dict[str, float] = field(default_factory=dict)
    """Where the time from our detection to the first new step went."""


Found = dict[tuple[str, str], list[Round]]
"""The rounds of each fault and contender."""
PARTS = (
    "detected → all old processes gone",
    "gone → relaunched (diagnosis, policy)",
    "relaunched → first rank process (torchrun's own start)",
    "first rank process → first new step",
)


def read_steps(folder: Path, rank: int) -> list[Step]:
    """What a rank wrote so far; a line not yet whole is left out."""
    path = folder / f"steps-{rank}.txt"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [
        Step(float(at_s), int(pid), int(step))
        for at_s, pid, step in (line.split() for line in lines)
    ]


def strike(contender: Contender, fault: str, source: random.Random, *, bound_s: float) -> Round:
    """One round: start the job, strike it, wait for a new step of every rank."""
    rank, after_step, offset_s = (
        source.randrange(WORLD_SIZE),
        source.randrange(6, 16),
        source.uniform(0.0, 0.06),
    )
    with tempfile.TemporaryDirectory(prefix="holdfast-restart-") as name:
        folder = Path(name)
        with job(contender.command, folder, environment=contender.environment) as process:
            reached = wait_until(
                lambda: (
                    all(len(read_steps(folder, one)) >= after_step for one in range(WORLD_SIZE))
                    or process.poll() is not None
                ),
                timeout_s=START_TIMEOUT_S,
            )
            if not reached or process.poll() is not None:
                raise DoesNotWork(f"{contender.name} did not train at all:\n{last_words(folder)}")
            time.sleep(offset_s)
            old_pids = {read_steps(folder, one)[-1].pid for one in range(WORLD_SIZE)}
            fault_at_s = time.time()
            os.kill(read_steps(folder, rank)[-1].pid, FAULTS[fault])

            def first_new_steps() -> list[Step]:
                found = (
                    [step for step in read_steps(folder, one) if step.pid not in old_pids]
                    for one in (0, 1)
                )
                return [steps[0] for steps in found if steps]

            # A launcher that gave up will not bring a new step any more.
            wait_until(
                lambda: len(first_new_steps()) == WORLD_SIZE or process.poll() is not None,
                timeout_s=bound_s,
            )
            steps = first_new_steps()
            first_step_s = (
                max(step.at_s for step in steps) - fault_at_s if len(steps) == WORLD_SIZE else None
            )
            if contender is not OURS:
                return Round(first_step_s=first_step_s)
            if first_step_s is None:
                say(
                    f"holdfast did not recover from {fault} of rank {rank}:\n{last_words(folder, 30)}"
                )
            return _with_ledger(folder, fault, rank, fault_at_s, first_step_s)


def _with_ledger(
    folder: Path, fault: str, rank: int, fault_at_s: float, first_step_s: float | None
) -> Round:
    """One round of ours, with what our supervisor wrote down."""
    with Ledger.open(ledger_url(folder / ".holdfast")) as ledger:
        incidents, attempts = ledger.incidents("r"), ledger.attempts("r")
        started_at_s = [event.at_s for event in ledger.events("r", "started") if event.attempt == 2]
    if not incidents:
        return Round(first_step_s=first_step_s)
    incident = incidents[0]
    parts_s = {}
    if (
        first_step_s is not None
        and len(attempts) > 1
        and started_at_s
        and attempts[0].ended_at_s is not None
    ):
        ended_at_s = attempts[0].ended_at_s
        moments_s = (incident.detected_at_s, ended_at_s, attempts[1].started_at_s, started_at_s[0])
        between = itertools.pairwise((*moments_s, fault_at_s + first_step_s))
        parts_s = {
            part: after_s - before_s
            for part, (before_s, after_s) in zip(PARTS, between, strict=True)
        }
    return Round(
        first_step_s=first_step_s,
        detected_s=incident.detected_at_s - fault_at_s,
        right_rank=incident.rank == rank
        and incident.kind == ("hang" if fault == "SIGSTOP" else "exit"),
        parts_s=parts_s,
    )


def fresh_start_s() -> float:
    """Seconds from starting two ranks by hand to their first step."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="holdfast-restart-") as name:
        folder = Path(name)
        common = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(WORLD_SIZE),
        }
        command = (sys.executable, SCRIPT, "--bare")
        began_s = time.time()
        with (
            job(command, folder, environment={**common, "RANK": "0"}) as first,
            job(command, folder, environment={**common, "RANK": "1"}) as second,
        ):

            def trained() -> bool:
                return all(read_steps(folder, one) for one in (0, 1))

            def ended() -> bool:
                return any(process.poll() is not None for process in (first, second))

            wait_until(lambda: trained() or ended(), timeout_s=START_TIMEOUT_S)
            if not trained():
                raise DoesNotWork(
                    f"{SCRIPT} does not train without a launcher:\n{last_words(folder)}"
                )
            return max(read_steps(folder, one)[0].at_s for one in (0, 1)) - began_s


def measure(
    source: random.Random, quiet: Quiet, *, quick: bool, rounds: int
) -> tuple[Found, list[float]]:
    """All rounds, interleaved, in a random order within each; and the fresh starts, shuffled among them."""
    found: Found = {}
    starts_s: list[float] = []
    for number in range(rounds):
        plan: list[tuple[Contender, str] | None] = [
            (OURS, "SIGKILL"),
            (OURS, "SIGSTOP"),
            (UNSHARED, "SIGKILL"),
        ]
        if not quick:
            plan.append((SHARED, "SIGKILL"))
            plan += [(peer, "SIGSTOP") for peer in PEERS if number == 0]
        # None is a fresh start. It is shuffled like the others, so that the load of the machine falls on all alike.
        plan += [None] * (1 if quick else STARTS_A_ROUND)
        source.shuffle(plan)
        for planned in plan:
            quiet.wait()
            if planned is None:
                starts_s.append(fresh_start_s())
                say(
                    f"round {number + 1} of {rounds}: fresh start: first step after {starts_s[-1]:.2f} s"
                )
                continue
            contender, fault = planned
            bound_s = QUICK_BOUND_S if quick and contender is not OURS else RECOVERY_BOUND_S[fault]
            one = strike(contender, fault, source, bound_s=bound_s)
            took = (
                "not recovered"
                if one.first_step_s is None
                else f"first new step after {one.first_step_s:.2f} s"
            )
            say(f"round {number + 1} of {rounds}: {fault}, {contender.name}: {took}")
            found.setdefault((fault, contender.name), []).append(one)
    return found, starts_s


def rows_of(found: Found, limit_s: float) -> list[Row]:
    """The table."""
    rows = []
    for fault in FAULTS:
        ours = found[fault, OURS.name]
        count = len(ours)
        # Nobody can know of a silence before it has lasted as long as the limit says.
        detect_limit_s = HANG_FLOOR_S if fault == "SIGSTOP" else 0.0
        all_rounds = {"limit": count, "unit": "rounds", "must": Must("=", count)}
        recovered = sum(one.first_step_s is not None for one in ours)
        right = sum(one.right_rank for one in ours)
        rows += [
            Row(measure=f"{fault}: recovered, of {count}", ours=recovered, **all_rounds),
            Row(
                measure=f"{fault}: right rank and kind named, of {count}", ours=right, **all_rounds
            ),
            Row(
                measure=f"{fault} → detected, median",
                ours=_picked(statistics.median, [one.detected_s for one in ours]),
                limit=detect_limit_s,
                unit="s",
            ),
        ]
        rows += [
            Row(
                measure=f"  of the restart: {part}, median",
                ours=_picked(statistics.median, [one.parts_s.get(part) for one in ours]),
                unit="s",
            )
            for part in PARTS
        ]
        ours_s = _present(one.first_step_s for one in ours)
        compared = False
        for peer in PEERS:
            theirs = found.get((fault, peer.name))
            if theirs is None:
                continue
            theirs_s = _present(one.first_step_s for one in theirs)
            rows.append(
                Row(
                    measure=f"{fault}, {peer.name}: recovered, of {len(theirs)}",
                    peer=len(theirs_s),
                    limit=len(theirs),
                    unit="rounds",
                )
            )
            if theirs_s:
                compared = True
                rows += _first_step_rows(
                    fault, peer.name, ours_s, theirs_s, detect_limit_s + limit_s
                )
        if not compared:
            rows += _first_step_rows(
                fault, "no peer recovered", ours_s, [], detect_limit_s + limit_s
            )
    return rows


def _first_step_rows(
    fault: str, peer: str, ours_s: list[float], theirs_s: list[float], limit_s: float
) -> list[Row]:
    """Seconds to the first new step of the rounds that recovered."""
    rows = [
        Row(
            measure=f"{fault} → first new step, {name}; {peer}",
            ours=_picked(pick, ours_s),
            peer=_picked(pick, theirs_s),
            limit=limit_s,
            unit="s",
        )
        for name, pick in PICKS
    ]
    if ours_s and theirs_s:
        median_s = statistics.median(theirs_s)
        rows.append(
            Row(
                measure=f"{fault} → first new step, medians ÷ that of {peer}",
                ours=statistics.median(ours_s) / median_s,
                peer=1,
                limit=limit_s / median_s,
                unit="ratio",
            )
        )
    return rows


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _picked(pick: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    present = _present(values)
    return pick(present) if present else None


def main() -> int:
    args = parse_arguments(__doc__ or "")
    adopt_orphans()
    rounds = 1 if args.quick else 5
    source, quiet = random.Random(args.seed), Quiet(patience_s=0.0 if args.quick else 20.0)
    try:
        with OthersLoad() as others:
            found, starts_s = measure(source, quiet, quick=args.quick, rounds=rounds)
    except DoesNotWork as error:
        say(f"restart.py: {error}")
        return 1
    limit_s = min(starts_s)
    rows = rows_of(found, limit_s)
    rows.append(
        Row(
            measure="fresh start → first step, median",
            limit=statistics.median(starts_s),
            unit="s",
        )
    )
    bounds = ", ".join(
        f"{bound_s:.0f} s after {fault}" for fault, bound_s in RECOVERY_BOUND_S.items()
    )
    peer_bound = f" ({QUICK_BOUND_S:.0f} s for the peers with --quick)" if args.quick else ""
    setting = (
        f"{WORLD_SIZE} gloo ranks, steps of 0.06 s, a checkpoint every 5 steps, hang floor {HANG_FLOOR_S:g} s; "
        "the order is random within each round"
    )
    not_recovered = (
        f"not recovered: no new step within {bounds}{peer_bound}. torchrun has no detector of hangs: its ranks wait "
        "for gloo's own timeout of 30 min, so that its SIGSTOP runs one round only"
    )
    limit = (
        "limit: a fresh group without launcher, supervisor and checkpoint, to its first step, the fastest of "
        f"{1 if args.quick else STARTS_A_ROUND * rounds} (after SIGSTOP: plus the hang floor, less up to a step, "
        "since silence counts from the last step)"
    )
    notes = [setting, not_recovered, limit, quiet.sentence(), others.sentence()]
    kills_s = _present(
        one.first_step_s for (fault, _), some in found.items() if fault == "SIGKILL" for one in some
    )
    below = sum(first_s < limit_s for first_s in kills_s)
    if below:
        notes.append(
            f"NOT A LIMIT: {below} of {len(kills_s)} restarts beat the fastest fresh start, which cannot be; "
            "the machine was too busy for the seconds of this run to be compared"
        )
    report("Fault → first new step", rows, notes=notes, json_file=args.json)
    broken = [
        fault
        for fault in FAULTS
        if all(one.first_step_s is None for one in found[fault, OURS.name])
    ]
    if broken:
        say(f"restart.py: holdfast never recovered from {' or '.join(broken)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
