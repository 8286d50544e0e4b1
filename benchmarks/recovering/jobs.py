"""Start jobs of `workers/training.py` under each launcher, strike ranks, and read their steps.

Times are those of the signal and of the ranks' lines after each step.
"""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import holdfast
from common.jobs import (
    HOLDFAST,
    TORCHRUN,
    WORKERS,
    DoesNotWork,
    job,
    last_words,
    say,
    wait_until,
)
from holdfast.core.ledger import Ledger
from holdfast.core.paths import ledger_url

SCRIPT = str(WORKERS / "training.py")
STEP_S = 0.1
HANG_FLOOR_S = 2.0
HANG_FACTOR = 8.0
START_TIMEOUT_S = 90.0
RECOVERY_BOUND_S = {"SIGKILL": 45.0, "SIGSTOP": 20.0, "deadlock": 20.0}
"""The limit for a new step; then the round is not recovered, and all processes are killed."""
STILL_S = 0.2
FAULTS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "deadlock": signal.SIGUSR1}
"""The signal of each fault; `workers/training.py` turns SIGUSR1 into a deadlock."""
HANGS = ("SIGSTOP", "deadlock")
ENV_FT_LAUNCHER = "FT_LAUNCHER"
"""The path of ft_launcher (NVIDIA's resiliency extension) in a separate environment."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A launcher that restarts the job."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


def contenders(world_size: int) -> list[Contender]:
    """Return Holdfast, torchrun in both store modes, and ft_launcher if installed."""
    count = ("--nproc", str(world_size))
    hangs = ("--hang-floor-s", str(HANG_FLOOR_S), "--hang-factor", str(HANG_FACTOR))
    script = (SCRIPT, "--step-s", str(STEP_S))
    ours = (*HOLDFAST, "run", "--name", "r", *count, *hangs, "--", sys.executable, *script)
    restarts = ("--standalone", f"--nproc-per-node={world_size}", "--max-restarts=1000")
    found = [
        Contender(name="holdfast", command=ours),
        Contender(name="torchrun, its default store", command=(*TORCHRUN, *restarts, *script)),
        Contender(
            name="torchrun, unshared store",
            command=(*TORCHRUN, *restarts, *script),
            environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        ),
    ]
    launcher = os.environ.get(ENV_FT_LAUNCHER) or shutil.which("ft_launcher")
    if launcher is not None:
        # Its own default of the heartbeats' timeout is minutes; 5 s is the least that its check
        # each 5 s allows.
        limits = ("--ft-initial-rank-heartbeat-timeout=60", "--ft-rank-heartbeat-timeout=5")
        environment = {"PYTHONPATH": str(Path(holdfast.__file__).parents[1])}
        command = (launcher, *restarts, *limits, *script)
        found.append(Contender(name="ft_launcher", command=command, environment=environment))
    return found


def missing_peers() -> str:
    """Return a note about the missing peers."""
    if os.environ.get(ENV_FT_LAUNCHER) or shutil.which("ft_launcher"):
        return "ft_launcher: of NVIDIA's resiliency extension, with heartbeats after each step and a limit of 5 s"
    return (
        "ft_launcher was not measured: NVIDIA's resiliency extension is not installed; name the program in "
        f"${ENV_FT_LAUNCHER}"
    )


class Step(NamedTuple):
    """A line that a rank wrote."""

    at_s: float
    pid: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Round:
    """The result of one fault, in seconds since the signal; None after the bound."""

    first_step_s: float | None
    detected_s: float | None = None
    right_rank: bool = False
    stood_still: bool = False
    """True if this process stood still for `STILL_S` meanwhile, since the machine did."""


Found = dict[tuple[str, str, str], list[Round]]
"""The rounds of each contender, cold or warm, and of each fault."""


class StandStill:
    """Detect standstills of the machine by a thread that wakes every 10 ms."""

    def __init__(self) -> None:
        self._gaps: list[tuple[float, float]] = []
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        before_s = time.time()
        while True:
            time.sleep(0.01)
            now_s = time.time()
            if now_s - before_s > STILL_S:
                self._gaps.append((before_s, now_s))
            before_s = now_s

    def within(self, began_s: float, ended_s: float) -> bool:
        """Return True if the machine stood still at some moment of a stretch."""
        return any(first_s < ended_s and last_s > began_s for first_s, last_s in self._gaps)


def read_steps(folder: Path, rank: int, *, after: int = 0) -> list[Step]:
    """Return a rank's steps after so many bytes of its file; leave out an incomplete line."""
    path = folder / f"steps-{rank}.txt"
    if not path.exists():
        return []
    with path.open() as file:
        file.seek(after)
        lines = file.read().split("\n")[:-1]
    return [
        Step(float(at_s), int(pid), int(step))
        for at_s, pid, step in (line.split() for line in lines)
    ]


