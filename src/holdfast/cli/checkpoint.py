"""Provide `holdfast checkpoint`: list, verify, compare, keep, delete and convert checkpoints."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import click

from holdfast.checkpoint import (
    checkpoint_step,
    checkpoints_at,
    has_only_metadata,
    inspect_checkpoint,
    scan,
    verify_and_note,
)
from holdfast.checkpoint import pin as pin_checkpoint
from holdfast.checkpoint import unpin as unpin_checkpoint
from holdfast.cli import checkpoint_view
from holdfast.cli.checkpoint_rules import RULES, policy_of
from holdfast.cli.main import Place
from holdfast.cli.output import print_json
from holdfast.cli.output_paths import check_output
from holdfast.cli.progress import Progress, shown
from holdfast.core.arguments import local_path
from holdfast.core.clock import SystemClock
from holdfast.core.errors import BadUse, HoldfastError, NotFound
from holdfast.core.processes import whoami

JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object.")


class _AbsolutePath(click.Path):
    """Convert a path to an absolute one, because a path such as `.` has no step number."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        # An empty path usually comes from a shell variable that is not set. `prune` must not use
        # the working directory instead.
        try:
            path = local_path(
                value,
                instead_of_url="Fetch it first: holdfast.checkpoint.Remote(URL).fetch(STEP, DIR).",
            )
        except BadUse as error:
            self.fail(str(error), param, ctx)
        return Path(os.fsdecode(super().convert(path, param, ctx)))


PATH = _AbsolutePath()


