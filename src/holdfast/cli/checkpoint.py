"""`holdfast checkpoint ls | verify | export`."""

from pathlib import Path
from typing import Any

import click

from holdfast.checkpoint import catalog
from holdfast.cli.output import print_json, print_table, when
from holdfast.cli.progress import shown
from holdfast.core.errors import NotFound


@click.group()
def command() -> None:
    """List, verify and export checkpoints."""


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


@command.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--safetensors", "output", metavar="DIR", required=True, type=click.Path(path_type=Path), help="To make.")
@click.option(
    "--hf-config",
    metavar="DIR",
    required=True,
    type=click.Path(path_type=Path),
    help="A folder with the model's config.json and tokenizer.",
)
@click.option("--name-map", metavar="FILE", type=click.Path(path_type=Path), help="TOML: which tensors' names differ.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def export(checkpoint: Path, output: Path, hf_config: Path, name_map: Path | None, *, as_json: bool) -> None:
    """Write the model of a CHECKPOINT as a Hugging Face folder: configuration, tokenizer, safetensors."""
    with shown() as progress:
        progress("reading names", 0, None)
        from holdfast.checkpoint.export import export_safetensors

        exported = export_safetensors(
            checkpoint,
            output,
            hf_config=hf_config,
            name_map=name_map,
            progress=lambda done, total: progress("writing safetensors", done, total),
        )
    if as_json:
        fields = {"path": exported.path, "tensors": exported.tensors, "size_bytes": exported.size_bytes}
        print_json("export", {**fields, "files": exported.files})
        return
    click.echo(f"{exported.tensors} tensors, {exported.size_bytes / 2**20:.1f} MiB, in {exported.path}")


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
