"""What a run of several nodes survives: its own processes killed, a node lost; beside torchrun's elastic agents.

The nodes are agents on this host, with one gloo rank each (`workers/training.py`, the same script for all).

- `processes`: kill -9 of an agent or of the supervisor at random moments of one run. No rank may end.
- `node`: kill -9 of a node and of all its processes while a spare waits, to the first new step of every rank. The peer
  is torchrun with `--rdzv-backend=c10d --nnodes=2 --max-restarts=3` and a third agent that waits.
- `first`: the same for the node that leads the run. torchrun's store ends with that node, so there is no peer.

The limit is the start of a fresh group without launcher, supervisor or checkpoint, to its first step.
"""

import contextlib
import itertools
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from common.jobs import (
    HOLDFAST,
    TORCHRUN,
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
from holdfast.core.paths import RunPaths, ledger_url
from holdfast.core.sockets import free_ports
from restart import SCRIPT, fresh_start_s, read_steps

PARTS = ("processes", "node", "first")
START_TIMEOUT_S = 90.0
STEPS_BETWEEN_KILLS = 15
BOUND_S = 120.0
"""How long a round waits for a new step; then it counts as not recovered."""
SETTLED_S = 12.0
"""So long after its first steps a job is struck: the spare is there, and each node has a launcher ready."""
VICTIMS = (("n1", "agent"), ("n2", "agent"), ("n1", "supervisor_process"))


@dataclass(frozen=True)
class Nodes:
    """Several agents on this host, and the folder in which their ranks write."""

    folder: Path
    processes: dict[str, psutil.Process]

    def pids(self) -> set[int]:
        """Return the processes that have written a step."""
        return {step.pid for rank in (0, 1) for step in read_steps(self.folder, rank)}

    def last_step(self) -> int:
        """Return the last step that both ranks have made."""
        return min(max((one.step for one in read_steps(self.folder, r)), default=0) for r in (0, 1))

    def new_step_at_s(self, old: set[int]) -> float | None:
        """Return when both ranks had made a step in processes other than the `old` ones."""
        found = [[s for s in read_steps(self.folder, rank) if s.pid not in old] for rank in (0, 1)]
        return max(steps[0].at_s for steps in found) if all(found) else None


@contextmanager
def nodes(commands: dict[str, Sequence[str]]) -> Iterator[Nodes]:
    """Start a node after the other, and wait until two ranks train."""
    with tempfile.TemporaryDirectory(prefix="holdfast-recover-") as name, ExitStack() as stack:
        folder = Path(name)
        found = Nodes(folder, {})
        for node, command in commands.items():
            environment = {"HOLDFAST_NODE_NAME": node}
            process = stack.enter_context(job(command, folder, environment=environment))
            found.processes[node] = psutil.Process(process.pid)
            time.sleep(1.0)  # so that the first one is first
        if not wait_until(
            lambda: found.last_step() >= STEPS_BETWEEN_KILLS, timeout_s=START_TIMEOUT_S
        ):
            raise DoesNotWork(f"the ranks do not train:\n{last_words(folder)}")
        yield found


def ours(count: int) -> dict[str, Sequence[str]]:
    """Return the commands of `count` nodes of Holdfast, of which two train."""
    meeting = ("--nnodes", "2", "--rendezvous", f"127.0.0.1:{free_ports(1)[0]}")
    command = (*HOLDFAST, "run", "--name", "r", *meeting, "--", sys.executable, SCRIPT)
    return {f"n{number}": command for number in range(1, count + 1)}


def torchruns(count: int) -> dict[str, Sequence[str]]:
    """Return the commands of `count` elastic agents of torchrun, of which two train."""
    endpoint = f"127.0.0.1:{free_ports(1)[0]}"
    options = ("--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d")
    command = (*TORCHRUN, *options, f"--rdzv-endpoint={endpoint}", "--rdzv-id=r", SCRIPT)
    return {f"n{number}": command for number in range(1, count + 1)}


# Our own processes


def running(node: psutil.Process, module: str) -> list[psutil.Process]:
    """Return the children of a node that run a module."""
    found = []
    for child in node.children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            if any(word.endswith(f".{module}") for word in child.cmdline()):
                found.append(child)
    return found


def process_rows(source: random.Random, kills: int) -> list[Row]:
    """Kill agents and supervisors of one run, one after the other."""
    killed_at_s: list[float] = []
    with nodes(ours(2)) as found:
        pids = found.pids()
        for number in range(kills):
            node, module = VICTIMS[number % len(VICTIMS)]
            (victim,) = running(found.processes[node], module)
            time.sleep(source.uniform(0.0, 0.5))
            killed_at_s.append(time.time())
            victim.kill()
            goal = found.last_step() + STEPS_BETWEEN_KILLS
            wait_until(
                lambda n=found.processes[node], m=module, v=victim: any(
                    one.pid != v.pid for one in running(n, m)
                ),
                timeout_s=BOUND_S,
            )
            if not wait_until(lambda g=goal: found.last_step() >= g, timeout_s=BOUND_S):
                raise DoesNotWork(
                    f"{module} of {node} killed: no step:\n{last_words(found.folder)}"
                )
            say(f"kill {number + 1} of {kills}: {module} of {node}: the ranks train on")
        time.sleep(3.0)  # for what is still on its way to the ledger
        ended = len(found.pids() - pids)
        steps = read_steps(found.folder, 0)
        with Ledger.open(ledger_url(found.folder / ".holdfast")) as ledger:
            incidents, attempts = ledger.incidents("r"), ledger.attempts("r")
            followed_s = [event.at_s for event in ledger.events("r", "supervisor_followed")]
        journal = RunPaths(found.folder / ".holdfast", "r").steps.read_text().splitlines()
        recorded = {json.loads(line)["step"] for line in journal}
        missing = len({step.step for step in steps[:-10]} - recorded)
        of_supervisor_s = killed_at_s[2 :: len(VICTIMS)]
    gaps_s = [after.at_s - before.at_s for before, after in itertools.pairwise(steps)]
    took_s = [after - before for before, after in zip(of_supervisor_s, followed_s, strict=False)]
    none = {"limit": 0, "unit": "count", "must": Must("=", 0)}
    return [
        Row(measure=f"ranks ended, of {kills} kills", ours=ended, **none),
        Row(measure="incidents", ours=len(incidents), **none),
        Row(measure="attempts", ours=len(attempts), limit=1, unit="count", must=Must("=", 1)),
        Row(measure="steps that the ledger lacks", ours=missing, limit=0, unit="count"),
        Row(
            measure="longest time between two steps ÷ median",
            ours=max(gaps_s) / statistics.median(gaps_s),
            limit=1,
            unit="ratio",
        ),
        Row(
            measure="supervisor killed → the next one has taken over, slowest",
            ours=max(took_s, default=None),
            unit="s",
        ),
    ]


# Nodes


def strike(commands: dict[str, Sequence[str]], victim: str) -> float | None:
    """Kill a node with all its processes; return the seconds to the first new step of every rank."""
    with nodes(commands) as found:
        time.sleep(SETTLED_S)
        old, at_s = found.pids(), time.time()
        struck = found.processes[victim]
        below = struck.children(recursive=True)
        struck.kill()
        for one in below:
            try:
                one.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        wait_until(lambda: found.new_step_at_s(old) is not None, timeout_s=BOUND_S)
        new_s = found.new_step_at_s(old)
        if new_s is None:
            say(f"not recovered:\n{last_words(found.folder, 30)}")
        return None if new_s is None else new_s - at_s


def node_rows(
    what: str,
    victim: str,
    quiet: Quiet,
    source: random.Random,
    *,
    rounds: int,
    limit_s: float,
    must_s: float,
    has_peer: bool,
) -> list[Row]:
    """Strike a node of ours, and of torchrun's agents, in a random order."""
    found: dict[str, list[float | None]] = {"ours": [], "peer": []}
    contenders: list[tuple[str, Callable[[int], dict[str, Sequence[str]]]]] = [("ours", ours)]
    if has_peer:
        contenders.append(("peer", torchruns))
    for number in range(rounds):
        source.shuffle(contenders)
        for name, commands in contenders:
            quiet.wait()
            seconds = strike(commands(3), victim)
            found[name].append(seconds)
            said = "not recovered" if seconds is None else f"first new step after {seconds:.2f} s"
            say(f"{what}, round {number + 1} of {rounds}, {name}: {said}")
    times_s = {name: [one for one in some if one is not None] for name, some in found.items()}
    medians_s = {name: statistics.median(some) for name, some in times_s.items() if some}
    rows = [
        Row(
            measure=f"{what}: recovered, of {rounds}",
            ours=len(times_s["ours"]),
            peer=len(times_s["peer"]) if has_peer else None,
            limit=rounds,
            unit="rounds",
            must=Must("=", rounds),
        ),
        Row(
            measure=f"{what} → first new step, median",
            ours=medians_s.get("ours"),
            peer=medians_s.get("peer"),
            limit=limit_s,
            unit="s",
            must=Must("<=", must_s),
        ),
    ]
    if len(medians_s) == len(contenders) == 2:
        ratio = medians_s["ours"] / medians_s["peer"]
        rows.append(Row(measure=f"{what}: medians, ours ÷ peer", ours=ratio, peer=1, unit="ratio"))
    return rows


def main() -> int:
    args = parse_arguments(__doc__ or "", parts=PARTS, rounds=5)
    adopt_orphans()
    source, quiet = random.Random(args.seed), Quiet(patience_s=0.0 if args.quick else 20.0)
    parts = args.only or (("processes", "node") if args.quick else PARTS)
    rounds = 1 if args.quick else args.rounds
    rows: list[Row] = []
    try:
        with OthersLoad() as others:
            limit_s = min(fresh_start_s() for _ in range(1 if args.quick else 3))
            if "processes" in parts:
                rows += process_rows(source, 3 if args.quick else 30)
            if "node" in parts:
                rows += node_rows(
                    "node killed, spare there",
                    "n2",
                    quiet,
                    source,
                    rounds=rounds,
                    limit_s=limit_s,
                    must_s=6.0,
                    has_peer=not args.quick,
                )
            if "first" in parts:
                rows += node_rows(
                    "first node killed, spare there",
                    "n1",
                    quiet,
                    source,
                    rounds=rounds,
                    limit_s=limit_s,
                    must_s=60.0,
                    has_peer=False,
                )
    except DoesNotWork as error:
        say(f"recover.py: {error}")
        return 1
    notes = [
        "2 nodes of one gloo rank on one host, and a spare; steps of 0.06 s, a checkpoint every 5 steps",
        f"nodes are killed {SETTLED_S:.0f} s after the first steps: the spare is there, each node has a launcher ready",
        "limit in seconds: a fresh group without launcher, supervisor and checkpoint, to its first step",
        quiet.sentence(),
        others.sentence(),
    ]
    report("What several nodes survive", rows, notes=notes, json_file=args.json)
    broken = [
        row.measure for row in rows if row.must is not None and row.unit != "s" and not row.met
    ]
    if broken:
        say(f"recover.py: not as it must be: {'; '.join(broken)}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
