"""Print results: one JSON object for programs, tables for people."""

import json
import re
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import click

_LAST_SENTENCE = re.compile(r"(?s)(.*[.?!)])\s+([A-Z].*?\S)$")
PIPE_WIDTH = 240
"""Characters per line if standard output is no terminal."""


def print_json(schema: str, fields: dict[str, Any], *, version: int = 1) -> None:
    """Print one object, with the name and version of its schema first."""
    click.echo(
        json.dumps({"schema": f"holdfast.{schema}", "version": version, **fields}, default=str)
    )


def error_object(error: Exception, next_step: str = "") -> dict[str, Any]:
    """Return an error for programs: `{"error": {"message", "next_step"}}`.

    The next step is the last sentence of the message unless it is given.
    """
    message = str(error).strip()
    if not next_step and (parted := _LAST_SENTENCE.match(message)):
        message, next_step = parted[1], parted[2]
    return {"error": {"message": message, "next_step": next_step}}


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print columns as wide as their cells, so that ids can be copied; the last column may wrap."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column is not columns[-1])
    for row in rows:
        # Text, not markup: a log line may hold brackets.
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table)


def when(at_s: float | None) -> str:
    """Format a time in the local time zone."""
    return (
        ""
        if at_s is None
        else datetime.fromtimestamp(at_s).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    )


def seconds(value_s: float | None) -> str:
    """Format a duration with its unit."""
    if value_s is None:
        return ""
    if value_s < 1:
        return f"{value_s * 1000:.0f} ms"
    if value_s < 120:
        return f"{value_s:.1f} s"
    minutes, rest_s = divmod(round(value_s), 60)
    return (
        f"{minutes // 60} h {minutes % 60:02d} min"
        if minutes >= 60
        else f"{minutes} min {rest_s:02d} s"
    )
