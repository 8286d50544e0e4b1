"""Print results, as one JSON object for programs or as tables for people."""

import json
import re
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import click

_LAST_SENTENCE = re.compile(r"(?s)(.*[.?!)])\s+((?:[A-Z`]|--).*?\S)$")
_PIECE = re.compile(r"[^\s/]*/|[^\s/]+|\s+")
"""Match a part of a text that must stay on one line: a word, or a path's part up to a `/`."""
_MIN_OF_LAST = 20
"""The least width at which words of the last column, such as log lines, may be cut in two."""
PIPE_WIDTH = 240
"""The number of characters in a line if standard output is no terminal."""


def print_json(schema: str, fields: dict[str, Any], *, version: int = 1) -> None:
    """Print one JSON object; the name and version of its schema come first.

    The schemas are in the folder `schemas` beside this module.
    """
    click.echo(json.dumps(_named(schema, fields, version), default=str))


def _named(schema: str, fields: dict[str, Any], version: int) -> dict[str, Any]:
    return {"schema": f"holdfast.{schema}", "version": version, **fields}


def print_error(message: str, next_step: str = "", *, as_json: bool) -> None:
    """Print an error: for people on standard error, for programs as an object on standard output.

    Args:
        message: one sentence on the error; it also contains the next step if `next_step` is empty.
        next_step: what the user can do next.
        as_json: True to print the object.
    """
    if as_json:
        print_json("error", error_object(message, next_step))
    else:
        click.echo(f"holdfast: {message} {next_step}".rstrip(), err=True)


def error_object(message: str, next_step: str = "") -> dict[str, Any]:
    """Return an error for programs: `{"error": {"message", "next_step"}}`.

    If `next_step` is empty, the last sentence of the message becomes the next step.
    """
    message = message.strip()
    if not next_step and (parted := _LAST_SENTENCE.match(message)):
        message, next_step = parted[1], parted[2]
    return {"error": {"message": message, "next_step": next_step}}


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table in which no id is split, so that ids can be copied.

    Long cells are folded between words, and paths after a `/`. Only in the last column may a long
    word be split. A table that is still too wide for the terminal is printed as one block for each
    row, with a line for each cell.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    edges = 2 + 3 * (len(columns) - 1)  # blanks: one at each end, three between columns
    widths = _widths(list(zip(columns, *cells, strict=True)), console.width - edges)
    if widths is None:
        _print_blocks(columns, cells)
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column, width in zip(columns, widths, strict=True):
        table.add_column(_folded(column, width), width=width, overflow="fold")
    for row in cells:
        # Text, not markup: a log line may hold brackets.
        folded = (_folded(cell, width) for cell, width in zip(row, widths, strict=True))
        table.add_row(*map(Text, folded))
    console.print(table)


def _widths(by_column: Sequence[Sequence[str]], room: int) -> list[int] | None:
    """Return widths of the columns with which they fit into `room`; None if there are none."""
    least = [max(map(_longest_piece, texts)) for texts in by_column]
    least[-1] = min(least[-1], _MIN_OF_LAST)
    widths = [max(map(_longest_line, texts)) for texts in by_column]
    if sum(least) > room:
        return None
    while sum(widths) > room:
        foldable = [place for place, width in enumerate(widths) if width > least[place]]
        widths[max(foldable, key=widths.__getitem__)] -= 1
    return widths


def _longest_piece(text: str) -> int:
    from rich.cells import cell_len

    return max((cell_len(piece.strip()) for piece in _PIECE.findall(text)), default=0)


def _longest_line(text: str) -> int:
    from rich.cells import cell_len

    return max(map(cell_len, text.splitlines()), default=0)


def _folded(text: str, width: int) -> str:
    """Break a text into lines of at most `width`, between its words."""
    from rich.cells import cell_len

    lines = []
    for line in text.splitlines():
        lines.append("")
        for piece in _PIECE.findall(line):
            if cell_len((lines[-1] + piece).rstrip()) <= width:
                lines[-1] += piece
            else:
                lines.append(piece.lstrip())
    return "\n".join(line.rstrip() for line in lines)


def _print_blocks(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a block for each row, with one line for each cell that is not empty.

    The line has the name of the column before the cell.
    """
    margin = max(map(len, columns))
    for row in rows:
        click.echo()
        for column, cell in zip(columns, row, strict=True):
            if cell:
                click.echo(f"{column:<{margin}}  {cell}")
    click.echo()


def near(path: str | Path) -> str:
    """Return a path for people, relative to the current folder if the path is inside the folder."""
    absolute = Path(path).absolute()
    return str(absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else path)


def when(at_s: float | None) -> str:
    """Format a Unix time in the local time zone."""
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
