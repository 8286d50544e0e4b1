"""Start a job's processes on one node: guard → torchrun → one shim per rank → the user's command.

The restarts that torchrun offers reuse the store of the workers, and hang in up to half of all
cases. So torchrun restarts nothing. For the next attempt, either the shims start new trainers,
which use separate keys in torchrun's store, or each node starts a new torchrun. Several nodes meet
by torchrun's static rendezvous, at a new port each time.
"""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.checkpoint import ENV_SUPERVISOR_PID
from holdfast.core.failure_history import FailureHistory
from holdfast.core.left_out import ENV_LEAVE_OUT, LeftOut
from holdfast.core.link import ENV_ACCUMULATION, ENV_ATTEMPT, ENV_CONNECT, ENV_FRESH, ENV_RUN
from holdfast.core.paths import RunPaths
from holdfast.core.phases import ENV_PROFILE
from holdfast.core.processes import kill_descendants
from holdfast.profile import ENV_NODE
from holdfast.recover import channel
from holdfast.recover.agent.rendezvous import node_name
from holdfast.recover.launching.guard import STANDBY
from holdfast.recover.launching.warm_launcher import launcher_arguments
from holdfast.recover.shim import imports, rank_shim
from holdfast.recover.shim.gpus import ENV_TURN_GPUS
from holdfast.recover.spec import MIB, SHIM, RunSpec

LAUNCHER_LOG_BYTES = 4 * MIB
GUARD_TIMEOUT_S = 15.0
PET_MEETING = ("PET_RDZV_", "PET_STANDALONE")
"""Environment variables from which torchrun would read options of another rendezvous than the
static one.
"""
ATTEMPTS_WITH_LOGS = 20
"""The number of attempts whose logs are kept. The ledger keeps the lines that older incidents cite.
"""


@dataclass(frozen=True)
class Place:
    """The place of one node in a launch."""

    node_rank: int = 0
    address: str = "127.0.0.1"
    """The address at which the other nodes reach the node with rank 0."""
    port: int = 0
    """The port of torchrun's store on the node with rank 0."""


@dataclass(frozen=True)
class Job:
    """The processes of one attempt, or of several attempts below one launcher."""

    guard: asyncio.subprocess.Process

    def kill(self) -> None:
        """End all processes with SIGKILL; `wait` returns soon after."""
        assert self.guard.stdin is not None
        self.guard.stdin.close()
        # A suspended guard would not notice the end of its standard input.
        asyncio.get_running_loop().call_later(GUARD_TIMEOUT_S, self._kill_guard)

    def _kill_guard(self) -> None:
        if self.guard.returncode is None:
            kill_descendants(self.guard.pid, timeout_s=2.0)
            self.guard.kill()

    async def wait(self) -> int:
        """Wait for the end of all processes, and return the launcher's return code.

        A negative code is the number of the signal that ended the launcher.
        """
        return await self.guard.wait()


def make_log_folder(paths: RunPaths, attempt: int, *, launched: int) -> Path:
    """Create and return the folder for an attempt's logs; delete the logs of old attempts.

    Args:
        paths: the paths of the run.
        attempt: the number of the attempt.
        launched: the attempt that started the launcher; the launcher keeps writing into the folder
            of this attempt.
    """
    logs = paths.attempt_logs(attempt)
    logs.mkdir(parents=True, exist_ok=True)
    if attempt != launched:
        for written in paths.attempt_logs(launched).glob("launcher*.log"):
            log = logs / written.name
            log.unlink(missing_ok=True)
            log.symlink_to(written)
    for number in range(1, attempt - ATTEMPTS_WITH_LOGS + 1):
        if number != launched:
            shutil.rmtree(paths.attempt_logs(number), ignore_errors=True)
    return logs


def attempt_environment(
    attempt: int,
    history: FailureHistory,
    left_out: LeftOut,
    *,
    turns_gpus: bool = False,
    accumulation: int = 1,
) -> dict[str, str]:
    """Return the environment variables of the ranks that differ between attempts.

    Args:
        attempt: the number of the attempt.
        history: the failures of the earlier attempts.
        left_out: the batches that the attempt leaves out.
        turns_gpus: True if each rank must use another GPU of its node than before.
        accumulation: the factor by which a rank accumulates more micro-batches than if all nodes
            took part.
    """
    variables = {
        ENV_ATTEMPT: str(attempt),
        ENV_LEAVE_OUT: left_out.as_text(),
        ENV_TURN_GPUS: "1" if turns_gpus else "",
        ENV_ACCUMULATION: str(accumulation),
    }
    return {**history.as_environment(), **variables}


