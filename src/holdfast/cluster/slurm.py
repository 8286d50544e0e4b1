"""Run tasks on a Slurm cluster as one job array, and watch the array by polling.

This needs sbatch, squeue, scontrol and scancel, but not Slurm's accounting. The outcome of a task
is in the files that the task leaves (`slurm_task`); Slurm is only used to list the array elements
that have not ended. All files of one submission are in FOLDER/slurm-TOKEN, and the job is named
holdfast-TOKEN. So the next run in the same folder finds and cancels a submission whose caller was
killed.
"""

import logging
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.cluster.placement import ENV_PLACE
from holdfast.cluster.slurm_task import Manifest, read_record
from holdfast.cluster.tasks import Finished, Task, check_tasks, log_of, settle, skip_finished
from holdfast.core.clock import Clock, SystemClock
from holdfast.core.errors import BadUse, HoldfastError

# Slurm's own clients try several times, each for MessageTimeout (10 s by default).
_COMMAND_TIMEOUT_S = 120.0
_DEFAULT_MAX_ARRAY_SIZE = 1001  # slurm.conf(5), MaxArraySize
_FIRST_POLL_S, _LONGEST_POLL_S, _POLL_GROWTH = 1.0, 20.0, 1.5
FORGOTTEN = "Invalid job id specified"
"""The error of squeue for a job that slurmctld no longer has a record of."""
_OUTPUT_SHOWN_CHARS = 4000

_log = logging.getLogger(__name__)