class Job:
    """A job of one contender that is struck repeatedly."""

    def __init__(
        self, contender: Contender, world_size: int, folder: Path, process: subprocess.Popen[bytes]
    ) -> None:
        self.contender = contender
        self._ranks = range(world_size)
        self._folder = folder
        self._process = process
        self._strikes = 0
        self._read = dict.fromkeys(self._ranks, 0)
        """The bytes of each rank's steps that are of former processes."""

    def _steps(self, rank: int) -> list[Step]:
        return read_steps(self._folder, rank, after=self._read[rank])

    def await_steps(self, pids: set[int], count: int, bound_s: float) -> float | None:
        """Return the time at which each rank has `count` steps in processes other than `pids`.

        Returns:
            None after the bound.
        """

        def steps() -> list[list[Step]]:
            return [
                [step for step in self._steps(rank) if step.pid not in pids] for rank in self._ranks
            ]

        # A launcher that gave up will not bring a new step any more.
        wait_until(
            lambda: all(len(one) >= count for one in steps()) or self._process.poll() is not None,
            timeout_s=bound_s,
        )
        found = steps()
        if any(len(one) < count for one in found):
            return None
        return max(one[count - 1].at_s for one in found)

    def strike(self, fault: str, source: random.Random, still: StandStill, bound_s: float) -> Round:
        """Strike a random rank; wait for a new step of every rank."""
        rank = source.randrange(len(self._ranks))
        time.sleep(source.uniform(0.0, STEP_S))
        steps = {one: self._steps(one) for one in self._ranks}
        self._read = {one: _size(self._folder, one) for one in self._ranks}
        pids = {some[-1].pid for some in steps.values()}
        at_s = time.time()
        os.kill(steps[rank][-1].pid, FAULTS[fault])
        self._strikes += 1
        new_at_s = self.await_steps(pids, 1, bound_s)
        one = Round(
            first_step_s=None if new_at_s is None else new_at_s - at_s,
            stood_still=still.within(at_s, time.time()),
        )
        if self.contender.name != "holdfast":
            return one
        if new_at_s is None:
            say(f"not recovered from {fault} of rank {rank}:\n{last_words(self._folder, 30)}")
        return self._with_ledger(one, fault, rank, at_s)

    def _with_ledger(self, one: Round, fault: str, rank: int, at_s: float) -> Round:
        """Return a round of Holdfast with the times of our supervisor's ledger."""
        with Ledger.open(ledger_url(self._folder / ".holdfast")) as ledger:
            incidents = ledger.incidents("r")
        if len(incidents) != self._strikes:
            say(f"{len(incidents)} incidents after {self._strikes} faults")
            return one
        incident = incidents[-1]
        kind = "hang" if fault in HANGS else "exit"
        return replace(
            one,
            detected_s=incident.detected_at_s - at_s,
            right_rank=(incident.rank, incident.kind) == (rank, kind),
        )


def _size(folder: Path, rank: int) -> int:
    """Return the number of bytes of a rank's complete lines."""
    return (folder / f"steps-{rank}.txt").read_bytes().rfind(b"\n") + 1


@contextmanager
def training(contender: Contender, world_size: int, after_step: int) -> Iterator[Job]:
    """Start a job, and wait until each rank has made so many steps."""
    with tempfile.TemporaryDirectory(prefix="holdfast-restart-") as name:
        folder = Path(name)
        with job(contender.command, folder, environment=contender.environment) as process:
            found = Job(contender, world_size, folder, process)
            if found.await_steps(set(), after_step, START_TIMEOUT_S) is None:
                raise DoesNotWork(f"{contender.name} did not train at all:\n{last_words(folder)}")
            yield found


def fresh_start_s(world_size: int = 2) -> float:
    """Return the seconds from starting ranks without a launcher to their first step."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="holdfast-restart-") as name:
        folder = Path(name)
        common = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(world_size),
        }
        command = (sys.executable, SCRIPT, "--bare")
        began_s = time.time()
        with ExitStack() as stack:
            processes = [
                stack.enter_context(job(command, folder, environment={**common, "RANK": str(rank)}))
                for rank in range(world_size)
            ]

            def trained() -> bool:
                return all(read_steps(folder, rank) for rank in range(world_size))

            def ended() -> bool:
                return any(process.poll() is not None for process in processes)

            wait_until(lambda: trained() or ended(), timeout_s=START_TIMEOUT_S)
            if not trained():
                raise DoesNotWork(
                    f"{SCRIPT} does not train without a launcher:\n{last_words(folder)}"
                )
            return max(read_steps(folder, rank)[0].at_s for rank in range(world_size)) - began_s
