"""`holdfast runs ls | show | stop | approve | rm | report`."""

from pathlib import Path
from typing import Any

import click

from holdfast.cli.main import Place
from holdfast.cli.output import print_json, print_table, seconds, when
from holdfast.core.accounting import RunSummary, summarize
from holdfast.core.ledger import Ledger
from holdfast.core.paths import RunPaths
from holdfast.recover import approve_run, remove_run, state_of, stop_queued, stop_run


@click.group()
def command() -> None:
    """List, show, stop and remove runs."""


@command.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def ls(place: Place, as_json: bool) -> None:
    """List the runs, oldest first."""
    with Ledger.open(place.ledger) as ledger:
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
                row["run"],
                row["state"],
                when(row["started_at_s"]),
                row["attempts"],
                row["step"],
                row["incidents"],
                " ".join(row["command"])[:80],
            )
            for row in rows
        ],
    )


def _row(ledger: Ledger, place: Place, run_id: str) -> dict[str, Any]:
    run = ledger.run(run_id)
    attempts = ledger.attempts(run_id)
    steps = [attempt.last_step for attempt in attempts if attempt.last_step is not None]
    return {
        "run": run_id,
        "state": state_of(run, place.home),
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
@click.argument("run_id", metavar="RUN")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def show(place: Place, run_id: str, as_json: bool) -> None:
    """Show a run: its attempts, its failures, its cost."""
    with Ledger.open(place.ledger) as ledger:
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
            f"Its supervisor is gone; its ranks ended with it. Go on: holdfast run --resume {run_id}"
        )
    if row["outcome"]:
        click.echo(row["outcome"])
    click.echo(f"command   {' '.join(row['command'])}")
    click.echo(f"logs      {RunPaths(place.home, run_id).logs}")
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
    """Return the totals of the run's records, named as in the JSON."""
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
    """Save a run's state and stop it."""
    with Ledger.open(place.ledger) as ledger:
        if (run := ledger.run(run_id)).state == "queued":
            stop_queued(run, ledger, place.home)
        else:
            stop_run(run_id, ledger, place.home, timeout_s=timeout_s)
        outcome = ledger.run(run_id).outcome
    if as_json:
        print_json("stop", {"run": run_id, "outcome": outcome})
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
    """Carry out the proposal of a run of `--mode propose`."""
    with Ledger.open(place.ledger) as ledger:
        proposal = approve_run(run_id, ledger, place.home, timeout_s=timeout_s)
    if as_json:
        print_json("approve", {"run": run_id, "proposal": proposal})
    else:
        click.echo(f"Approved: {proposal}")


@command.command()
@click.argument("run_ids", metavar="RUN…", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def rm(place: Place, run_ids: tuple[str, ...], as_json: bool) -> None:
    """Forget runs and delete their logs. Their checkpoints stay where the scripts put them."""
    with Ledger.open(place.ledger) as ledger:
        for run in [ledger.run(run_id) for run_id in run_ids]:
            remove_run(run, ledger, place.home)
    if as_json:
        print_json("rm", {"removed": list(run_ids)})


@command.command()
@click.argument("run_ids", metavar="RUN…", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The page.  [default: in the first run's folder]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def report(place: Place, run_ids: tuple[str, ...], output: Path | None, as_json: bool) -> None:
    """Write a page about runs: one HTML file that needs no network."""
    from holdfast.ui import write_report

    path = output or RunPaths(place.home, run_ids[0]).report
    with Ledger.open(place.ledger) as ledger:
        summaries = [summarize(ledger, place.home, run_id) for run_id in run_ids]
        write_report(path, summaries, title=run_ids[0], home=place.home)
    if as_json:
        print_json("report", {"path": str(path)})
    else:
        click.echo(str(path))
