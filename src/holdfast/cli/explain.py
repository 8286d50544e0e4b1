"""Provide `holdfast explain`: tell the story of a run, in order and in plain words."""

from dataclasses import asdict
from typing import Any

import click

from holdfast.cli.main import Place
from holdfast.cli.output import print_json
from holdfast.core.accounting import LostTime, gpu_hours
from holdfast.core.explanation import IncidentStory, Note, RunStory, explain, story_lines
from holdfast.core.ledger import Ledger
from holdfast.recover import state_of


@click.command()
@click.argument("run_id", metavar="[RUN]", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def command(place: Place, run_id: str | None, as_json: bool) -> None:
    """Show what happened in a run: faults, evidence, decisions, effects, and what each cost.

    \b
    holdfast explain
    holdfast explain RUN --json

    Without RUN, explain the newest run.
    """
    with Ledger.open(place.existing_ledger()) as ledger:
        story = explain(ledger, place.home, run_id or ledger.newest_run().run_id)
        state = state_of(story.summary.run, place.home)
    if as_json:
        print_json("explanation", _fields(story, state))
        return
    for line in story_lines(story, state):
        click.echo(line)
    if state == "lost":
        click.echo(
            f"\nThe supervisor of the run has ended. Continue with: holdfast run --resume {story.summary.run.run_id}"
        )


def _fields(story: RunStory, state: str) -> dict[str, Any]:
    summary = story.summary
    return {
        "id": summary.run.run_id,
        "state": state,
        "outcome": summary.run.outcome,
        "started_at_s": summary.run.started_at_s,
        "wall_s": summary.wall_s,
        "ranks": summary.lost_time.ranks,
        "final_step": summary.final_step,
        "ettr": summary.ettr,
        "interventions": summary.interventions,
        "chain": [_link(one) for one in story.chain],
        "lost_time": _account(summary.lost_time),
    }


def _link(one: IncidentStory | Note) -> dict[str, Any]:
    kind = "incident" if isinstance(one, IncidentStory) else "note"
    return {"kind": kind, **asdict(one)}


def _account(lost: LostTime) -> dict[str, Any]:
    """Return the rank-seconds by cause for JSON; they add up to `ranks` times the wall time."""
    return {
        "rank_s": lost.total_s,
        "gpu_hours": gpu_hours(lost.total_s),
        "by_cause_rank_s": lost.by_cause,
        "by_incident_rank_s": lost.by_incident,
        "by_rank_s": [{"ranks": one.ranks, "seconds": one.seconds} for one in lost.by_rank],
        "unexplained_share": lost.unexplained_share,
    }
