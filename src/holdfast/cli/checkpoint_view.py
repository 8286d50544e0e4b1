"""Print the results of `holdfast checkpoint`."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.checkpoint import Annotations, CheckpointInfo
from holdfast.cli.output import near, print_json, print_table, when
from holdfast.core.clock import SystemClock
from holdfast.core.words import plainly

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.checkpoint import (
        CheckpointComparison,
        CheckpointInventory,
        EntryDifference,
        OpenedCheckpoint,
        PlainDcpInfo,
        PruneResult,
    )

    Row = CheckpointInfo | PlainDcpInfo


def mib(size_bytes: int) -> str:
    """Format a size in mebibytes for a table."""
    return f"{size_bytes / 2**20:.1f}"


def marks_in_words(marks: Annotations) -> str:
    """Return the marks of a checkpoint as text, the most important first."""
    phrases = []
    if marks.damaged is not None:
        phrases.append("found damaged")
    if marks.pinned is not None:
        phrases.append("pinned" + (f" ({marks.pinned.why})" if marks.pinned.why else ""))
    phrases += ["healthy"] * (marks.healthy is not None) + ["verified"] * (
        marks.verified is not None
    )
    phrases += [f"wanted by {holder}" for holder in marks.wanted_by(SystemClock().now_s())]
    phrases += [f"{name}={value:g}" for name, value in sorted(marks.metrics.items())]
    if marks.unreadable is not None:
        phrases.append(marks.unreadable)
    return ", ".join(phrases)


def print_checkpoints(folder: Path, found: "Sequence[Row]", *, as_json: bool) -> None:
    """Print one row per checkpoint."""
    if as_json:
        print_json("checkpoints", {"checkpoints": [_row(one) for one in found]})
        return
    if not found:
        click.echo(f"No checkpoints in {folder}.")
        return
    rows: list[tuple[Any, ...]] = [
        (
            o.step,
            o.state,
            _line(o),
            mib(o.size_bytes),
            when(o.created_at_s),
            near(o.path),
            marks_in_words(o.marks),
            o.reason,
        )
        for o in found
    ]
    columns = ["step", "state", "line", "MiB", "saved", "path", "marks", ""]
    if not any(map(_line, found)):  # no checkpoint belongs to an abandoned line
        place = columns.index("line")
        columns, rows = (
            columns[:place] + columns[place + 1 :],
            [row[:place] + row[place + 1 :] for row in rows],
        )
    print_table(columns, rows)


def print_contents(
    opened: "OpenedCheckpoint",
    inventory: "CheckpointInventory",
    info: CheckpointInfo | None,
    *,
    with_tensors: bool,
    as_json: bool,
) -> None:
    """Print the content of one checkpoint."""
    manifest = opened.manifest
    if as_json:
        nobody = {
            "step": None,
            "path": str(opened.path),
            "state": None,
            "created_at_s": None,
            "reason": None,
        }
        fields = {
            **({**nobody, "marks": {}} if info is None else _row(info)),
            "size_bytes": sum(opened.files.values()),
            "world_size": None if manifest is None else manifest.world_size,
            "torch": None if manifest is None else manifest.torch,
            "files": [
                {"path": name, "size_bytes": size} for name, size in sorted(opened.files.items())
            ],
            **asdict(inventory),
        }
        print_json("checkpoint-contents", fields)
        return
    if info is None:
        click.echo(
            f"{opened.path}: without a manifest, as PyTorch Distributed Checkpoint writes them"
        )
    else:
        click.echo(f"{opened.path}: {info.state}" + (f" ({info.reason})" if info.reason else ""))
        if manifest is not None:
            ranks = plainly(manifest.world_size, "rank")
            click.echo(
                f"step {manifest.step}, {when(manifest.created_at_s)}, {ranks}, torch {manifest.torch}"
            )
        click.echo(f"marks: {marks_in_words(info.marks) or 'none'}")
    print_table(["file", "MiB"], [(name, mib(size)) for name, size in sorted(opened.files.items())])
    print_table(
        ["entry", "tensors", "plain values", "MiB"],
        [
            (one.entry, one.tensors, one.plain_values, mib(one.size_bytes))
            for one in inventory.entries
        ],
    )
    if with_tensors:
        print_table(
            ["tensor", "type", "shape", "MiB", "file"],
            [
                (t.name, t.dtype, list(t.shape), mib(t.size_bytes), ", ".join(t.files))
                for t in inventory.tensors
            ],
        )


def print_comparison(a: Path, b: Path, compared: "CheckpointComparison", *, as_json: bool) -> None:
    """Print the differences between two checkpoints."""
    if as_json:
        different = [
            {**asdict(one), "max_abs_difference": _finite(one.max_abs_difference)}
            for one in compared.different
        ]
        fields = {
            "a": str(a),
            "b": str(b),
            "is_same": compared.is_same,
            **asdict(compared),
            "different": different,
        }
        print_json("checkpoint-diff", fields)
        return
    for where, names in ((a, compared.only_in_a), (b, compared.only_in_b)):
        for name in names:
            click.echo(f"only in {where}: {name}")
    if compared.different:
        print_table(
            ["different", "", ""],
            [(one.name, _forms(one), _gap(one)) for one in compared.different],
        )
    click.echo(f"{plainly(compared.same, 'value')} the same, {len(compared.different)} different.")


def print_pin(path: Path, *, pinned: bool, as_json: bool) -> None:
    """Print whether a checkpoint is now pinned."""
    if as_json:
        print_json("pin", {"path": str(path), "pinned": pinned})
        return
    click.echo(
        f"Pinned {path}: nothing deletes it." if pinned else f"{path} is not pinned any more."
    )


def print_pruned(folder: Path, pruned: "PruneResult", *, dry_run: bool, as_json: bool) -> None:
    """Print the checkpoints that are deleted, and why each of the others stays."""
    going = [verdict.info for verdict in pruned.verdicts if not verdict.stays]
    if as_json:
        rows = [
            {
                "step": verdict.info.step,
                "path": str(verdict.info.path),
                "size_bytes": verdict.info.size_bytes,
                "stays": bool(verdict.stays),
                "why": list(verdict.stays) or [verdict.goes],
            }
            for verdict in pruned.verdicts
        ]
        fields = {
            "folder": str(folder),
            "dry_run": dry_run,
            "deleted": [str(path) for path in pruned.deleted],
        }
        fields["failed"] = [str(path) for path in pruned.failed]
        print_json("prune", {**fields, "freed_bytes": pruned.freed_bytes, "checkpoints": rows})
        return
    if not pruned.verdicts:
        click.echo(f"No checkpoints in {folder}.")
        return
    print_table(
        ["step", "", "MiB", "path", "why"],
        [
            (
                verdict.info.step,
                "stays" if verdict.stays else "goes",
                mib(verdict.info.size_bytes),
                near(verdict.info.path),
                "; ".join(verdict.stays) or verdict.goes,
            )
            for verdict in pruned.verdicts
        ],
    )
    size = f"{mib(sum(info.size_bytes for info in going))} MiB"
    if dry_run:
        click.echo(
            f"Nothing was deleted. Without --dry-run, {plainly(len(going), 'checkpoint')} would go ({size})."
        )
    else:
        click.echo(f"Deleted {plainly(len(pruned.deleted), 'checkpoint')}, {size}.")
    if pruned.failed:
        click.echo(
            f"{plainly(len(pruned.failed), 'checkpoint')} could not be deleted. See why it stays.",
            err=True,
        )


def _line(one: "Row") -> str:
    return "abandoned" if isinstance(one, CheckpointInfo) and one.abandoned else ""


def _row(one: "Row") -> dict[str, Any]:
    return {
        "step": one.step,
        "path": str(one.path),
        "state": one.state,
        "size_bytes": one.size_bytes,
        "created_at_s": one.created_at_s,
        "reason": one.reason,
        "abandoned": bool(_line(one)),
        "marks": one.marks.as_dict(),
    }


def _forms(one: "EntryDifference") -> str:
    return one.a if one.a == one.b else f"{one.a} and {one.b}"


def _gap(one: "EntryDifference") -> str:
    if one.differing is None:
        return ""
    gap = "" if one.max_abs_difference is None else f", by at most {one.max_abs_difference:g}"
    return f"{one.differing:,} of {one.elements:,} elements{gap}"


def _finite(value: float | None) -> float | str | None:
    return str(value) if value is not None and not math.isfinite(value) else value
