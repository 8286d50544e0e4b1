"""`holdfast incidents ls | show`."""

from typing import Any

import click

from holdfast.cli.main import Place
from holdfast.cli.output import print_json, print_table, when
from holdfast.core.ledger import Incident, Ledger


@click.group()
def command() -> None:
    """List and show what went wrong and what was done."""


@command.command()
@click.option("--run", "run_id", metavar="RUN", help="Of one run only.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def ls(place: Place, run_id: str | None, as_json: bool) -> None:
    """List the incidents, oldest first."""
    with Ledger.open(place.ledger) as ledger:
        incidents = ledger.incidents(ledger.run(run_id).run_id if run_id else None)
    if as_json:
        print_json("incidents", {"incidents": [_fields(incident) for incident in incidents]})
        return
    if not incidents:
        click.echo("No incidents.")
        return
    print_table(
        ["id", "run", "attempt", "when", "what", "rank", "step", "reason", "action"],
        [
            (
                one.incident_id,
                one.run_id,
                one.attempt,
                when(one.detected_at_s),
                one.kind,
                one.rank,
                one.step,
                one.diagnosis["reason"],
                one.action,
            )
            for one in incidents
        ],
    )


@command.command()
@click.argument("incident_id", type=click.IntRange(1, 2**31 - 1), metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def show(place: Place, incident_id: int, as_json: bool) -> None:
    """Show an incident: its diagnosis with the cited lines, and what was done."""
    with Ledger.open(place.ledger) as ledger:
        incident = ledger.incident(incident_id)
    if as_json:
        print_json("incident", _fields(incident))
        return
    found = incident.diagnosis
    rank = "" if incident.rank is None else f", rank {incident.rank}"
    step = "before the first step" if incident.step is None else f"after step {incident.step}"
    click.echo(
        f"Incident {incident_id} of run {incident.run_id}, attempt {incident.attempt}: {incident.kind} {step}{rank}"
    )
    click.echo(f"  {found['reason']} ({found['category']}), confidence {found['confidence']:.2f}")
    for line in found["evidence"]:
        click.echo(f"  {line['role']:<9} {line['file']}:{line['line']}: {line['text']}")
    click.echo(f"  advice    {found['mitigation']}")
    click.echo(f"  done      {incident.action}: {incident.explanation}")


def _fields(incident: Incident) -> dict[str, Any]:
    return {"id": incident.incident_id, **{k: v for k, v in vars(incident).items() if k != "incident_id"}}
