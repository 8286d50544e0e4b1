"""Seconds from the death of a node to the first new step of every rank, while a spare waits.

The nodes are agents on this host, with one gloo rank each (`workers/training.py`, the same script
for all). Struck are the other node that trains, beside torchrun with `--rdzv-backend=c10d
--nnodes=2 --max-restarts=3` and a third agent that waits, and the node that leads the run.
torchrun's store ends with that one, so there is no peer.

In a Slurm job, the nodes are those of a private Slurm on this host, whose daemons of the node are
killed, too. Without Holdfast such a job ends with its node, so there is no peer.
"""

import contextlib
import functools
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from common.jobs import HOLDFAST, TORCHRUN, DoesNotWork, job, last_words, say, wait_until
from common.machine import Quiet
from common.table import Must, Row
from holdfast.core.sockets import free_ports
from holdfast.testing.slurm import PrivateSlurm
from recovering.jobs import SCRIPT, START_TIMEOUT_S, read_steps

SETTLED_S, QUICK_SETTLED_S = 12.0, 2.0
"""Seconds from a job's first steps to the strike: the spare and its launchers are ready.

A quick run need not be fast, and strikes before the ranks' successors import their modules.
"""
FIRST_STEPS = 15
"""Steps before a node is struck."""
BOUND_S = 120.0
"""The limit for a new step; after it, the round counts as not recovered."""


@dataclass
class Steps:
    """The folder in which two ranks write their steps."""

    folder: Path

    def pids(self) -> set[int]:
        """Return the processes that have written a step."""
        return {step.pid for rank in (0, 1) for step in read_steps(self.folder, rank)}

    def last_step(self) -> int:
        """Return the last step that both ranks have made."""
        return min(max((one.step for one in read_steps(self.folder, r)), default=0) for r in (0, 1))

    def await_training(self) -> None:
        """Wait until both ranks train.

        Raises:
            DoesNotWork: they do not.
        """
        if not wait_until(lambda: self.last_step() >= FIRST_STEPS, timeout_s=START_TIMEOUT_S):
            raise DoesNotWork(f"the ranks do not train:\n{last_words(self.folder)}")

    def new_step_at_s(self, old: set[int]) -> float | None:
        """Return the time at which both ranks have a step in processes other than `old`.

        Else None.
        """
        found = [[s for s in read_steps(self.folder, rank) if s.pid not in old] for rank in (0, 1)]
        return max(steps[0].at_s for steps in found) if all(found) else None


@dataclass
class Nodes(Steps):
    """Several agents on this host."""

    processes: dict[str, psutil.Process] = field(default_factory=dict)

    def kill(self, *, is_first: bool) -> None:
        """Kill the first node, or the other one that trains, with all its processes."""
        struck = self._training(is_first=is_first)
        below = struck.children(recursive=True)
        struck.kill()
        for one in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGKILL)

    def _training(self, *, is_first: bool) -> psutil.Process:
        """Return the node; under load the third one may have joined before the second."""
        first, *others = self.processes.values()
        if is_first:
            return first
        pids = self.pids()
        for node in others:
            if any(child.pid in pids for child in node.children(recursive=True)):
                return node
        raise DoesNotWork(f"no node but the first one trains:\n{last_words(self.folder)}")


@dataclass
class SlurmNodes(Steps):
    """The nodes of a job in a private Slurm."""

    slurm: PrivateSlurm

    def kill(self, *, is_first: bool) -> None:
        """Kill the node that trains and does not lead the run."""
        assert not is_first
        names = {psutil.Process(pid).environ()["SLURMD_NODENAME"] for pid in self.pids()}
        self.slurm.kill_node(max(names))  # the batch script runs on the job's first node


Cluster = Nodes | SlurmNodes


@contextmanager
def slurm_nodes() -> Iterator[SlurmNodes]:
    """Submit a run of two nodes and a spare, and wait until two ranks train."""
    with tempfile.TemporaryDirectory(prefix="holdfast-") as name:
        folder = Path(name)
        with PrivateSlurm(folder / "s", nodes=3) as slurm:
            options = ("--on", "slurm", "--nodes", "2", "--spares", "1", "--name", "r", "--detach")
            done = subprocess.run(
                [*HOLDFAST, "run", *options, "--", sys.executable, SCRIPT],
                cwd=folder,
                env={
                    **slurm.environment,
                    "HOLDFAST_HOME": str(folder / ".holdfast"),
                    "OMP_NUM_THREADS": "1",
                },
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode != 0:
                raise DoesNotWork(f"the run cannot be submitted: {done.stderr}")
            found = SlurmNodes(folder, slurm)
            found.await_training()
            yield found


@contextmanager
def nodes(commands: Callable[[int], dict[str, Sequence[str]]]) -> Iterator[Nodes]:
    """Start three nodes one after the other, and wait until two ranks train."""
    with tempfile.TemporaryDirectory(prefix="holdfast-recover-") as name, ExitStack() as stack:
        folder = Path(name)
        found = Nodes(folder)
        for node, command in commands(3).items():
            environment = {"HOLDFAST_NODE_NAME": node}
            process = stack.enter_context(job(command, folder, environment=environment))
            found.processes[node] = psutil.Process(process.pid)
            time.sleep(1.0)  # so that the first one is first
        found.await_training()
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


def strike(
    start: Callable[[], AbstractContextManager[Cluster]], *, is_first: bool, settled_s: float
) -> float | None:
    """Kill a node with all its processes; return the seconds to the first new step of all."""
    with start() as found:
        time.sleep(settled_s)
        old, at_s = found.pids(), time.time()
        found.kill(is_first=is_first)
        wait_until(lambda: found.new_step_at_s(old) is not None, timeout_s=BOUND_S)
        new_s = found.new_step_at_s(old)
        if new_s is None:
            say(f"not recovered:\n{last_words(found.folder, 30)}")
        return None if new_s is None else new_s - at_s


def node_rows(
    what: str,
    quiet: Quiet,
    source: random.Random,
    *,
    rounds: int,
    limit_s: float,
    must_s: float,
    is_first: bool = False,
    in_slurm: bool = False,
    is_quick: bool,
) -> list[Row]:
    """Strike a node of Holdfast, and of torchrun if it survives, in a random order."""
    has_peer = not (is_first or in_slurm or is_quick)
    settled_s = QUICK_SETTLED_S if is_quick else SETTLED_S
    found: dict[str, list[float | None]] = {"ours": [], "peer": []}
    starts: dict[str, Callable[[], AbstractContextManager[Cluster]]] = {
        "ours": slurm_nodes if in_slurm else functools.partial(nodes, ours)
    }
    if has_peer:
        starts["peer"] = functools.partial(nodes, torchruns)
    contenders = list(starts.items())
    for number in range(rounds):
        source.shuffle(contenders)
        for name, start in contenders:
            quiet.wait()
            seconds = strike(start, is_first=is_first, settled_s=settled_s)
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
