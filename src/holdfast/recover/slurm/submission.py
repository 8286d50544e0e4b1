"""Submit a run as a Slurm job, and record the ids of the run's jobs in the run's folder.

Each job starts `holdfast run --resume RUN` on each of its nodes. So a job that Slurm starts again,
and the next job of a run, continue from the state of the run. Only jobs are touched that are in the
record, or whose name contains the key of the record.
"""

import os
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Self

import msgspec

from holdfast.cluster import EXPEDITE, SlurmJobs
from holdfast.core.atomic import replacing
from holdfast.core.errors import BadUse, HoldfastError
from holdfast.core.ledger import Event, Ledger, Run
from holdfast.core.paths import RunPaths
from holdfast.recover.runs import remove_run

ENV_JOB, ENV_RESTARTS, ENV_NODE = "SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_NODEID"
ENV_NAME = "SLURM_JOB_NAME"
STEP = "srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none --export=ALL --input=none"
# Without --cpus-per-task, a step has all cores of the job on a node. --cpu-bind must not reduce
# them.
END_TRIES, END_RETRY_S = 30, 20.0
"""The largest number of attempts to end a job that has lost its batch script, and the seconds
between two attempts.
"""


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a run that was submitted to Slurm.

    Attributes:
        key: a text that distinguishes the names of the run's jobs from those of other runs.
        nodes: the number of nodes that train.
        spares: the number of additional nodes, which wait to replace others.
        options: the user's options for sbatch.
        command: the command to run on each node, as a list of arguments.
        environment: environment variables of the job, which may contain secrets.
        jobs: the ids of the submitted jobs; the present job is the last one.
    """

    key: str
    nodes: int
    spares: int
    options: tuple[str, ...]
    command: tuple[str, ...]
    environment: dict[str, str]
    jobs: tuple[str, ...] = ()

    @classmethod
    def read(cls, paths: RunPaths) -> Self | None:
        """Return the record of a run; None if the run was not submitted.

        Raises:
            HoldfastError: the record cannot be read.
        """
        try:
            return msgspec.json.decode(_record(paths).read_bytes(), type=cls)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise HoldfastError(
                f"The record of Slurm jobs {_record(paths)} is damaged ({error}). Remove the file; "
                f"`squeue --me` lists the jobs that wait or run."
            ) from error

    def following(self, last: "Submission") -> "Submission":
        """Return a copy with the key and the jobs of an earlier record of the same run."""
        return msgspec.structs.replace(self, key=last.key, jobs=last.jobs)

    def job_name(self, run_id: str) -> str:
        """Return the name that all jobs of a run have."""
        return f"holdfast-{run_id}-{self.key}"

    def lost_jobs(self, run_id: str, jobs: SlurmJobs) -> list[str]:
        """Return the ids of jobs of this run that wait or run, but are not in the record.

        This happens if the submitting process ended before it had recorded the id.

        Raises:
            HoldfastError: Slurm does not answer.
        """
        return [one for one in jobs.named(self.job_name(run_id)) if one not in self.jobs]

    def write(self, paths: RunPaths) -> None:
        """Write the record to a file that only the user can read."""
        with replacing(_record(paths)) as record:
            record.touch(0o600)
            record.write_bytes(msgspec.json.encode(self))

    def is_own(self, environment: Mapping[str, str] = os.environ) -> bool:
        """Return True if this process is in a job of this run."""
        job_id = environment.get(ENV_JOB)
        return job_id is not None and job_id in self.jobs

    def is_expedited(self, environment: Mapping[str, str] = os.environ) -> bool:
        """Return True if Slurm itself may start this job again, before other jobs."""
        return EXPEDITE in self.options and has_script(environment)


def logs_of(paths: RunPaths, job_id: str) -> tuple[Path, Path]:
    """Return the files with the output and the errors of a job."""
    return paths.logs / f"slurm-{job_id}.out", paths.logs / f"slurm-{job_id}.err"


def new_submission(
    *,
    run_id: str,
    ledger_url: str,
    nodes: int,
    spares: int,
    options: Collection[str],
    environment: Mapping[str, str],
    echo: bool,
) -> Submission:
    """Return the record of a run that has no job yet."""
    command = [sys.executable, "-m", "holdfast.cli.main", "--ledger", ledger_url, "run"]
    command += ["--resume", run_id, *([] if echo else ["--no-echo"])]
    return Submission(
        key=secrets.token_hex(4),
        nodes=nodes,
        spares=spares,
        options=tuple(options),
        command=tuple(command),
        environment=dict(environment),
    )


def submit(
    submission: Submission,
    paths: RunPaths,
    cwd: str,
    jobs: SlurmJobs,
    *,
    after: str | None = None,
    exclude: Collection[str] = (),
) -> Submission:
    """Submit the next job of a run and record it; return the new record.

    If there is a job whose submitting process ended before it had recorded the job, this job
    becomes the next one.

    Args:
        submission: the record.
        paths: the paths of the run.
        cwd: the working folder of the run.
        jobs: the jobs of Slurm.
        after: the id of a job that must have ended before the next job starts; None if there is
            none.
        exclude: the names of nodes that the job must not use.

    Raises:
        BadUse: Slurm refuses the job.
        HoldfastError: Slurm does not answer.
    """
    submission.write(paths)
    lost = submission.lost_jobs(paths.run_id, jobs)
    script = paths.root / "slurm-job.sh"
    # A job that follows another one may have fewer nodes.
    spares = f"--spares $((SLURM_JOB_NUM_NODES - {submission.nodes}))"
    script.write_text(f"#!/bin/sh\nexec {STEP} {shlex.join(submission.command)} {spares}\n")
    job_id = lost[0] if lost else None
    total = submission.nodes + submission.spares
    # After nodes were lost, there may be too few for all spares.
    nodes = str(total) if after is None else f"{submission.nodes}-{total}"
    if job_id is None:
        job_id = jobs.submit(
            script,
            name=submission.job_name(paths.run_id),
            nodes=nodes,
            options=submission.options,
            environment={**submission.environment, "HOLDFAST_HOME": str(paths.home)},
            working_folder=cwd,
            logs=paths.logs,
            after=after,
            exclude=exclude,
        )
    submission = msgspec.structs.replace(submission, jobs=(*submission.jobs, job_id))
    submission.write(paths)
    return submission


def submit_run(
    run: Run, submission: Submission, ledger_url: str, home: Path, jobs: SlurmJobs
) -> Submission:
    """Queue a recorded run; return the record with the id of its job.

    The ledger is closed before Slurm can start the job, since the first node of the job writes the
    ledger.

    Raises:
        BadUse: a job of the run already waits or runs, or Slurm refuses the job. In this case, a
            new run is removed again.
    """
    paths = RunPaths(home, run.run_id)
    if submission.jobs and not jobs.state(submission.jobs[-1]).is_over:
        raise BadUse(
            f"Slurm job {submission.jobs[-1]} of run {run.run_id} has not ended. `holdfast runs stop {run.run_id}` "
            "stops the run."
        )
    is_new = not submission.jobs and run.state == "running"
    with Ledger.open(ledger_url) as ledger:
        ledger.set_run(run.run_id, state="queued", ended_at_s=None, exit_code=None, outcome="")
        if run.state in ("stopped", "failed"):  # a person resumes: earlier failures do not count
            newest = max((one.number for one in ledger.attempts(run.run_id)), default=0)
            now_s = time.time()
            ledger.add_event(Event(run_id=run.run_id, attempt=newest, at_s=now_s, kind="begun"))
    try:
        return submit(submission, paths, run.cwd, jobs)
    except HoldfastError:
        with Ledger.open(ledger_url) as ledger:
            ledger.set_run(
                run.run_id,
                state=run.state,
                ended_at_s=run.ended_at_s,
                exit_code=run.exit_code,
                outcome=run.outcome,
            )
            if is_new and not ledger.attempts(run.run_id):
                remove_run(run, ledger, home)
        raise


def stop_queued(run: Run, ledger: Ledger, home: Path, jobs: SlurmJobs | None = None) -> None:
    """Cancel the job of a run that waits in the queue.

    Raises:
        BadUse: the run was not submitted, or its job has begun meanwhile.
        HoldfastError: Slurm does not answer.
    """
    submission = Submission.read(RunPaths(home, run.run_id))
    if submission is None:
        raise BadUse(f"Run {run.run_id} has no waiting Slurm job that this command can cancel.")
    jobs = jobs or SlurmJobs()
    # If a run is expedited, the job before the last one may also wait.
    count = 2 if EXPEDITE in submission.options else 1
    due = [*submission.jobs[-count:], *submission.lost_jobs(run.run_id, jobs)]
    for job_id in due:
        state = jobs.state(job_id)
        # A job that neither waits nor has ended is running, or Slurm is about to start it again.
        if not (state.is_waiting or state.is_over):
            does = "begins" if state.is_running else "changes its state"
            raise BadUse(
                f"Slurm job {job_id} of run {run.run_id} {does} just now. Stop it again in a moment."
            )
        jobs.end(job_id)
    outcome = (
        f"Stopped while it waited as Slurm job {due[-1]}."
        if due
        else "Stopped before a Slurm job was submitted."
    )
    ledger.set_run(
        run.run_id, state="stopped", exit_code=4, ended_at_s=time.time(), outcome=outcome
    )


def is_left(run: Run, home: Path, environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if the run of this job has ended, or if a person stopped it.

    A run that was stopped by Slurm itself continues when Slurm starts its job again.
    """
    submission = Submission.read(RunPaths(home, run.run_id))
    if submission is None:
        return False
    # The submitting process may have died before it had recorded the id of the job.
    is_named = environment.get(ENV_NAME) == submission.job_name(run.run_id)
    if not is_named and not submission.is_own(environment):
        return False
    is_again = environment.get(ENV_RESTARTS, "0") != "0"
    return run.state in ("completed", "failed") or (run.state == "stopped" and not is_again)