class _OutputPath(_AbsolutePath):
    """Convert to an absolute path, and check that a file or folder can be written there."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = super().convert(value, param, ctx)
        check_output(path)
        return path


OUTPUT = _OutputPath()
FOLDER = click.argument("folder", metavar="DIR", type=PATH)
CHECKPOINT = click.argument("checkpoint", metavar="CHECKPOINT", type=PATH)


@click.group()
def command() -> None:
    """List, verify, compare, keep, delete and convert checkpoints.

    \b
    holdfast checkpoint ls checkpoints/
    holdfast checkpoint verify checkpoints/
    """


@command.command()
@click.argument("folder", metavar="[DIR]", type=PATH, required=False)
@JSON
@click.pass_obj
def ls(place: Place, folder: Path | None, *, as_json: bool) -> None:
    """List the checkpoints of a folder, without reading their data.

    \b
    holdfast checkpoint ls checkpoints/

    Without DIR, list the checkpoints of the newest run.
    """
    folder = folder or _newest_of_run(place).parent
    _check_folder(folder)
    checkpoint_view.print_checkpoints(folder, scan(folder), as_json=as_json)


@command.command()
@click.argument("path", metavar="[DIR|CHECKPOINT]", type=PATH, required=False)
@JSON
@click.pass_obj
def verify(place: Place, path: Path | None, *, as_json: bool) -> int:
    """Check every byte of a checkpoint, or of all checkpoints in a folder.

    \b
    holdfast checkpoint verify checkpoints/

    Without a path, check all checkpoints of the newest run.

    The exit code is 1 if a checkpoint is damaged or incomplete, and 4 if a checkpoint that PyTorch
    wrote without Holdfast cannot be checked in full.
    """
    path = path or _newest_of_run(place).parent
    _check_folder(path)
    found = checkpoints_at(path)
    if not found:
        raise NotFound(
            f"There is no checkpoint in {path}. Give one, or the folder that was passed to Checkpointer(…)."
        )
    checked = []
    with shown() as progress:
        for one in found:
            try:
                checked.append(_verify(one, progress))
            except NotFound:  # the job that owns the folder has pruned this checkpoint
                if one == path:
                    raise
    checkpoint_view.print_checkpoints(path, checked, as_json=as_json)
    states = {one.state for one in checked}
    if states <= {"verified", "checked"}:
        return 0
    return 4 if states <= {"verified", "checked", "unverifiable"} else 1


@command.command()
@click.argument("checkpoint", metavar="[CHECKPOINT]", type=PATH, required=False)
@click.option(
    "--tensors", "with_tensors", is_flag=True, help="List every tensor, as --json always does."
)
@JSON
@click.pass_obj
def show(place: Place, checkpoint: Path | None, *, with_tensors: bool, as_json: bool) -> None:
    """Show the files, marks, entries and tensors of a CHECKPOINT.

    \b
    holdfast checkpoint show checkpoints/step-200 --tensors

    Without CHECKPOINT, show the newest checkpoint of the newest run.
    """
    _check_torch()
    checkpoint = checkpoint or _newest_of_run(place)
    from holdfast.checkpoint import open_for_reading, take_inventory

    opened = open_for_reading(checkpoint)
    info = None if _is_taken_for_dcps(opened.path) else inspect_checkpoint(opened.path)
    checkpoint_view.print_contents(
        opened, take_inventory(opened), info, with_tensors=with_tensors, as_json=as_json
    )


@command.command()
@click.argument("a", metavar="A", type=PATH)
@click.argument("b", metavar="B", type=PATH)
@JSON
def diff(a: Path, b: Path, *, as_json: bool) -> int:
    """Show the differences between two checkpoints, bit for bit.

    \b
    holdfast checkpoint diff checkpoints/step-100 checkpoints/step-200

    The exit code is 0 if the checkpoints are equal, 1 if they differ, and 2 if one cannot be read,
    as for diff(1).
    """
    try:
        _check_torch()
        from holdfast.checkpoint import compare_checkpoints, open_for_reading

        with shown() as progress:
            compared = compare_checkpoints(
                open_for_reading(a),
                open_for_reading(b),
                progress=lambda done, total: progress("comparing", done, total),
            )
    except BadUse:  # its exit code is already 2
        raise
    except HoldfastError as error:  # its exit code 1 would mean that the checkpoints differ
        raise BadUse(str(error)) from error
    checkpoint_view.print_comparison(a, b, compared, as_json=as_json)
    return 0 if compared.is_same else 1


@command.command()
@CHECKPOINT
@click.option("--why", metavar="TEXT", help="The reason, which is shown with the checkpoint.")
@JSON
def pin(checkpoint: Path, why: str | None, *, as_json: bool) -> None:
    """Keep a CHECKPOINT from ever being deleted.

    \b
    holdfast checkpoint pin checkpoints/step-200 --why "the release"
    """
    info = inspect_checkpoint(checkpoint)
    pin_checkpoint(info.path, by=whoami(), now_s=SystemClock().now_s(), why=why)
    checkpoint_view.print_pin(info.path, pinned=True, as_json=as_json)


@command.command()
@CHECKPOINT
@JSON
def unpin(checkpoint: Path, *, as_json: bool) -> None:
    """Unpin a CHECKPOINT, so that it may be deleted unless another rule keeps it.

    \b
    holdfast checkpoint unpin checkpoints/step-200
    """
    info = inspect_checkpoint(checkpoint)
    unpin_checkpoint(info.path, now_s=SystemClock().now_s())
    checkpoint_view.print_pin(info.path, pinned=False, as_json=as_json)


@command.command()
@FOLDER
@RULES
@click.option("--dry-run", is_flag=True, help="Print what would be deleted, and delete nothing.")
@JSON
def prune(
    folder: Path,
    last: int | None,
    every_steps: int | None,
    best: tuple[str, ...],
    within: str | None,
    *,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Delete the checkpoints that no rule keeps, and show why each of the others stays.

    \b
    holdfast checkpoint prune checkpoints/ --last 3 --every 1000 --dry-run

    Some checkpoints stay under any rules: the newest, the newest verified, the pinned, the wanted
    and the damaged ones. The exit code is 1 if a checkpoint could not be deleted.
    """
    from holdfast.checkpoint import prune as prune_folder

    _check_folder(folder)
    policy = policy_of(last=last, every_steps=every_steps, best=best, within=within)
    with shown() as progress:
        pruned = prune_folder(
            folder,
            policy,
            by=whoami(),
            now_s=SystemClock().now_s(),
            dry_run=dry_run,
            progress=lambda done, total: progress(
                "verifying the newest checkpoint to keep", done, total
            ),
        )
    checkpoint_view.print_pruned(folder, pruned, dry_run=dry_run, as_json=as_json)
    return 1 if pruned.failed else 0


@command.command()
@CHECKPOINT
@click.option(
    "--safetensors", "output", metavar="DIR", required=True, type=OUTPUT, help="The new folder."
)
@click.option(
    "--hf-config",
    metavar="DIR",
    required=True,
    type=PATH,
    help="A folder with the model's config.json and tokenizer.",
)
@click.option(
    "--name-map", metavar="FILE", type=PATH, help="TOML file that maps differing tensor names."
)
@JSON
def export(
    checkpoint: Path, output: Path, hf_config: Path, name_map: Path | None, *, as_json: bool
) -> None:
    """Write the model of a CHECKPOINT as a Hugging Face folder.

    \b
    holdfast checkpoint export checkpoints/step-200 --safetensors ./model --hf-config ./llama

    The folder has the configuration, the tokenizer and the weights as safetensors.
    """
    _check_torch()
    with shown() as progress:
        progress("reading names", 0, None)
        from holdfast.checkpoint import export_safetensors

        exported = export_safetensors(
            checkpoint,
            output,
            hf_config=hf_config,
            name_map=name_map,
            progress=lambda done, total: progress("writing safetensors", done, total),
        )
    if as_json:
        fields = {
            "path": exported.path,
            "tensors": exported.tensors,
            "size_bytes": exported.size_bytes,
        }
        print_json("export", {**fields, "files": exported.files})
        return
    click.echo(
        f"{exported.tensors} tensors, {exported.size_bytes / 2**20:.1f} MiB, in {exported.path}"
    )