def run_slurm_command(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Run one of Slurm's commands; return its standard output.

    Args:
        argv: the command with its arguments.
        environment: the environment variables of the command; None: the environment of this
            process.

    Raises:
        HoldfastError: the command failed, hung or cannot be run; the message has its error output.
    """
    try:
        done = subprocess.run(
            argv,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise HoldfastError(
            f"{argv[0]} gave no answer within {_COMMAND_TIMEOUT_S:.0f} s."
        ) from error
    except OSError as error:
        raise HoldfastError(f"{argv[0]} cannot be run: {error.strerror}.") from error
    if done.returncode != 0:
        # Without an answer from slurmctld, the error has several lines.
        output = " ".join((done.stderr or done.stdout).split())
        raise HoldfastError(f"{argv[0]} failed: {output}")
    return done.stdout


def demand_slurm() -> None:
    """Check that this machine can submit jobs.

    Raises:
        BadUse: there is no sbatch.
    """
    if shutil.which("sbatch") is None:
        raise BadUse(
            "There is no sbatch on this machine. Run this on a login node of the Slurm cluster."
        )


def without_job(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables that Slurm set for the surrounding job.

    If they stayed, srun in a newly submitted job would use the sizes of the surrounding job.
    """
    kept = {"SLURM_CONF", "SLURM_CLUSTERS"}
    return {
        name: value
        for name, value in environment.items()
        if name in kept or not (name == ENV_PLACE or name.startswith(("SLURM_", "SLURMD_")))
    }


def job_name(submission: Path) -> str:
    """Return the job name of a submission, by which the next caller finds the job."""
    return f"holdfast-{submission.name.removeprefix('slurm-')}"


def cancel_submission(
    submission: Path, command: Callable[[Sequence[str]], str] = run_slurm_command
) -> None:
    """Cancel the job of a submission, if the job has not ended, and delete the submission's folder.

    Raises:
        HoldfastError: the job could not be cancelled; the folder stays, so that a later call can
            try again.
    """
    name = job_name(submission)
    try:
        command(["scancel", "--quiet", f"--name={name}"])
    except HoldfastError as error:
        raise HoldfastError(f"{error} The job may still run: scancel --name={name}") from error
    _remove(submission)


def describe_job(job_id: str, command: Callable[[Sequence[str]], str] = run_slurm_command) -> str:
    """Return the facts that Slurm shows about a job's state; if Slurm fails, return its error."""
    try:
        record = command(["scontrol", "--oneliner", "show", "job", job_id])
    except HoldfastError as error:
        record = str(error)  # slurmctld has deleted the job's record
    facts = re.findall(r"\b(?:JobState|Reason|ExitCode|RunTime|TimeLimit|NodeList)=\S+", record)
    return ", ".join(facts) or record.strip()


@dataclass(frozen=True, kw_only=True)
class SlurmWorkers:
    """Run tasks as one job array, at most `limit` elements at a time.

    Attributes:
        limit: the most elements that run at the same time; None for no limit.
        sbatch_options: options for sbatch, passed before all others.
        grace_s: seconds that a task's result or record may take to appear here after the task's
            element has left the queue; network file systems cache for up to a minute (nfs(5),
            acdirmax).
        clock: the clock; tests pass their own.
        sleep: waits for a number of seconds; tests pass their own.
        command: runs Slurm's commands; tests pass their own.

    Raises:
        BadUse: there is no sbatch on this machine.
    """

    limit: int | None = None
    sbatch_options: tuple[str, ...] = ()
    grace_s: float = 90.0
    clock: Clock = field(default_factory=SystemClock)
    sleep: Callable[[float], None] = time.sleep
    command: Callable[[Sequence[str]], str] = run_slurm_command

    def __post_init__(self) -> None:
        if self.command is run_slurm_command:
            demand_slurm()

    def run(self, tasks: Sequence[Task], *, folder: Path) -> Generator[Finished, None, None]:
        """Run the tasks; see `Workers.run`.

        Raises:
            BadUse: see `Workers.run`; also, when the first result is requested, if sbatch refuses
                the array.
            HoldfastError: see `Workers.run`; also, when the generator is closed early, if the array
                could not be cancelled.
        """
        check_tasks(tasks)
        folder.mkdir(parents=True, exist_ok=True)
        return self._run(tasks, folder.absolute())

    def _run(self, tasks: Sequence[Task], folder: Path) -> Generator[Finished, None, None]:
        for orphan in sorted(folder.glob("slurm-*")):
            cancel_submission(orphan, self.command)
        skipped, pending = skip_finished(tasks, folder)
        yield from skipped
        if not pending:
            return
        elements = min(len(pending), self._max_array_size())
        submission = folder / f"slurm-{secrets.token_hex(8)}"
        ended = False
        try:
            # Inside the try: sbatch may be interrupted after Slurm took the job.
            array = self._submit(pending, folder, submission, elements)
            yield from self._watch(array, pending, folder)
            ended = True
        finally:
            if ended:
                _remove(submission)
            else:
                cancel_submission(submission, self.command)

    def _submit(
        self, tasks: Sequence[Task], folder: Path, submission: Path, elements: int
    ) -> "_Array":
        records = submission / "records"
        records.mkdir(parents=True)
        logs = [log_of(task, folder) for task in tasks]
        for log in logs:
            log.write_bytes(b"")  # a requeued element appends to its log
        manifest = Manifest(
            elements=elements,
            records=str(records),
            commands=tuple(task.command for task in tasks),
            results=tuple(str(task.result.absolute()) for task in tasks),
            logs=tuple(map(str, logs)),
        )
        manifest.write(submission / "manifest.json")
        far_end = shlex.join(
            [sys.executable, "-m", "holdfast.cluster.slurm_task", str(submission / "manifest.json")]
        )
        script = submission / "array.sh"
        script.write_text(f"#!/bin/sh\nexec {far_end}\n")
        throttle = f"%{self.limit}" if self.limit else ""
        argv = ["sbatch", *self.sbatch_options, "--parsable", f"--job-name={job_name(submission)}"]
        argv += [
            f"--array=0-{elements - 1}{throttle}",
            "--ntasks=1",
            "--requeue",
            "--open-mode=append",
        ]
        argv += [
            "--export=ALL",
            f"--chdir={Path.cwd()}",
            f"--output={submission}/%a.out",
            str(script),
        ]
        try:
            output = self.command(argv)
        except HoldfastError as error:
            raise BadUse(
                f"{error} Set what this cluster demands by sbatch options, such as --partition."
            ) from error
        return _Array(
            # --parsable prints JOB or JOB;CLUSTER.
            job_id=output.strip().split(";")[0],
            elements=elements,
            submission=submission,
            records=records,
        )

    def _max_array_size(self) -> int:
        found = re.search(
            r"^MaxArraySize\s*=\s*(\d+)", self.command(["scontrol", "show", "config"]), re.MULTILINE
        )
        return max(1, int(found[1])) if found else _DEFAULT_MAX_ARRAY_SIZE

    def _watch(
        self, array: "_Array", tasks: Sequence[Task], folder: Path
    ) -> Generator[Finished, None, None]:
        outstanding = dict(enumerate(tasks))
        unexplained_since_s: dict[int, float] = {}
        poll_s = _FIRST_POLL_S
        while outstanding:
            self.sleep(poll_s)
            poll_s = min(poll_s * _POLL_GROWTH, _LONGEST_POLL_S)
            # Read the queue before the records: an element that ends in between has left a record.
            queued = self._queued_elements(array)
            for number, task in list(outstanding.items()):
                exit_code = read_record(array.records, number)
                left = queued is not None and number % array.elements not in queued
                if exit_code is None and not left:
                    unexplained_since_s.pop(number, None)  # the element had left, and was requeued
                    continue
                if exit_code is not None and exit_code < 0 and not left:
                    continue  # Slurm may have sent the signal, to requeue the element
                why = None
                if not exit_code and not task.result.exists():
                    # The exit code is 0 or unknown, and a network file system may show the result
                    # with a delay.
                    since_s = unexplained_since_s.setdefault(number, self.clock.monotonic_s())
                    if self.clock.monotonic_s() - since_s < self.grace_s:
                        continue
                    why = None if exit_code == 0 else self._explain(array, number % array.elements)
                del outstanding[number]
                poll_s = max(poll_s / 2, _FIRST_POLL_S)
                yield settle(task, exit_code or 0, folder, why=why)

    def _queued_elements(self, array: "_Array") -> set[int] | None:
        """Return the array elements that are pending, running or completing.

        The result is None if Slurm does not answer.
        """
        try:
            output = self.command(
                ["squeue", "--noheader", "--array", f"--jobs={array.job_id}", "--format=%K"]
            )
        except HoldfastError as error:
            if FORGOTTEN in str(error):
                return set()
            # The tasks run on without slurmctld, and their records are read all the same.
            _log.warning("%s Asking again.", error)
            return None
        return {int(line) for line in output.split() if line.isdigit()}

    def _explain(self, array: "_Array", element: int) -> str:
        output = array.submission / f"{element}.out"
        output_end = (
            output.read_text(errors="replace")[-_OUTPUT_SHOWN_CHARS:] if output.exists() else ""
        )
        state = describe_job(f"{array.job_id}_{element}", self.command)
        return f"element {element} of Slurm job {array.job_id} left the queue without a result ({state}) {output_end}"


@dataclass(frozen=True, kw_only=True)
class _Array:
    job_id: str
    elements: int
    submission: Path
    records: Path


def _remove(submission: Path) -> None:
    # A process that is just ending may still write there; the next cancel_submission deletes such
    # files.
    shutil.rmtree(submission, ignore_errors=True)
