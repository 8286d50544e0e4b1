"""A table as the page shows it: bounded, rounded, numbers to the right."""

import math
from dataclasses import dataclass
from datetime import UTC, datetime

from holdfast.core import words
from holdfast.trace.table import Table

ROWS_LIMIT = 24
"""Rows shown of a figure's table; its CSV has all."""
ALONE_ROWS_LIMIT = 60
"""The same of a table that no figure goes with."""
MOMENTS = frozenset({"at_s", "day_start_s"})
"""Columns that hold Unix times."""
_UPRIGHT_ROWS, _WIDE_COLUMNS = 6, 8


@dataclass(frozen=True)
class TableView:
    """Cells of a table, as text."""

    head: list[str]
    numeric: list[bool]
    """Whether each column holds numbers."""
    rows: list[list[str]]
    more: int
    """Rows that are not shown."""


def table_view(table: Table, *, alone: bool) -> TableView:
    """The first rows of a table; one of few rows and many columns lies on its side."""
    limit = ALONE_ROWS_LIMIT if alone else ROWS_LIMIT
    names = list(table.columns)
    first = Table({name: column[:limit] for name, column in table.columns.items()})
    shown = [moment if name in MOMENTS else cell for name in names]
    rows = [[show(value) for show, value in zip(shown, row, strict=True)] for row in first.rows()]
    if alone and len(rows) <= _UPRIGHT_ROWS and len(names) > _WIDE_COLUMNS:
        return TableView(
            [names[0], *(row[0] for row in rows)],
            [False] + [True] * len(rows),
            _turned(names, rows),
            0,
        )
    numeric = [column.dtype.kind in "fiu" for column in table.columns.values()]
    return TableView(names, numeric, rows, max(len(table) - limit, 0))


def _turned(names: list[str], rows: list[list[str]]) -> list[list[str]]:
    return [[name, *(row[number] for row in rows)] for number, name in enumerate(names) if number]


def moment(value: object) -> str:
    """A Unix time, s, as a date and an hour, UTC."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return cell(value)
    return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M")


def cell(value: object) -> str:
    """A value in a cell: four figures of a number, nothing where it is missing."""
    if value is None or value != value:  # noqa: PLR0124 - NaN and NaT differ from themselves
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return number(float(value))
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M")
    return words.clean(str(value))


def number(value: float) -> str:
    """Four figures; whole numbers whole, with thousands apart; powers of ten where they are far from 1."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "\N{MINUS SIGN}∞" if value < 0 else "unknown"
    if value == int(value) and abs(value) < 1e15:
        text = f"{int(value):,}"
    elif abs(value) >= 1000:
        text = f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.4g}"
    else:
        text = f"{value:.4g}"
    return text.replace("-", "\N{MINUS SIGN}")