@command.command()
@CHECKPOINT
@click.option("--to", "output", metavar="FILE", required=True, type=OUTPUT, help="The new file.")
@click.option(
    "--entry",
    "entries",
    metavar="NAME",
    multiple=True,
    help="Only this entry of the state; repeatable.",
)
@JSON
def restore(checkpoint: Path, output: Path, entries: tuple[str, ...], *, as_json: bool) -> None:
    """Write the state of a CHECKPOINT as one file, for torch.load(FILE, weights_only=True).

    \b
    holdfast checkpoint restore checkpoints/step-200 --to state.pt
    """
    _check_torch()
    with shown() as progress:
        progress("checking", 0, None)
        from holdfast.checkpoint import consolidate_checkpoint

        written = consolidate_checkpoint(
            checkpoint,
            output,
            entries=entries,
            progress=lambda done, total: progress("reading", done, total),
        )
    if as_json:
        fields = {
            "path": written.path,
            "tensors": written.tensors,
            "size_bytes": written.size_bytes,
        }
        print_json("restore", {**fields, "entries": written.entries})
        return
    click.echo(
        f"{', '.join(map(str, written.entries))}: {checkpoint_view.mib(written.size_bytes)} MiB, in {written.path}"
    )


@command.command("import")
@click.argument("source", metavar="SOURCE", type=PATH)
@click.option(
    "--to", "folder", metavar="DIR", required=True, type=OUTPUT, help="The folder to copy into."
)
@click.option(
    "--step",
    metavar="N",
    required=True,
    type=click.IntRange(min=0),
    help="The training step of SOURCE.",
)
@JSON
def import_(source: Path, folder: Path, step: int, *, as_json: bool) -> None:
    """Copy a checkpoint that PyTorch wrote without Holdfast into DIR, for Checkpointer.restore.

    \b
    holdfast checkpoint import old/step_200 --to checkpoints --step 200
    """
    _check_torch()
    with shown() as progress:
        progress("looking", 0, None)
        from holdfast.checkpoint import import_dcp

        imported = import_dcp(
            source,
            folder,
            step,
            progress=lambda done, total: progress("copying and checking", done, total),
        )
    if as_json:
        fields = {"path": imported.path, "size_bytes": imported.size_bytes, "step": step}
        print_json("import", {**fields, "unchecked": imported.unchecked or None})
        return
    result = imported.unchecked or "every value matches its CRC-32"
    click.echo(
        f"Step {step}: {checkpoint_view.mib(imported.size_bytes)} MiB, in {imported.path}; {result}"
    )


def _newest_of_run(place: Place) -> Path:
    """Return the newest checkpoint of the newest run, according to the ledger."""
    from holdfast.core.ledger import Ledger

    with Ledger.open(place.ledger) as ledger:
        run = ledger.newest_run()
        found = ledger.checkpoints(run.run_id)
    if not found:
        raise NotFound(
            f"The newest run, {run.run_id}, has no checkpoint yet. Give the path of a folder."
        )
    return Path(run.cwd) / found[-1].path


def _check_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise HoldfastError(
            "This needs torch, which is not installed. Run: pip install 'holdfast[train]'"
        )


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise NotFound(
            f"There is no folder {folder}. Give the folder that was passed to Checkpointer(…)."
        )


def _is_taken_for_dcps(path: Path) -> bool:
    """Return True for a checkpoint that PyTorch wrote without Holdfast.

    Such a checkpoint has no manifest, and either its name has no step or its files are not
    Holdfast's.
    """
    if not has_only_metadata(path):
        return False
    _check_torch()
    from holdfast.checkpoint import is_plain_dcp

    return checkpoint_step(path) is None or is_plain_dcp(path)


def _verify(path: Path, shown_as: Progress) -> "checkpoint_view.Row":
    def progress(done: int, total: int) -> None:
        shown_as(f"verifying {path.name}", done, total)

    if _is_taken_for_dcps(path):
        from holdfast.checkpoint import verify_plain_dcp

        return verify_plain_dcp(path, progress=progress)
    return verify_and_note(
        inspect_checkpoint(path),
        by=whoami(),
        now_s=SystemClock().now_s(),
        progress=progress,
    )
