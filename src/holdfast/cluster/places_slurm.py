"""Place processes on the nodes of one Slurm allocation.

One batch job has one step, which starts `slurm_place` on each node. With --no-kill, a dead node
leaves the allocation and the other nodes continue, even if the dead node ran the batch script. The
job is not requeued, because the requeued processes would have a token that no caller has any more.
All files of a submission are in FOLDER/slurm-TOKEN, and the job's name contains the token, as in
`slurm`. So the next start in the same folder can find and cancel the job if its caller has died.
"""

import logging
import os
import re
import secrets
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from holdfast.cluster.placement import Place, check_command
from holdfast.cluster.slurm import (
    FORGOTTEN,
    cancel_submission,
    demand_slurm,
    describe_job,
    job_name,
    run_slurm_command,
    without_job,
)
from holdfast.cluster.slurm_place import PlaceRecord, read_record, request_of
from holdfast.core.clock import Clock, SystemClock
from holdfast.core.errors import BadUse, HoldfastError

# slurmctld serves the whole cluster, so requests are rare; records give the state of processes.
_ASK_EVERY_S = 5.0
_NODES_TRIED = 16
_OUTPUT_SHOWN_CHARS = 2000
_AWAITED = {"PENDING", "CONFIGURING"}
_ALIVE = {"RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING"}  # squeue(1), job state codes

_log = logging.getLogger(__name__)


