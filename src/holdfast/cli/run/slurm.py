"""Provide `holdfast run --on slurm`: submit a run as a Slurm job, and follow the run."""

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from holdfast.cli.main import Place
from holdfast.cli.output import print_json
from holdfast.cluster import SlurmJobs
from holdfast.core.errors import BadUse, HoldfastError
from holdfast.core.ledger import Ledger, Run
from holdfast.core.paths import RunPaths
from holdfast.recover import Following, Outcome, Submission, new_submission, settle_jobs, submit_run

INCOMPLETE = 4


def with_slurm(command: Callable[..., int]) -> Callable[..., int]:
    """Add the options of a run that Slurm starts to a command."""
    options = [
        click.option(
            "--on",
            type=click.Choice(["here", "slurm"]),
            default="here",
            help="Where to run: on this host, or as one Slurm job that is submitted.  [default: here]",
        ),
        click.option(
            "--nodes",
            type=int,
            metavar="N",
            help="Nodes that train; with --on slurm.  [default: 1]",
        ),
        click.option(
            "--sbatch-option",
            "sbatch_options",
            multiple=True,
            metavar="OPTION",
            help="An option for sbatch (--sbatch-option=--partition=gpu); repeatable; with --on slurm.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """The Slurm job that the command line requests for a run.

    Attributes:
        nodes: the number of nodes that train.
        spares: the number of spare nodes, which wait to replace others.
        sbatch_options: the user's options for sbatch.
        environment: environment variables of the job, which may hold secrets.
        echo: True to show the output of the ranks.
    """

    nodes: int
    spares: int
    sbatch_options: tuple[str, ...]
    environment: Mapping[str, str]
    echo: bool

    def submission(self, run_id: str, place: Place) -> Submission:
        """Return the submission to record.

        Options that were not given are taken from the run's last submission.
        """
        last = Submission.read(RunPaths(place.home, run_id))
        new = new_submission(
            run_id=run_id,
            ledger_url=place.ledger,
            nodes=self.nodes,
            spares=self.spares if last is None or self.spares else last.spares,
            options=self.sbatch_options if last is None or self.sbatch_options else last.options,
            environment=self.environment,
            echo=self.echo,
        )
        return new if last is None else new.following(last)


def check_slurm_use(
    on: str, nodes: int | None, sbatch_options: Sequence[str], rendezvous: str | None, spares: int
) -> None:
    """Check that the options on Slurm and nodes fit together.

    Raises:
        BadUse: the options do not fit together; the message has the next step.
    """
    if on != "slurm":
        if nodes is not None or sbatch_options:
            raise BadUse(
                "--nodes and --sbatch-option are for --on slurm. Give that too, or --nnodes instead."
            )
        return
    if rendezvous is not None:
        raise BadUse(
            "--rendezvous does not go with --on slurm: the nodes of a Slurm job find each other. Leave it out."
        )
    if (nodes is not None and nodes < 1) or spares < 0:
        raise BadUse(
            f"--nodes is {nodes} and --spares {spares}; give at least 1 node, and 0 spares or more."
        )


def run_on_slurm(
    record: Callable[[], str],
    place: Place,
    ledger: Ledger,
    wanted: JobRequest,
    *,
    keep: Callable[[RunPaths], None],
    detached: bool,
    as_json: bool,
) -> int:
    """Submit a run to Slurm; unless `detached`, follow the run to its end. Return the exit code.

    Args:
        record: records the run and returns the run's id; called after the options were checked.
        place: the home and the ledger of the records.
        ledger: the open ledger; it is closed here, because from now on the job's first node writes
            to the ledger.
        wanted: the requested job.
        keep: stores the settings of the run's evaluations in the run's folder.
        detached: True to return once the run is queued.
        as_json: True to print one JSON object.
    """
    jobs = SlurmJobs()
    jobs.check_options(wanted.sbatch_options)
    run = ledger.run(record())
    paths = RunPaths(place.home, run.run_id)
    keep(paths)
    ledger.close()
    submission = wanted.submission(run.run_id, place)
    submission = submit_run(run, submission, place.ledger, place.home, jobs)
    job_id = submission.jobs[-1]
    if detached:
        if as_json:
            print_json("outcome", {"id": run.run_id, "state": "queued", "slurm_job": job_id})
        else:
            click.echo(f"Run {run.run_id} is queued as Slurm job {job_id}.")
            click.echo(
                f"  holdfast logs {run.run_id} -f     follow it\n"
                f"  holdfast runs stop {run.run_id}   save its state and stop it"
            )
        return 0
    screen = _Screen(echo=wanted.echo)
    screen.say(f"run {run.run_id} is queued as Slurm job {job_id}")
    following = Following(paths, submission, jobs, say=screen.say, show=screen.show)
    # A closed terminal or a SIGTERM ends only this command; the run continues.
    former = signal.signal(signal.SIGINT, lambda *_: following.stop())
    try:
        following.until_over()
    finally:
        signal.signal(signal.SIGINT, former)
    ended = _ended(run.run_id, place, following, jobs)
    if ended.outcome not in screen.last_lines:
        screen.say(ended.outcome)
    code = INCOMPLETE if ended.exit_code is None else ended.exit_code
    if as_json:
        fields = {"state": ended.state, "exit_code": code, "outcome": ended.outcome}
        print_json("outcome", {"id": run.run_id, **fields, "slurm_job": following.job_id})
    return code


def _ended(run_id: str, place: Place, following: Following, jobs: SlurmJobs) -> Run:
    """Return the run from the ledger after its job ended.

    If the job ended before the run did, record the outcome of the run.
    """
    with Ledger.open(place.ledger) as ledger:
        run = ledger.run(run_id)
        if run.state not in ("queued", "running") or not following.state.is_over:
            return run
        facts = jobs.describe(following.job_id)
        how = "ended, and ended the run" if run.state == "running" else "ended while the run waited"
        outcome = (
            f"Slurm job {following.job_id} {how} ({facts}). Continue with: "
            f"holdfast run --on slurm --resume {run_id}"
        )
        changes: dict[str, Any] = {
            "outcome": outcome,
            "exit_code": INCOMPLETE,
            "ended_at_s": time.time(),
        }
        if run.state == "queued":
            changes["state"] = "stopped"
        ledger.set_run(run_id, **changes)
        return ledger.run(run_id)


def settle(paths: RunPaths, outcome: Outcome, say: Callable[[str], None]) -> None:
    """Cancel the Slurm jobs that a run no longer needs.

    A run that is queued again continues in its next job.
    """
    try:
        ended = settle_jobs(paths, is_queued=outcome.state == "queued")
    except HoldfastError as error:  # the run has ended nevertheless
        say(f"{error} See: squeue --me")
        return
    if ended:
        say(f"Slurm job {', '.join(ended)} is no longer needed and was cancelled")


class _Screen:
    """Print the job's output as it is, and sentences about the run on standard error.

    Each node reports its part of the events, so a line that is equal to the line before it is left
    out.
    """

    def __init__(self, *, echo: bool) -> None:
        self._out = sys.stdout.buffer if echo else sys.stderr.buffer
        self.last_lines = ""
        """The last lines of Holdfast, so that the outcome is not printed twice."""

    def say(self, text: str) -> None:
        """Print a sentence."""
        self._print(f"holdfast: {text}\n".encode(), is_error=True)

    def show(self, fd: int, lines: bytes) -> None:
        """Print lines that a job wrote to its standard output (`fd` 1) or standard error (2)."""
        self._print(lines, is_error=fd == 2)

    def _print(self, lines: bytes, *, is_error: bool) -> None:
        if not is_error:
            self._out.write(lines)
            self._out.flush()
            return
        for line in lines.splitlines(keepends=True):
            text = line.decode(errors="replace").strip()
            if text.startswith("holdfast: "):
                if self.last_lines.endswith(text + "\n"):
                    continue
                self.last_lines = (self.last_lines + text + "\n")[-4000:]
            sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
