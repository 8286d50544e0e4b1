"""`holdfast checkpoint ls | verify`."""

from pathlib import Path
from typing import Any

import click

from holdfast.checkpoint import catalog
from holdfast.cli.output import print_json, print_table, when
from holdfast.core.errors import NotFound


@click.group()
def command() -> None:
    """List and verify checkpoints."""


@command.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def ls(folder: Path, as_json: bool) -> None:
    """List the checkpoints of a folder, without reading their data."""
    _print(folder, _scan(folder), as_json=as_json)


@command.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def verify(folder: Path, as_json: bool) -> int:
    """Check every byte of a folder's checkpoints; leaves with 1 if any is damaged."""
    checked = [catalog.verify(found) for found in _scan(folder)]
    _print(folder, checked, as_json=as_json)
    return 0 if all(one.state == "verified" for one in checked) else 1


def _scan(folder: Path) -> list[Any]:
    if not folder.is_dir():
        raise NotFound(f"There is no folder {folder}. Give the one that was passed to Checkpointer(…).")
    return list(catalog.scan(folder))


def _print(folder: Path, found: list[Any], *, as_json: bool) -> None:
    if as_json:
        fields = ("step", "path", "state", "size_bytes", "created_at_s", "reason")
        rows = [{name: getattr(one, name) for name in fields} for one in found]
        print_json("checkpoints", {"checkpoints": [{**row, "path": str(row["path"])} for row in rows]})
        return
    if not found:
        click.echo(f"No checkpoints in {folder}.")
        return
    print_table(
        ["step", "state", "MiB", "saved", "path", ""],
        [(o.step, o.state, f"{o.size_bytes / 2**20:.1f}", when(o.created_at_s), o.path, o.reason) for o in found],
    )
