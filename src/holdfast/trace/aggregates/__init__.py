"""Mergeable aggregates: the only queries that read whole tables.

Each `NAME.sql` of this folder is one SELECT over `jobs` (or `samples` and `devices`) with a small
result for any size of input. The column names define how two results merge: `n`, `n_…` and `sum_…`
add up, `min_…` and `max_…` keep the least and the greatest, and all others are keys. So a trace may
be divided anywhere (by file, month, metric-day), aggregated by many workers, and merged. The
analyses read only aggregates.
"""

from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent


@cache
def names() -> tuple[str, ...]:
    """Return the names of all aggregates."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.sql")))


def sql(name: str) -> str:
    """Read the SELECT of an aggregate."""
    return (FOLDER / f"{name}.sql").read_text().strip().rstrip(";")


def merge_sql(columns: list[str], source: str) -> str:
    """Make SQL that merges partial results: `columns` of `source`, one row per key."""
    keys = [f'"{column}"' for column in columns if _merge(column) is None]
    measures = [
        f'{merge}("{column}") AS "{column}"' for column in columns if (merge := _merge(column))
    ]
    return f"SELECT {', '.join([*keys, *measures])} FROM {source} GROUP BY ALL"


def _merge(column: str) -> str | None:
    """Return the SQL function that merges a measure; None for a key."""
    if column == "n" or column.startswith(("n_", "sum_")):
        return "sum"
    if column.startswith("min_"):
        return "min"
    return "max" if column.startswith("max_") else None
