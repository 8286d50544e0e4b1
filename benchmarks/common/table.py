"""Print the rows of a benchmark as a table, and write them as JSON."""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 160
"""Characters per line if standard output is no terminal."""


@dataclass(frozen=True)
class Must:
    """The condition on Holdfast's figure."""

    relation: Literal["=", "<=", ">="]
    value: float

    def holds(self, figure: float | None) -> bool:
        """Return whether a figure meets the condition; False for an unmeasured figure."""
        if figure is None:
            return False
        return {
            "=": figure == self.value,
            "<=": figure <= self.value,
            ">=": figure >= self.value,
        }[self.relation]

    def __str__(self) -> str:
        return f"{self.relation} {_number(self.value)}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measure. A missing figure is None, never NaN, which JSON lacks."""

    measure: str
    unit: str
    ours: float | None = None
    peer: float | None = None
    limit: float | None = None
    """The best that the machine permits, measured in the same run if possible."""
    must: Must | None = None

    def __post_init__(self) -> None:
        for name in ("ours", "peer", "limit"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ValueError(
                    f"{self.measure}: {name} is {value}; give None where there is no figure"
                )

    def within(self, part: str) -> Self:
        """Return the same row within a part of a benchmark."""
        return replace(self, measure=f"{part}: {self.measure}")

    @property
    def met(self) -> bool | None:
        """Return whether Holdfast's figure meets the must; None without a must."""
        return None if self.must is None else self.must.holds(self.ours)

    def to_json(self) -> dict[str, Any]:
        """Return the row in the form of `benchmarks/results/`."""
        return {
            "measure": self.measure,
            "ours": self.ours,
            "peer": self.peer,
            "limit": self.limit,
            "unit": self.unit,
            "must": None if self.must is None else str(self.must),
            "met": self.met,
        }


def parse_arguments(
    description: str,
    arguments: Sequence[str] | None = None,
    *,
    rounds: int | None = None,
    parts: Sequence[str] = (),
    counts: Mapping[str, str] | None = None,
) -> argparse.Namespace:
    """Parse the common options `quick`, `json`, `seed`, and those that apply here.

    `rounds` exists if a default is given, `only` if there are parts. `counts` are further options
    with a help text each: whole numbers from 1 on, None by default.
    """
    parser = argparse.ArgumentParser(description=description.partition("\n\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="a smoke test of less than a minute on two cores"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument(
        "--seed", type=int, default=0, help="of everything random (default: %(default)s)"
    )
    if rounds is not None:
        parser.add_argument(
            "--rounds", type=int, default=rounds, help="of each measurement (default: %(default)s)"
        )
    if parts:
        parser.add_argument(
            "--only",
            action="append",
            choices=parts,
            help="run this part; may be given several times",
        )
    for name, words in (counts or {}).items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=words)
    options = parser.parse_args(arguments)
    for name in counts or {}:
        if (given := getattr(options, name)) is not None and given < 1:
            parser.error(f"--{name} must be 1 or more, not {given}")
    if rounds is not None and options.rounds < 1:
        parser.error(f"--rounds must be 1 or more, not {options.rounds}")
    return options


def report(
    title: str, rows: Sequence[Row], *, notes: Sequence[str] = (), json_file: Path | None = None
) -> None:
    """Print the rows and the notes below them; write the rows to `json_file`."""
    columns = ("measure", "ours", "peer", "limit", "unit", "must", "met")
    lines = [
        (
            row.measure,
            *map(_number, (row.ours, row.peer, row.limit)),
            row.unit,
            row.must or "",
            _yes(row.met),
        )
        for row in rows
    ]
    print_table(title, columns, lines)
    for note in notes:
        console().print(f"• {note}", markup=False)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(
            json.dumps([row.to_json() for row in rows], indent=1, allow_nan=False) + "\n"
        )


def print_table(title: str, columns: Sequence[str], lines: Sequence[Sequence[object]]) -> None:
    """Print a table; the first column is text, the others are figures."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(
            column, justify="left" if number == 0 else "right", no_wrap=number > 0, overflow="fold"
        )
    for line in lines:
        table.add_row(
            *(Text(_number(cell) if isinstance(cell, float) else str(cell)) for cell in line)
        )
    console().print(table)


def console() -> Console:
    """Return a console on standard output, wide if it is no terminal."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def _number(value: float | None) -> str:
    """Format with three significant digits and no exponent."""
    if value is None:
        return ""
    if value == 0 or float(value).is_integer():
        return f"{value:.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def _yes(met: bool | None) -> str:
    return "" if met is None else "yes" if met else "NO"