def settle_jobs(
    paths: RunPaths,
    *,
    is_queued: bool,
    environment: Mapping[str, str] = os.environ,
    jobs: SlurmJobs | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> list[str]:
    """End the jobs that a run does not need after its end in this job; return their ids.

    - If a run is queued again, the present job is ended, since the next job waits for its end.
      However, an expedited job ends by itself, so that Slurm may start it again.
    - If a run has ended, a next job that was submitted while nodes were missing is ended.
    - If the first node of a job is gone, the job has lost its batch script, and would keep its
      other nodes until its time limit. So it is ended, too. If Slurm does not answer, this is tried
      again for some minutes.

    Raises:
        HoldfastError: Slurm does not answer. If a job keeps its nodes, the message contains the
            command with which a person can end it.
    """
    submission = Submission.read(paths)
    if submission is None or not submission.is_own(environment):
        return []
    own = environment[ENV_JOB]
    later = submission.jobs[submission.jobs.index(own) + 1 :]
    due = [] if is_queued else list(later)
    if is_queued and later and not submission.is_expedited(environment):
        due = [own]
    if not has_script(environment) and own not in due:
        due.append(own)
    jobs = jobs or SlurmJobs()
    if has_script(environment):
        return [job_id for job_id in due if jobs.end(job_id)]
    for tries in range(1, END_TRIES + 1):
        try:
            return [job_id for job_id in due if jobs.end(job_id)]
        except HoldfastError as error:
            if tries == END_TRIES:
                raise HoldfastError(
                    f"{error} Slurm job {own} has lost its batch script, and keeps its nodes until its time limit. "
                    f"End it by: scancel {own}."
                ) from error
        sleep(END_RETRY_S)
    raise AssertionError  # the last attempt has returned or raised


def has_script(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if this is the first node of a job, which runs the batch script.

    If the first node is gone, another node leads the run.
    """
    return environment.get(ENV_NODE, "0") == "0"


def _record(paths: RunPaths) -> Path:
    return paths.root / "slurm.json"