async def launch(
    spec: RunSpec,
    paths: RunPaths,
    attempt: int,
    *,
    address: str,
    token: str,
    lock_fd: int,
    echo: bool,
    environment: Mapping[str, str],
    place: Place,
    standby: Job | None = None,
) -> Job:
    """Start the job's processes on this node.

    Args:
        spec: the command and its options.
        paths: the paths of the run.
        attempt: the number of the attempt.
        address: the address of the channel of this node's agent.
        token: the token of the channel.
        lock_fd: the lock that the processes hold while they live.
        echo: True to show the ranks' output here as well.
        environment: the variables that differ between attempts (see `attempt_environment`).
        place: the place of this node in the launch.
        standby: the waiting launcher from `stand_by` to use for this launch, if there is one.
    """
    logs = make_log_folder(paths, attempt, launched=attempt)
    (paths.root / "imports").mkdir(exist_ok=True)
    own: Mapping[str, str] = os.environ
    if spec.nnodes > 1:  # Kubeflow sets some of these
        own = {name: own[name] for name in own if not name.startswith(PET_MEETING)}
    variables = {
        **own,
        **environment,
        ENV_SUPERVISOR_PID: str(os.getpid()),
        channel.ENV_ADDRESS: address,
        channel.ENV_TOKEN: token,
        ENV_CONNECT: "holdfast.recover.attach:connect_quietly",
        ENV_RUN: paths.run_id,
        ENV_FRESH: "1" if spec.fresh else "",
        ENV_PROFILE: str(paths.profile) if spec.profile else "",
        ENV_NODE: node_name(),
        imports.ENV_FOLDER: str(paths.root / "imports"),
        rank_shim.ENV_LOGS: str(logs),
        rank_shim.ENV_LOG_MAX_BYTES: str(spec.log_max_mib * MIB),
        rank_shim.ENV_PYTHON: spec.rank_python(),
        rank_shim.ENV_ECHO: "1" if echo else "0",
        "PET_MAX_RESTARTS": "0",  # torchrun also reads its options from PET_ variables
    }
    if spec.is_torchrun:
        variables[rank_shim.ENV_PYTHON_EXEC] = str(SHIM)
    words = [
        str(logs / ("launcher.log" if place.node_rank == 0 else f"launcher-{place.node_rank}.log")),
        str(LAUNCHER_LOG_BYTES),
        "--",
        *spec.launcher_command(place.node_rank, place.address, place.port),
    ]
    if standby is not None and standby.guard.returncode is None:
        assert standby.guard.stdin is not None
        order = json.dumps({"words": words, "environment": variables})
        standby.guard.stdin.write(order.encode() + b"\n")
        return standby
    return await _start_guard(words, variables, spec, lock_fd=lock_fd, echo=echo)


def can_stand_by(spec: RunSpec) -> bool:
    """Return True if a launcher that `stand_by` has started can run this job.

    Such a launcher cannot run the torchrun of another environment.
    """
    return launcher_arguments(spec.launcher_command(0, "127.0.0.1", 0)) is not None


async def stand_by(spec: RunSpec, *, lock_fd: int, echo: bool) -> Job:
    """Start a guard with a launcher that imports PyTorch and waits for `launch`.

    `Job.kill` ends both.

    Args:
        spec: the command and its options.
        lock_fd: the lock that the processes hold while they live.
        echo: True to show the ranks' output here as well.
    """
    return await _start_guard([STANDBY], os.environ, spec, lock_fd=lock_fd, echo=echo)


async def _start_guard(
    words: Sequence[str],
    variables: Mapping[str, str],
    spec: RunSpec,
    *,
    lock_fd: int,
    echo: bool,
) -> Job:
    guard = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "holdfast.recover.launching.guard",
        *words,
        cwd=spec.cwd,
        env=variables,
        stdin=asyncio.subprocess.PIPE,
        stdout=None if echo else asyncio.subprocess.DEVNULL,
        # A separate session keeps Ctrl-C in the terminal away from the ranks, because the
        # supervisor must save their state first.
        start_new_session=True,
        pass_fds=(lock_fd,),
    )
    return Job(guard)
