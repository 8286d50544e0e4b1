"""Kill processes of an evaluation at random: no finished work is redone, scores stay the same.

Each run is `holdfast eval run` over synthetic tasks with simulated engines, in real processes.
Several of them are killed (SIGKILL) one after the other, at moments drawn from the seed:

- an engine, a node's agent with all its processes, the harness host or its zygote,
- a task's client or a metric worker,
- the coordinator, alone or together with an engine,
- the command itself; `holdfast eval resume` then continues the evaluation.

The scores are compared with those of a run left alone. There is no peer: none resumes with single
samples. The exit status is 1 if a must is not met.
"""

import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.jobs import adopt_orphans, say
from common.machine import OthersLoad
from common.table import Must, Row, parse_arguments, report
from evaluation.fault_injected_evaluation import (
    FaultInjectedEvaluation,
    Role,
    redone,
    synthetic_tasks,
)

KILLS, QUICK_KILLS = 200, 5
KILLS_A_RUN = 5
SAMPLES = (120, 90, 110)
QUICK_SAMPLES = (70, 50, 60)
NODES, ENGINES_PER_NODE = 2, 1
LINGER_S = 3.0
"""The time for which processes of a killed command may linger; `resume` waits for them."""
TIMEOUT_S = 240.0
RECOVERY_S = 3.0
VICTIMS: tuple[tuple[Role, ...], ...] = (
    ("engine",),
    ("node",),
    ("metric",),
    ("client",),
    ("host",),
    ("zygote",),
    ("coordinator",),
    ("coordinator", "engine"),
    ("command",),
)
MAX_OF_ONE_CLIENT = 2
"""The most kills of one task's client: after three deaths, the task is given up."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill: its time, its processes, and the journals just after it."""

    victims: tuple[Role, ...]
    at_s: float
    since_s: float
    """The start of the running command."""
    engines: frozenset[int]
    """The engines that the kill ended."""
    before: frozenset[int]
    """The engines that lived before the kill."""
    kept_s: float
    kept: frozenset[str]


@dataclass(kw_only=True)
class FaultInjectedRun:
    """The results of one run."""

    seed: int
    kills: list[Kill] = field(default_factory=list)
    redone: int = 0
    identical: bool = False
    left: list[str] = field(default_factory=list)
    recovered_s: list[tuple[tuple[Role, ...], float]] = field(default_factory=list)
    """For each kill with open requests: seconds until later requests were answered."""
    replaced_s: list[float] = field(default_factory=list)
    """For each killed engine: seconds until the first answer of an engine started since."""
    output: str = ""


def evaluation(folder: Path, samples: Sequence[int]) -> FaultInjectedEvaluation:
    """Return the same evaluation every time, in a separate folder."""
    return FaultInjectedEvaluation(
        folder=folder,
        tasks=synthetic_tasks(random.Random(0), samples, metric_s=0.03),
        nodes=NODES,
        engines_per_node=ENGINES_PER_NODE,
        flags=("--max-batch", "4", "--linger-s", str(LINGER_S), "--metric-slots", "2"),
        engine_options={"step_base_s": 0.003},
    )


def undisturbed(samples: Sequence[int]) -> dict[str, Any]:
    """Return the scores of the evaluation without kills."""
    with tempfile.TemporaryDirectory(prefix="holdfast-faults-") as name:
        alone = evaluation(Path(name), samples)
        try:
            alone.start().wait(TIMEOUT_S)
            return alone.results()
        finally:
            alone.end()


def run_under_kills(
    seed: int, samples: Sequence[int], most_kills: int, expected: dict[str, Any]
) -> FaultInjectedRun:
    """Run the evaluation under kills."""
    chance = random.Random(seed)
    run = FaultInjectedRun(seed=seed)
    with tempfile.TemporaryDirectory(prefix="holdfast-faults-") as name:
        under = evaluation(Path(name), samples)
        try:
            _run_under_kills(under, chance, run, most_kills)
            time.sleep(0.2)
            run.left = [*under.leftovers(), *under.shared_memory()]
            run.identical = under.paths.results.exists() and under.results() == expected
            _judge(under, run)
            if not run.identical or run.left or run.redone:
                run.output = under.output()[-2000:]
        finally:
            under.end()
    return run


