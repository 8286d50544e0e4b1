"""Submit, look up and end single Slurm jobs.

A job in the state COMPLETING is never changed, because some versions of Slurm lose records of such
a job, or crash.
"""

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.cluster.slurm import (
    FORGOTTEN,
    demand_slurm,
    describe_job,
    run_slurm_command,
    without_job,
)
from holdfast.core.errors import BadUse, HoldfastError

ENDING = "COMPLETING"
WAITING = frozenset(
    [
        "PENDING",
        "CONFIGURING",
        "REQUEUED",
        "REQUEUE_FED",
        "REQUEUE_HOLD",
        "RESV_DEL_HOLD",
        "EXPEDITING",
        "SPECIAL_EXIT",
    ]
)
RUNNING = frozenset({"RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING"})
OVER = frozenset(
    [
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "TIMEOUT",
    ]
)
"""The states of a job that has ended, as squeue(1) prints them.

A job in any other state still has nodes, or may get nodes.
"""
EXPEDITE = "--requeue=expedite"
EXPEDITE_SINCE = (25, 11)
"""The first version of Slurm that supports `EXPEDITE`, according to Slurm's release notes."""
RESERVED = frozenset(
    [
        "--nodes",
        "-N",
        "--ntasks",
        "-n",
        "--array",
        "-a",
        "--wrap",
        "--output",
        "-o",
        "--error",
        "-e",
    ]
)
"""The options of sbatch that `SlurmJobs.submit` sets."""


@dataclass(frozen=True, kw_only=True)
class JobState:
    """The state of a job.

    Attributes:
        name: the state as squeue(1) prints it; empty for a job that Slurm no longer lists.
        reason: the reason why the job waits.
        nodes: the names of the job's nodes.
    """

    name: str = ""
    reason: str = ""
    nodes: tuple[str, ...] = ()

    @property
    def is_waiting(self) -> bool:
        """Return True if the job waits for nodes."""
        return self.name in WAITING

    @property
    def is_running(self) -> bool:
        """Return True if the job has nodes and is not ending."""
        return self.name in RUNNING

    @property
    def is_over(self) -> bool:
        """Return True if the job has ended, with all its processes."""
        return not self.name or self.name in OVER


