"""Provide `holdfast runs --watch | ls | show | stop | approve | rm | report | summary | export`."""

import contextlib
import socket
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.main import Place
from holdfast.cli.output import near, print_json, print_table, seconds, when
from holdfast.cli.output_paths import OUTPUT_FILE, OUTPUT_FOLDER
from holdfast.cli.progress import shown
from holdfast.cli.runs_watch import watch_runs
from holdfast.core.accounting import RunSummary, summarize
from holdfast.core.atomic import write_atomic
from holdfast.core.clock import SystemClock
from holdfast.core.errors import BadUse, HoldfastError
from holdfast.core.ledger import Ledger
from holdfast.core.paths import RunPaths
from holdfast.core.telemetry import read_steps
from holdfast.recover import (
    approve_run,
    remove_run,
    state_of,
    state_on_this_host,
    stop_queued,
    stop_run,
)

if TYPE_CHECKING:
    from holdfast.ui import Period, Tracker


JOURNAL_END_BYTES = 64 * 1024
"""The bytes that are read from the end of a journal of steps to find the last one."""


@click.group(invoke_without_command=True, no_args_is_help=True)
@click.option("--watch", is_flag=True, help="Show the runs live in this terminal, until Ctrl-C.")
@click.pass_context
def command(context: click.Context, watch: bool) -> None:
    """List, show, stop and remove runs.

    \b
    holdfast runs --watch
    holdfast runs ls
    """
    if not watch:
        return
    if context.invoked_subcommand is not None:
        raise BadUse(
            f"--watch does not go with `{context.invoked_subcommand}`. Run: holdfast runs --watch"
        )
    from holdfast.ui import now_page

    place: Place = context.obj
    with Ledger.open(place.existing_ledger()) as ledger:
        watch_runs(lambda: now_page(ledger, place.home, state_by_host(place.home)))


def state_by_host(home: Path) -> Callable[[str, str, str], str]:
    """Return a function that returns the actual state of a run.

    The function takes the run's id, its state in the ledger and its host. For a run of another host
    it returns the state in the ledger, because that host's processes cannot be seen here.
    """
    here = socket.gethostname()
    return lambda run_id, state, host: (
        state_on_this_host(run_id, state, home) if host == here else state
    )


@command.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def ls(place: Place, as_json: bool) -> None:
    """List the runs, oldest first.

    \b
    holdfast runs ls
    holdfast runs ls --json
    """
    with Ledger.open(place.existing_ledger()) as ledger:
        rows = [_row(ledger, place, run.run_id) for run in ledger.runs()]
    if as_json:
        print_json("runs", {"runs": rows})
        return
    if not rows:
        click.echo("No runs yet. Start one: holdfast run -- python train.py")
        return
    print_table(
        ["run", "state", "started", "attempts", "step", "incidents", "command"],
        [
            (
                row["id"],
                row["state"],
                when(row["started_at_s"]),
                row["attempts"],
                row["step"],
                row["incidents"],
                " ".join(row["command"]),
            )
            for row in rows
        ],
    )


def _row(ledger: Ledger, place: Place, run_id: str) -> dict[str, Any]:
    run = ledger.run(run_id)
    attempts = ledger.attempts(run_id)
    steps = [attempt.last_step for attempt in attempts if attempt.last_step is not None]
    state = state_of(run, place.home)
    if state == "running":  # the ledger gets the last step of an attempt at its end
        journal = RunPaths(place.home, run_id).steps
        with contextlib.suppress(HoldfastError, OSError):  # another user's, or damaged
            steps += [one.step for one in read_steps(journal, last_bytes=JOURNAL_END_BYTES)][-1:]
    return {
        "id": run_id,
        "state": state,
        "started_at_s": run.started_at_s,
        "ended_at_s": run.ended_at_s,
        "exit_code": run.exit_code,
        "attempts": len(attempts),
        "step": max(steps, default=None),
        "incidents": len(ledger.incidents(run_id)),
        "command": run.command,
        "outcome": run.outcome,
    }


