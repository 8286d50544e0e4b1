"""Provide `holdfast runs --watch`: the console's page Now, live in a terminal.

If standard output is a pipe, the changes are printed as plain lines.
"""

import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.output import when
from holdfast.core import words
from holdfast.core.errors import LedgerError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

REFRESH_S = 2.0
NEEDS_SHOWN = 8
COLUMNS = (
    "run", "state", "step", "loss", "s/step", "tokens/s", "last step", "attempts", "incidents", "healthy step",
)  # fmt: skip
BAD_STATES = ("lost", "failed")

ReadPage = Callable[[], dict[str, Any]]
"""A function that returns the content of the page Now, or raises `LedgerError`."""


def watch_runs(read: ReadPage, *, wait: Callable[[float], None] = time.sleep) -> None:
    """Show the page Now until Ctrl-C.

    If the ledger cannot be read, the error is shown and the ledger is read again.

    Args:
        read: returns the content of the page.
        wait: waits for a number of seconds, and raises `KeyboardInterrupt` on Ctrl-C.
    """
    try:
        if sys.stdout.isatty():
            _show_live(read, wait)
        else:
            _print_changes(read, wait)
    except KeyboardInterrupt:
        return  # the usual end


def _show_live(read: ReadPage, wait: Callable[[float], None]) -> None:
    from rich.console import Console
    from rich.live import Live

    console, page = Console(), dict[str, Any]()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            trouble = ""
            try:
                page = read()
            except LedgerError as error:
                trouble = str(error)
            live.update(_screen(page, time.time(), trouble), refresh=True)
            wait(REFRESH_S)


def _print_changes(read: ReadPage, wait: Callable[[float], None]) -> None:
    shown: dict[str, str] = {}
    while True:
        try:
            page = read()
        except LedgerError as error:
            click.echo(str(error), err=True)
            wait(REFRESH_S)
            continue
        now_s = time.time()
        lines = {row["run_id"]: _line(row) for row in _rows(page)}
        lines |= {f"needs {said}": said for said in _needs(page)}
        for key, line in lines.items():
            if shown.get(key) != line:
                click.echo(f"{when(now_s)}  {line}")
        sys.stdout.flush()
        shown = lines
        wait(REFRESH_S)


def _rows(page: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [*page.get("active", ()), *page.get("recent", ())]


def _needs(page: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each thing that a person must do."""
    said = [
        f"{one['run_id']} waits for an approval: {one['text']} holdfast runs approve {one['run_id']}"
        for one in page.get("proposals", ())
    ]
    said += [
        f"{one['run_id']} has lost its supervisor; continue with: holdfast run --resume {one['run_id']}"
        for one in page.get("lost", ())
    ]
    said += [
        f"Node {one['name']} is cordoned by {one['cordoned_by']}: {one['why']}"
        for one in page.get("cordoned", ())
    ]
    return [" ".join(words.clean(one).split()) for one in said]


def _cells(row: Mapping[str, Any], now_s: float) -> list[str]:
    age = "" if row["step_at_s"] is None else words.duration(max(0.0, now_s - row["step_at_s"]))
    figures = [row["step"], row["loss"], row["step_s"], row["tokens_per_s"]]
    counts = [row["attempts"], row["incidents"], row["healthy_step"]]
    cells = [row["run_id"], row["state"], *map(_figure, figures), age, *map(_figure, counts)]
    return [words.clean(str(cell)) for cell in cells]


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and abs(value) < 1000:
        return f"{value:.4g}"
    return f"{value:,.0f}"


def _line(row: Mapping[str, Any]) -> str:
    """Return a run as one line, without the age of its last step, which would change each time."""
    run_id, state, *cells = _cells({**row, "step_at_s": None}, 0.0)
    named = zip(COLUMNS[2:], cells, strict=True)
    return "  ".join([run_id, state, *(f"{name} {cell}" for name, cell in named if cell)])


def _screen(page: Mapping[str, Any], now_s: float, trouble: str) -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    needs = _needs(page)
    lines = [Text(trouble, style="bold red")] if trouble else []
    # Text, not markup: a name or a reason may hold brackets.
    lines += [Text(f"! {one}", style="bold") for one in needs[:NEEDS_SHOWN]]
    if len(needs) > NEEDS_SHOWN:
        lines.append(Text(f"! and {len(needs) - NEEDS_SHOWN} more: holdfast ui"))
    evaluating = len(page.get("evaluating", ()))
    foot = f"{when(now_s)}, {words.plainly(evaluating, 'evaluation')} under way. Ctrl-C ends."
    if not _rows(page):
        return Group(
            *lines, Text("No runs yet. Start one: holdfast run -- python train.py"), Text(foot)
        )
    return Group(*lines, _table(page, now_s), Text(foot))


def _table(page: Mapping[str, Any], now_s: float) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("run", "state") else "right")
    for row in _rows(page):
        style = "bold red" if row["state"] in BAD_STATES else ""
        table.add_row(*(Text(cell, style=style) for cell in _cells(row, now_s)))
    return table