class SlurmJobs:
    """Manage this user's jobs in a Slurm cluster.

    Raises:
        BadUse: there is no sbatch on this machine.
    """

    def __init__(self, command: Callable[..., str] = run_slurm_command) -> None:
        """Store `command`, which runs Slurm's commands as `run_slurm_command` does."""
        self.command = command
        if command is run_slurm_command:
            demand_slurm()

    def submit(
        self,
        script: Path,
        *,
        name: str,
        nodes: str,
        options: Sequence[str],
        environment: Mapping[str, str],
        working_folder: str,
        logs: Path,
        after: str | None = None,
        exclude: Collection[str] = (),
    ) -> str:
        """Submit a batch script as one allocation; return the job's number.

        If a node dies, the allocation continues without the node.

        Args:
            script: the batch script.
            name: the name of the job.
            nodes: the number of nodes, or the minimum and the maximum, such as `4-5`.
            options: the user's options for sbatch.
            environment: environment variables in addition to this process's variables.
            working_folder: the working folder of the script.
            logs: the folder for `slurm-JOB.out` and `slurm-JOB.err`.
            after: the number of a job that must have ended before this one may start.
            exclude: the names of nodes that the job must not use.

        Raises:
            BadUse: Slurm refuses the job; the message has Slurm's error.
        """
        argv = ["sbatch", *options, "--parsable", f"--job-name={name}", f"--nodes={nodes}"]
        argv += ["--ntasks-per-node=1", "--no-kill", "--open-mode=append"]
        if not any(option.startswith(("--requeue", "--no-requeue")) for option in options):
            argv.append("--requeue")
        if after is not None:
            argv.append(f"--dependency=afterany:{after}")
        if exclude:  # sbatch uses only the last --exclude
            own = [option.partition("=")[2] for option in options if is_exclude(option)]
            argv.append(f"--exclude={','.join([*own, *sorted(exclude)])}")
        argv += ["--export=ALL", f"--chdir={working_folder}"]
        argv += [f"--output={logs}/slurm-%j.out", f"--error={logs}/slurm-%j.err", str(script)]
        try:
            output = self.command(argv, {**without_job(os.environ), **environment})
        except HoldfastError as error:
            raise BadUse(
                f"{error} Give sbatch the options that this cluster demands, such as --sbatch-option=--partition=gpu."
            ) from error
        return output.strip().split(";")[0]  # --parsable prints JOB or JOB;CLUSTER

    def state(self, job_id: str) -> JobState:
        """Return the state of a job.

        Raises:
            HoldfastError: Slurm does not answer.
        """
        try:
            output = self.command(["squeue", "--noheader", f"--jobs={job_id}", "--format=%T|%r|%N"])
        except HoldfastError as error:
            if FORGOTTEN not in str(error):
                raise
            return JobState()
        name, reason, nodes = [*output.strip().split("|"), "", "", ""][:3]
        return JobState(name=name, reason=reason, nodes=self.host_names(nodes))

    def host_names(self, nodes: str) -> tuple[str, ...]:
        """Expand a list of nodes such as `n[1-4]` to the names of the nodes.

        Raises:
            HoldfastError: scontrol cannot be run.
        """
        if not nodes:
            return ()
        return tuple(self.command(["scontrol", "show", "hostnames", nodes]).split())

    def named(self, name: str) -> list[str]:
        """Return the numbers of this user's waiting and running jobs with this name, oldest first.

        Raises:
            HoldfastError: Slurm does not answer.
        """
        argv = ["squeue", "--me", "--noheader", "--sort=i", f"--name={name}", "--format=%A|%T"]
        jobs = [line.split("|") for line in self.command(argv).split()]
        return [job_id for job_id, state in jobs if state in WAITING | RUNNING]

    def end(self, job_id: str) -> bool:
        """Cancel a job that waits or runs; return False if the job is in any other state.

        Raises:
            HoldfastError: Slurm does not answer.
        """
        state = self.state(job_id)
        if not (state.is_waiting or state.is_running):
            return False
        self.command(["scancel", "--quiet", job_id])
        return True

    def describe(self, job_id: str) -> str:
        """Return the facts that Slurm shows about a job's state, or Slurm's error if it fails."""
        return describe_job(job_id, self.command)

    def check_options(self, options: Sequence[str]) -> None:
        """Check a user's options for sbatch.

        Raises:
            BadUse: Holdfast itself sets an option, or this version of Slurm does not support it.
        """
        for option in options:
            if option.partition("=")[0] in RESERVED:
                raise BadUse(
                    f"sbatch's {option.partition('=')[0]} is set by Holdfast. Leave that option out; --nodes and "
                    "--spares of `holdfast run` give the number of nodes."
                )
        if EXPEDITE in options and self.version() < EXPEDITE_SINCE:
            here, since = (".".join(map("{:02}".format, one)) for one in (self.version(), EXPEDITE_SINCE))  # fmt: skip
            raise BadUse(
                f"{EXPEDITE} needs Slurm {since}; this is Slurm {here}. Leave that option out: where nodes are "
                "missing, the run is submitted as a new job."
            )

    def version(self) -> tuple[int, int]:
        """Return the version of Slurm, such as (22, 5); (0, 0) if the version cannot be parsed.

        Raises:
            HoldfastError: scontrol cannot be run.
        """
        found = re.search(r"\b(\d+)\.(\d+)", self.command(["scontrol", "--version"]))
        return (0, 0) if found is None else (int(found[1]), int(found[2]))


def is_exclude(option: str) -> bool:
    """Return True if an option of sbatch excludes nodes."""
    return option.startswith(("--exclude=", "-x="))
