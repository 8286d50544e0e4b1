"""Provide `holdfast init SCRIPT`: show the lines that add Holdfast to a training script."""

import shlex
from pathlib import Path

import click

from holdfast.cli.output import print_json

_LAUNCHERS = {"fsdp2": "torchrun --nproc-per-node 8"}


@click.command()
@click.argument("script", type=click.Path(path_type=Path))
@click.option("--write", is_flag=True, help="Change the script.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(script: Path, *, write: bool, as_json: bool) -> None:
    """Show the diff that adds Holdfast to a training script; change nothing without --write.

    \b
    holdfast init train.py
    holdfast init train.py --write

    These kinds of scripts are recognised: a script with its own training loop, also with FSDP2, and
    scripts that use a trainer of Hugging Face, Lightning or torchtitan.
    """
    from holdfast.adopt import KINDS, adoption_of

    adoption = adoption_of(script)
    is_new = adoption.kind != "adopted"
    if write and is_new:
        adoption.write()
    start = f"holdfast run -- {_LAUNCHERS.get(adoption.kind, 'python')} {shlex.quote(str(script))}"
    if adoption.kind == "torchtitan":
        start = "holdfast run -- torchrun --nproc-per-node 8 -m torchtitan.train"
    if as_json:
        print_json(
            "init",
            {
                "script": str(script),
                "kind": adoption.kind,
                "written": write and is_new,
                "diff": adoption.diff(),
                "remark": adoption.remark,
                "next_step": start,
            },
        )
        return
    if not is_new:
        click.echo(f"{script} uses Holdfast already. Nothing was changed. Start it: {start}")
        return
    click.echo(adoption.diff(), nl=False)
    # Print on standard error: standard output is a diff for `git apply`.
    click.echo(f"{script} is {KINDS[adoption.kind]}.", err=True)
    if adoption.remark:
        click.echo(adoption.remark, err=True)
    if write:
        click.echo(f"The script was changed. Start it: {start}", err=True)
    else:
        again = f"holdfast init {shlex.quote(str(script))} --write"
        click.echo(f"Nothing was changed. Change the script: {again}", err=True)
