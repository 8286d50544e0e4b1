"""Provide `holdfast ledger downgrade`."""

import click

from holdfast.cli.main import Place
from holdfast.cli.output import print_json
from holdfast.core.ledger import downgrade_ledger
from holdfast.core.words import plainly


@click.group()
def command() -> None:
    """Change the version of the ledger.

    A newer Holdfast migrates the ledger when it first opens the ledger.

    \b
    holdfast ledger downgrade 0005
    """


@command.command()
@click.argument("version")
@click.option("--force", is_flag=True, help="Delete the records that VERSION cannot hold.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def downgrade(place: Place, version: str, *, force: bool, as_json: bool) -> None:
    """Migrate the ledger back, so that an earlier Holdfast can open it.

    \b
    holdfast ledger downgrade 0005

    VERSION is the version that the earlier Holdfast names in its error. Back up the ledger first,
    and stop all runs, evaluations and consoles. Install the earlier Holdfast right afterwards,
    because any use of the ledger by this Holdfast migrates the ledger again.
    """
    deleted = downgrade_ledger(place.ledger, version, force=force)
    if as_json:
        print_json("ledger_downgrade", {"ledger_version": version, "deleted": deleted})
        return
    click.echo(f"The ledger is of version {version}.")
    for table, count in deleted.items():
        if count:
            click.echo(f"Deleted: {plainly(count, 'record')} of the table {table}.")