def _run_under_kills(
    under: FaultInjectedEvaluation, chance: random.Random, run: FaultInjectedRun, most_kills: int
) -> None:
    began_s = since_s = time.monotonic()
    command = under.start()
    # One kill in five comes at any time from the start on, the others once work is under way.
    if chance.random() > 0.2:
        under.wait_until_finished(1, TIMEOUT_S)
    while len(run.kills) < most_kills:
        _wait(command, chance.uniform(0.0, 1.0))
        if command.poll() is not None or time.monotonic() - began_s > TIMEOUT_S:
            break
        victims = chance.choice(VICTIMS)
        if (
            victims == ("client",)
            and sum(kill.victims == victims for kill in run.kills) >= MAX_OF_ONE_CLIENT
        ):
            continue
        kill = _kill(under, victims, chance, since_s)
        if kill is None:
            continue
        run.kills.append(kill)
        if "command" in victims:
            command.wait()
            since_s = time.monotonic()
            command = under.resume() if under.paths.suite.exists() else under.start()
    command.wait(TIMEOUT_S)


def _wait(command: Any, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s and command.poll() is None:
        time.sleep(0.005)


def _kill(
    under: FaultInjectedEvaluation, victims: tuple[Role, ...], chance: random.Random, since_s: float
) -> Kill | None:
    living, by_agent = under.processes(), under.engines_by_agent()
    if not all(living[role] for role in victims):
        return None
    at_s = time.monotonic()
    dead = [pid for role in victims if (pid := under.kill(role, chance)) is not None]
    if len(dead) < len(victims):
        return None
    engines = set(dead) & set(living["engine"]) | {
        engine for pid in dead for engine in by_agent.get(pid, ())
    }
    return Kill(
        victims=victims,
        at_s=at_s,
        since_s=since_s,
        engines=frozenset(engines),
        before=frozenset(living["engine"]),
        kept_s=time.monotonic(),
        kept=frozenset(under.committed()),
    )


def _judge(under: FaultInjectedEvaluation, run: FaultInjectedRun) -> None:
    record = under.record()
    killed_s = {pid: kill.at_s for kill in run.kills for pid in kill.engines}
    for kill in run.kills:
        if (
            "command" in kill.victims
        ):  # all engines end after it, once they have said what they finished
            killed_s |= dict.fromkeys(kill.before - killed_s.keys(), kill.at_s)
    kept = [(kill.kept_s, set(kill.kept)) for kill in run.kills]
    run.redone = len(redone(record, killed_s, kept))
    for place, kill in enumerate(run.kills):
        until_s = run.kills[place + 1].at_s if place + 1 < len(run.kills) else float("inf")
        asked = {
            (line.key, line.pid)
            for line in record
            if line.what == "asked" and kill.at_s < line.at_s
        }
        answered_s = [
            line.at_s
            for line in record
            if line.what == "finished" and line.at_s > kill.at_s and (line.key, line.pid) in asked
        ]
        by_new_s = [
            line.at_s
            for line in record
            if line.what == "finished" and line.at_s > kill.at_s and line.pid not in kill.before
        ]
        is_under_way = any(
            line.what == "finished" and kill.since_s < line.at_s < kill.at_s for line in record
        )
        if (
            is_under_way
            and "command" not in kill.victims
            and answered_s
            and (min(answered_s) < until_s or until_s == float("inf"))
        ):
            run.recovered_s.append((kill.victims, min(answered_s) - kill.at_s))
        if kill.engines and "command" not in kill.victims and by_new_s and min(by_new_s) < until_s:
            run.replaced_s.append(min(by_new_s) - kill.at_s)


def rows_of(runs: Sequence[FaultInjectedRun], wanted: int) -> list[Row]:
    """Return the table."""
    kills = [kill for one in runs for kill in one.kills]
    recovered_s = sorted(seconds for one in runs for _victims, seconds in one.recovered_s)
    replaced_s = sorted(seconds for one in runs for seconds in one.replaced_s)
    rows = [
        Row(measure="kills", ours=len(kills), unit="kills", must=Must(">=", wanted)),
        Row(
            measure="finished requests done again",
            ours=sum(one.redone for one in runs),
            unit="requests",
            must=Must("=", 0),
        ),
        Row(
            measure=f"runs with the scores of the run left alone, of {len(runs)}",
            ours=sum(one.identical for one in runs),
            unit="runs",
            must=Must("=", len(runs)),
        ),
        Row(
            measure="processes and sessions in shared memory left over",
            ours=sum(len(one.left) for one in runs),
            unit="of them",
            must=Must("=", 0),
        ),
    ]
    for name, share in (("median", 0.5), ("99th percentile", 0.99), ("longest", 1.0)):
        rows.append(
            Row(
                measure=f"from a kill to the next answer to something asked after it, {name}",
                ours=_quantile(recovered_s, share),
                unit="s",
                must=Must("<=", RECOVERY_S),
            )
        )
    for victims in VICTIMS:
        own_s = sorted(
            seconds for one in runs for whom, seconds in one.recovered_s if whom == victims
        )
        count = sum(kill.victims == victims for kill in kills)
        who = " and ".join(victims)
        rows.append(
            Row(measure=f"  {who}, median of {count} kills", ours=_quantile(own_s, 0.5), unit="s")
        )
        rows.append(Row(measure=f"  {who}, longest", ours=_quantile(own_s, 1.0), unit="s"))
    for name, share in (("median", 0.5), ("longest", 1.0)):
        rows.append(
            Row(
                measure=f"from an engine's death to the first answer of its successor, {name}",
                ours=_quantile(replaced_s, share),
                unit="s",
            )
        )
    return rows


def _quantile(ascending: Sequence[float], share: float) -> float | None:
    if not ascending:
        return None
    if share == 0.5:
        return statistics.median(ascending)
    return ascending[min(len(ascending) - 1, round(share * (len(ascending) - 1)))]


def main() -> int:
    args = parse_arguments(__doc__ or "")
    adopt_orphans()
    wanted, samples = (QUICK_KILLS, QUICK_SAMPLES) if args.quick else (KILLS, SAMPLES)
    chance = random.Random(args.seed)
    runs: list[FaultInjectedRun] = []
    with OthersLoad() as others:
        expected = undisturbed(samples)
        while (made := sum(len(one.kills) for one in runs)) < wanted:
            one = run_under_kills(
                chance.randrange(2**32), samples, min(KILLS_A_RUN, wanted - made), expected
            )
            runs.append(one)
            verdict = (
                "as it must be" if one.identical and not one.redone and not one.left else "WRONG"
            )
            victims = Counter("+".join(kill.victims) for kill in one.kills)
            say(f"{made + len(one.kills)} kills, seed {one.seed}: {dict(victims)}: {verdict}")
            if verdict == "WRONG":
                say(
                    f"identical {one.identical}, redone {one.redone}, left {one.left}\n{one.output}"
                )
    notes = (
        f"{NODES} nodes of one engine each on this machine, {sum(samples)} requests a run",
        "a kill before the first answer of its command, or after which nothing was left to ask, has no figure",
        "done again: asked of an engine after it stood in a journal, or after an engine that lived on had finished it",
        others.sentence(),
    )
    rows = rows_of(runs, wanted)
    report("An evaluation under kills", rows, notes=notes, json_file=args.json)
    return 1 if any(row.met is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