@command.command()
@click.argument("run_id", metavar="[RUN]", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def show(place: Place, run_id: str | None, as_json: bool) -> None:
    """Show a run: its attempts, its failures, its cost.

    \b
    holdfast runs show
    holdfast runs show RUN --json

    Without RUN, show the newest run.
    """
    with Ledger.open(place.existing_ledger()) as ledger:
        run_id = run_id or ledger.newest_run().run_id
        row = _row(ledger, place, run_id)
        summary = summarize(ledger, place.home, run_id)
        attempts = [vars(attempt) for attempt in ledger.attempts(run_id)]
    if as_json:
        print_json("run", {**row, "attempts": attempts, **_figures(summary)})
        return
    click.echo(
        f"{run_id}: {row['state']}"
        + (f", exit code {row['exit_code']}" if row["exit_code"] is not None else "")
    )
    if row["state"] == "lost":
        click.echo(
            f"The supervisor and the ranks have ended. Continue with: holdfast run --resume {run_id}"
        )
    if row["outcome"]:
        click.echo(row["outcome"])
    click.echo(f"command   {' '.join(row['command'])}")
    click.echo(f"logs      {near(RunPaths(place.home, run_id).logs)}")
    for name, value in _figures(summary).items():
        click.echo(
            f"{name:<22}{f'{value:.3f}' if isinstance(value, float) else '' if value is None else value}"
        )
    print_table(
        ["attempt", "outcome", "started", "from step", "to step", "ran"],
        [
            (
                attempt["number"],
                attempt["outcome"],
                when(attempt["started_at_s"]),
                attempt["start_step"],
                attempt["last_step"],
                seconds(attempt["ended_at_s"] - attempt["started_at_s"])
                if attempt["ended_at_s"]
                else "",
            )
            for attempt in attempts
        ],
    )


def _figures(summary: RunSummary) -> dict[str, Any]:
    """Return the totals of the run's records, with their names in the JSON output."""
    return {
        "wall_s": summary.wall_s,
        "ettr": summary.ettr,
        "final_step": summary.final_step,
        "steps_executed": summary.steps_executed,
        "steps_lost": summary.steps_lost,
        "median_step_s": summary.median_step_s,
        "interventions": summary.interventions,
        "checkpoints": summary.checkpoints.count,
        "checkpoint_stall_s": summary.checkpoints.total_stall_s,
        **{f"{cause}_s": value_s for cause, value_s in summary.breakdown.by_cause().items()},
    }


@command.command()
@click.argument("run_id", metavar="RUN")
@click.option(
    "--timeout-s", type=float, default=120.0, show_default=True, help="How long to wait for it."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def stop(place: Place, run_id: str, timeout_s: float, as_json: bool) -> None:
    """Save a run's state and stop it.

    \b
    holdfast runs stop RUN
    """
    with Ledger.open(place.existing_ledger()) as ledger:
        if (run := ledger.run(run_id)).state == "queued":
            stop_queued(run, ledger, place.home)
        else:
            stop_run(run_id, ledger, place.home, timeout_s=timeout_s)
        outcome = ledger.run(run_id).outcome
    if as_json:
        print_json("stop", {"id": run_id, "outcome": outcome})
    else:
        click.echo(outcome)


@command.command()
@click.argument("run_id", metavar="RUN")
@click.option(
    "--timeout-s", type=float, default=120.0, show_default=True, help="How long to wait for it."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def approve(place: Place, run_id: str, timeout_s: float, as_json: bool) -> None:
    """Carry out what a run with `--mode propose` has proposed.

    \b
    holdfast runs approve RUN
    """
    with Ledger.open(place.existing_ledger()) as ledger:
        proposal = approve_run(run_id, ledger, place.home, timeout_s=timeout_s)
    if as_json:
        print_json("approve", {"id": run_id, "proposal": proposal})
    else:
        click.echo(f"Approved: {proposal}")


@command.command()
@click.argument("run_ids", metavar="RUN…", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def rm(place: Place, run_ids: tuple[str, ...], as_json: bool) -> None:
    """Delete the records and logs of runs. Their checkpoints stay where the scripts put them.

    \b
    holdfast runs rm RUN
    """
    with Ledger.open(place.existing_ledger()) as ledger:
        for run in [ledger.run(run_id) for run_id in run_ids]:
            remove_run(run, ledger, place.home)
    if as_json:
        print_json("rm", {"removed": list(run_ids)})
    else:
        click.echo(f"Removed: {', '.join(run_ids)}. The checkpoints remain.")


@command.command()
@click.argument("run_ids", metavar="[RUN]…", nargs=-1)
@click.option(
    "-o",
    "--output",
    type=OUTPUT_FILE,
    help="The page.  [default: in the first run's folder]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def report(place: Place, run_ids: tuple[str, ...], output: Path | None, as_json: bool) -> None:
    """Write a page about runs: one HTML file that needs no network.

    \b
    holdfast runs report
    holdfast runs report RUN -o run.html

    Without RUN, report on the newest run.
    """
    from holdfast.ui import write_report

    with Ledger.open(place.existing_ledger()) as ledger:
        run_ids = run_ids or (ledger.newest_run().run_id,)
        path = output or RunPaths(place.home, run_ids[0]).report
        summaries = [summarize(ledger, place.home, run_id) for run_id in run_ids]
        write_report(path, summaries, title=run_ids[0], home=place.home)
    if as_json:
        print_json("report", {"path": str(path)})
    else:
        click.echo(str(path))


@command.command()
@click.option(
    "--since",
    default="7d",
    show_default=True,
    metavar="AGE|DATE",
    help="The start: an age such as 7d, 12h or 2w, or a date such as 2026-11-21 (UTC).",
)
@click.option(
    "-o",
    "--output",
    type=OUTPUT_FILE,
    help="Write to this file: a page if the name ends in .html, else Markdown.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def summary(place: Place, since: str, output: Path | None, as_json: bool) -> None:
    """Sum up all runs of the last week, or of another time: Markdown, or one HTML page.

    \b
    holdfast runs summary
    holdfast runs summary --since 24h -o day.html
    """
    from holdfast.ui import period_html, period_markdown, period_of

    now_s = SystemClock().now_s()
    since_s = begin_of(since, now_s)
    with Ledger.open(place.existing_ledger()) as ledger, shown() as progress:
        period = period_of(
            ledger, place.home, since_s, now_s,
            state_of=lambda run: state_by_host(place.home)(run.run_id, run.state, run.host),
            progress=progress,
        )  # fmt: skip
    if output is not None:
        text = period_html(period) if output.suffix == ".html" else period_markdown(period)
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(output, text.encode())
    if as_json:
        print_json("summary", _period_fields(period, output))
    else:
        click.echo(
            str(output) if output is not None else period_markdown(period), nl=output is not None
        )


@command.command()
@click.argument("run_id", metavar="[RUN]", required=False)
@click.option(
    "--to",
    "tracker",
    type=click.Choice(["tensorboard", "wandb", "trackio"]),
    required=True,
    help="The tracker, which must be installed.",
)
@click.option(
    "-o",
    "--output",
    type=OUTPUT_FOLDER,
    help="The folder of the tracker's files.  [default: a folder named after the tracker]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def export(
    place: Place, run_id: str | None, tracker: "Tracker", output: Path | None, as_json: bool
) -> None:
    """Write the curves of a run into an experiment tracker, each step once.

    Without RUN, export the curves of the newest run.

    \b
    holdfast runs export RUN --to tensorboard
    WANDB_MODE=offline holdfast runs export RUN --to wandb
    """
    from holdfast.ui import curves_of
    from holdfast.ui import export as write

    with Ledger.open(place.existing_ledger()) as ledger:
        run_id = run_id or ledger.newest_run().run_id
        curves = curves_of(ledger, place.home, run_id)
    outcome = write(curves, tracker, (output or Path(tracker)).absolute())
    if as_json:
        print_json(
            "curves",
            {"id": run_id, "tracker": tracker, "steps": len(curves.points), "outcome": outcome},
        )
    else:
        click.echo(outcome)


AGES_S = {"h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def begin_of(since: str, now_s: float) -> float:
    """Convert an age, such as 24h, or a date to a Unix time before `now_s`.

    Raises:
        BadUse: the text is neither an age nor a date before `now_s`.
    """
    number, unit = since[:-1], since[-1:]
    if unit in AGES_S and number.isascii() and number.isdigit() and 0 < int(number) <= 10_000:
        return now_s - int(number) * AGES_S[unit]
    try:
        at = datetime.fromisoformat(since)
    except ValueError as error:
        raise BadUse(
            f"--since {since!r} is neither an age nor a date. Give 7d, 12h, 2w or 2026-11-21."
        ) from error
    begin_s = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    if begin_s >= now_s:
        raise BadUse(f"--since {since!r} lies in the future. Give an earlier date.")
    return begin_s


def _period_fields(period: "Period", output: Path | None) -> dict[str, Any]:
    return {
        "path": None if output is None else str(output),
        "since_s": period.since_s,
        "until_s": period.until_s,
        "gpu_hours": period.gpu_hours,
        "ettr": period.ettr,
        "rank_seconds": period.rank_seconds,
        "runs": [
            {
                "id": one.run.run_id, "state": one.state, "ranks": one.ranks, "wall_s": one.wall_s,
                "gpu_hours": one.gpu_hours, "ettr": one.ettr, "final_step": one.final_step,
                "incidents": len(one.incidents), "interventions": one.interventions,
                "why_unknown": one.why_unknown or None,
            }
            for one in period.runs
        ],
        "incidents": [
            {
                "id": str(one.story.incident_id), "run_id": one.run_id, "at_s": one.story.at_s,
                "what": one.story.what, "reason": one.reason, "cause": one.story.cause,
                "done": one.story.done, "effect": one.story.check, "is_recovered": one.is_recovered,
                "lost_gpu_hours": one.story.lost_gpu_hours,
            }
            for one in period.incidents
        ],
        "cordoned": [one.name for one in period.cordoned],
        "evaluations": [
            {"id": one.evaluation_id, "suite": one.suite, "state": one.state}
            for one in period.evaluations
        ],
    }  # fmt: skip
