"""Provide `holdfast plan`: advice on interval, spares and timeouts for the next job."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from holdfast.cli import progress as progress_of
from holdfast.cli.main import Place
from holdfast.cli.output import print_json, print_table, seconds
from holdfast.cli.output_paths import OUTPUT_FILE
from holdfast.core.errors import BadUse
from holdfast.core.ledger import Ledger
from holdfast.core.paths import RunPaths
from holdfast.core.words import plainly

if TYPE_CHECKING:
    from holdfast.simulate.pretrain import Advice, Records


TRACE = click.option(
    "--trace",
    metavar="JOBS",
    help="Job records instead of the ledger: what `holdfast trace` recognises, or what its convert wrote.",
)


@click.command()
@click.argument("runs", metavar="[RUN]...", nargs=-1)
@TRACE
@click.option(
    "--gpus",
    type=click.IntRange(1),
    metavar="N",
    help="GPUs of the next job.  [default: as the largest run had]",
)
@click.option(
    "--days",
    type=click.FloatRange(0, min_open=True),
    default=30.0,
    show_default=True,
    metavar="D",
    help="The job's length in days.",
)
@click.option(
    "--replications",
    type=click.IntRange(4),
    default=20,
    show_default=True,
    metavar="N",
    help="Simulated runs, for the mean and the 5 % to 95 % band.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="The seed of all random draws."
)
@click.option(
    "--page",
    type=OUTPUT_FILE,
    metavar="FILE",
    help="Write an HTML page to this file.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def command(
    place: Place,
    /,
    runs: Sequence[str],
    trace: str | None,
    gpus: int | None,
    days: float,
    replications: int,
    seed: int,
    page: Path | None,
    as_json: bool,
) -> None:
    """Advise on the next job, from the ledger's records of RUNs, or of all runs.

    \b
    holdfast plan
    holdfast plan --gpus 1024

    The job is simulated with the failure rate that the records show, and with the uncertainty of
    this rate. The tornado chart shows how much each input changes the effective training time.
    """
    from holdfast.simulate.pretrain import advise, write_plan

    if trace is not None and runs:
        raise BadUse(
            "--trace replaces the ledger, so RUNs cannot be named with it. Leave one of them out."
        )
    records = records_of(place, runs, trace)
    with progress_of.shown() as progress:
        advice = advise(
            records, gpus=gpus, days=days, replications=replications, seed=seed, progress=progress
        )
    if page is not None:
        write_plan(page, advice)
    if as_json:
        print_json("plan", {**advice.to_json(), "page": None if page is None else str(page)})
        return
    _show(advice)
    if page is not None:
        click.echo(f"Page: {page}")


def records_of(place: Place, runs: Sequence[str], trace: str | None = None) -> "Records":
    """Read the records of runs from the ledger and the journals, or from job records.

    Args:
        place: the home folder, which holds the journals, and the ledger.
        runs: the ids of the runs; if empty, all runs.
        trace: the path of job records to read instead; if they have job types, only pretraining
            jobs count.

    Raises:
        NotFound: the ledger has no such run.
        BadUse: the job records cannot be read.
    """
    if trace is not None:
        return _of_jobs(trace)
    from holdfast.core.accounting import summarize
    from holdfast.core.telemetry import read_steps
    from holdfast.simulate.pretrain import Records

    summaries, longest_s = [], None
    with Ledger.open(place.existing_ledger()) as ledger:
        names = runs or [one.run_id for one in ledger.runs()]
        for name in names:
            steps = list(read_steps(RunPaths(place.home, name).steps))
            summaries.append(summarize(ledger, place.home, name, steps=steps))
            # The first step of an attempt has a limit of its own.
            later = [
                after.step_s
                for before, after in itertools.pairwise(steps)
                if before.attempt == after.attempt
            ]
            longest_s = max([*later, *([] if longest_s is None else [longest_s])], default=None)
    return Records.of(summaries, longest_step_s=longest_s)


def _of_jobs(path: str) -> "Records":
    from holdfast.simulate.pretrain import Records
    from holdfast.trace import load

    with load(path) as trace:
        typed = "AND type = 'Pretrain'" if trace.has("type") else ""
        sql = f"SELECT gpu_num, run_s, state, reason FROM jobs WHERE gpu_num > 0 AND run_s > 0 {typed}"
        table = trace.query(sql)
        columns = [table[name].tolist() for name in ("gpu_num", "run_s", "state", "reason")]
    return Records.of_jobs(list(zip(*columns, strict=True)))


def _why(name: str, longest_s: float | None, limit_s: float) -> str:
    """Return the reason for the advised value of a time limit."""
    if longest_s is None:
        return f"no {name} is recorded: the default"
    if 2 * longest_s < limit_s - 1:
        return f"the longest {name} took {seconds(longest_s)}; a shorter limit gains little"
    return f"twice the longest {name}"


def _show(advice: "Advice") -> None:
    one, records, answer = advice.scenario, advice.records, advice.answer
    mean = advice.mean_time_to_failure_h
    click.echo(
        f"A job of {plainly(one.gpus, 'GPU')} for {one.days:g} days, from {plainly(records.runs, 'run')} with "
        f"{plainly(len(records.reasons), 'failure')} in {records.job_days:.3g} days of training."
    )
    print_table(
        ["advice", "", "why"],
        [
            [
                "save every",
                seconds(advice.interval_s),
                f'a save stalls training for {seconds(one.saves.stall_s)}; holdfast.Checkpointer(every="auto") does so',
            ],
            [
                "spare nodes",
                advice.spares,
                "nodes are missing for 0.1 % of the time at most; --spares on Slurm and Kubernetes, else more agents",
            ],
            [
                "--hang-floor-s",
                f"{advice.hang_floor_s:.0f}",
                _why("step", records.longest_step_s, advice.hang_floor_s),
            ],
            [
                "--first-step-limit-s",
                f"{advice.first_step_limit_s:.0f}",
                _why("start", records.longest_start_s, advice.first_step_limit_s),
            ],
        ],
    )
    click.echo(
        f"A failure every {mean.mean:.3g} h of training ({mean.low:.3g} to {mean.high:.3g} h). Expected: ETTR "
        f"{answer.ettr.mean:.2%} ({answer.ettr.low:.2%} to {answer.ettr.high:.2%}), manual interventions "
        f"{answer.interventions.mean:.1f} times ({answer.interventions.low:.0f} to {answer.interventions.high:.0f})."
    )
    print_table(
        ["assumption", "ETTR at half", "at twice", "per ln", "points; noise"],
        [
            [
                swing.name,
                f"{swing.half * 100:+.3f} points",
                f"{swing.twice * 100:+.3f} points",
                f"{swing.elasticity * 100:+.3f}",
                f"{swing.noise * 100:.3f}"
                + (" (no effect seen)" if swing.width <= swing.noise else ""),
            ]
            for swing in advice.swings
        ],
    )
    if advice.assumed:
        click.echo(f"Not in the records, so assumed: {', '.join(advice.assumed)}.")
    click.echo(f"Rates: {one.rates.source}.")
    click.echo(f"holdfast run {advice.flags} -- COMMAND")