class SlurmCommand(Protocol):
    """The type of a function that runs one of Slurm's commands, such as `run_slurm_command`."""

    def __call__(self, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
        """Run a command; return its standard output."""
        ...


@dataclass(frozen=True, kw_only=True)
class SlurmPlaces:
    """Provide places in one allocation of `nodes` nodes, which `start` submits.

    Attributes:
        nodes: the number of nodes.
        gpus_per_node: the value of --gpus-per-node; 0 leaves the option out.
        cpus_per_node: the value of --cpus-per-task; None leaves the option out, so that the
            cluster's defaults and `sbatch_options` hold.
        sbatch_options: options for sbatch, passed before all others.
        clock: the clock; tests pass their own.
        command: runs Slurm's commands; tests pass their own.

    Raises:
        BadUse: there is no sbatch on this machine.
    """

    nodes: int
    gpus_per_node: int = 0
    cpus_per_node: int | None = None
    sbatch_options: tuple[str, ...] = ()
    clock: Clock = field(default_factory=SystemClock)
    command: SlurmCommand = run_slurm_command

    def __post_init__(self) -> None:
        if self.command is run_slurm_command:
            demand_slurm()

    def address_host(self) -> str:
        """Return the address of this machine's network interface towards the cluster's nodes.

        The nodes can reach this machine at this address. The result is a loopback address only if
        this machine is the only node. See `Places.address_host`.

        Raises:
            BadUse: Slurm does not answer.
        """
        try:
            output = self.command(["scontrol", "--oneliner", "show", "nodes"])
        except HoldfastError as error:
            last_line = str(error).rpartition("\n")[2].rstrip(".")
            raise BadUse(
                f"Slurm does not answer: {last_line}. Run this on a login node of the cluster."
            ) from error
        nodes = list(dict.fromkeys(re.findall(r"\bNodeAddr=(\S+)", output)))[:_NODES_TRIED]
        addresses = [address for node in nodes if (address := _own_address_towards(node))]
        beyond = [
            address for address in addresses if not address.startswith("127.") and address != "::1"
        ]
        return next(iter(beyond or addresses), socket.getfqdn())

    def start(
        self, command: Sequence[str], *, environment: Mapping[str, str], folder: Path
    ) -> "SlurmPlacement":
        """Submit the allocation; see `Places.start`."""
        check_command(command)
        folder = folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        for orphan in sorted(folder.glob("slurm-*")):
            cancel_submission(orphan, self.command)
        submission = folder / f"slurm-{secrets.token_hex(8)}"
        (submission / "places").mkdir(parents=True)
        outer = without_job(os.environ)
        try:
            output = self.command(self._submission(command, submission), {**outer, **environment})
        except BaseException as error:
            # sbatch may be interrupted after Slurm took the job.
            cancel_submission(submission, self.command)
            if not isinstance(error, HoldfastError):
                raise
            raise BadUse(
                f"{error} Set what this cluster demands by sbatch options, such as --partition."
            ) from error
        job_id = output.strip().split(";")[0]  # --parsable prints JOB or JOB;CLUSTER
        return SlurmPlacement(self, job_id, submission)

    def _submission(self, command: Sequence[str], submission: Path) -> list[str]:
        far_end = shlex.join(
            [sys.executable, "-m", "holdfast.cluster.slurm_place", str(submission), *command]
        )
        # Without --cpus-per-task, a step has all cores of the job on a node. --cpu-bind must not
        # reduce them to one core.
        step = "srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none --export=ALL"
        script = submission / "job.sh"
        script.write_text(f"#!/bin/sh\nexec {step} --input=none {far_end}\n")
        argv = ["sbatch", *self.sbatch_options, "--parsable", f"--job-name={job_name(submission)}"]
        argv += [
            f"--nodes={self.nodes}",
            f"--ntasks={self.nodes}",
            "--ntasks-per-node=1",
            "--no-kill",
            "--no-requeue",
        ]
        argv += [f"--gpus-per-node={self.gpus_per_node}"] if self.gpus_per_node else []
        argv += [f"--cpus-per-task={self.cpus_per_node}"] if self.cpus_per_node else []
        return [
            *argv,
            "--export=ALL",
            f"--chdir={Path.cwd()}",
            f"--output={submission}/job.out",
            str(script),
        ]


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The state of the allocation's job in Slurm.

    Attributes:
        awaited: True while the job waits for its nodes.
        nodes: the names of the job's nodes; empty before the job starts and after it has ended.
        why: the reason why the job waits or has ended, as text.
    """

    awaited: bool
    nodes: frozenset[str] = frozenset()
    why: str = ""


class SlurmPlacement:
    """Control the processes of one allocation.

    Each process writes its state to a record file. Slurm lists the nodes that the job still has.
    """

    def __init__(self, places: SlurmPlaces, job_id: str, submission: Path) -> None:
        self._places, self._job_id, self._submission = places, job_id, submission
        self._job = _Job(awaited=True)
        self._asked_s: float | None = None
        self._starts_wanted = [1] * places.nodes
        self._stopped = False

    def poll(self) -> list[Place]:
        """Return the places; see `Placement.poll`. Slurm notices a dead node with a delay."""
        now_s = self._places.clock.monotonic_s()
        if not self._stopped and (self._asked_s is None or now_s - self._asked_s >= _ASK_EVERY_S):
            self._asked_s = now_s
            try:
                self._job = self._ask()
            except HoldfastError as error:  # the processes run on without slurmctld
                _log.warning("%s Asking again.", error)
        return [self._place(index) for index in range(self._places.nodes)]

    def restart(self, index: int) -> bool:
        """Start a process again; see `Placement.restart`.

        This is possible for two minutes after the end of the process, unless the exit code was 0.
        """
        record = read_record(self._submission, index)
        if record is None or record.exit_code is None or record.over or not self._has(record):
            return False
        request_of(self._submission, index, record.starts).touch()
        self._starts_wanted[index] = record.starts + 1
        return True

    def stop(self) -> None:
        """End the job; see `Placement.stop`. Slurm ends the processes a moment later."""
        if not self._stopped:
            cancel_submission(self._submission, self._places.command)
            self._stopped, self._job = True, _Job(awaited=False, why="it was stopped")

    def _place(self, index: int) -> Place:
        record = read_record(self._submission, index)
        if record is None:
            coming = self._job.awaited or self._job.nodes
            return Place(index=index, state="waiting" if coming else "ended", why=self._job.why)
        if record.exit_code is not None:
            wanted = (
                record.starts < self._starts_wanted[index] and not record.over and self._has(record)
            )
            state: Literal["waiting", "ended"] = "waiting" if wanted else "ended"
            return Place(
                index=index,
                host=record.node,
                state=state,
                exit_code=None if wanted else record.exit_code,
            )
        if self._has(record):
            return Place(index=index, host=record.node, state="running")
        why = f"node {record.node} left the allocation" if self._job.nodes else self._job.why
        return Place(index=index, host=record.node, state="ended", why=why)

    def _has(self, record: PlaceRecord) -> bool:
        """Return True if the record's node still belongs to the job.

        The result is also True while the job waits for nodes, because the record of a new process
        may appear before the job's state is read from Slurm again.
        """
        return self._job.awaited or record.node in self._job.nodes

    def _ask(self) -> _Job:
        command = self._places.command
        try:
            listing = command(
                ["squeue", "--noheader", f"--jobs={self._job_id}", "--format=%T|%N|%r"]
            ).strip()
        except HoldfastError as error:
            if FORGOTTEN not in str(error):
                raise
            listing = ""
        state, nodes, reason = listing.split("|") if listing else ("", "", "")
        if state in _AWAITED:
            return _Job(awaited=True, why=f"Slurm says {state}: {reason}")
        if state in _ALIVE:
            return _Job(
                awaited=False,
                nodes=frozenset(command(["scontrol", "show", "hostnames", nodes]).split()),
            )
        output = self._submission / "job.out"
        note = (
            output.read_text(errors="replace")[-_OUTPUT_SHOWN_CHARS:].strip()
            if output.exists()
            else ""
        )
        return _Job(
            awaited=False,
            why=f"Slurm job {self._job_id} ended ({describe_job(self._job_id, command)}) {note}",
        )


def _own_address_towards(host: str) -> str:
    """Return the local address that packets to a host have; empty if there is no route."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # Connecting a datagram socket sends nothing: the kernel only chooses the route.
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""
