"""Mergeable aggregates: the only queries that read whole tables.

Each `NAME.sql` of this folder is one SELECT over `jobs` (or `samples` and `devices`) whose result is small whatever
the size of its input. Its columns say how two results merge: `n`, `n_…` and `sum_…` add up, `min_…` and `max_…` take
the least and the greatest, and all others are keys. So a trace may be cut anywhere (by file, month, metric-day),
aggregated by many workers, and merged; the analyses read nothing else, and cannot tell.
"""

from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent


@cache
def names() -> tuple[str, ...]:
    """Every aggregate there is."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.sql")))


def sql(name: str) -> str:
    """The SELECT of an aggregate."""
    return (FOLDER / f"{name}.sql").read_text().strip().rstrip(";")


def merge_sql(columns: list[str], source: str) -> str:
    """SQL that merges partial results: `columns` of `source`, one row a key."""
    keys = [f'"{column}"' for column in columns if _merge(column) is None]
    measures = [
        f'{merge}("{column}") AS "{column}"' for column in columns if (merge := _merge(column))
    ]
    return f"SELECT {', '.join([*keys, *measures])} FROM {source} GROUP BY ALL"


def _merge(column: str) -> str | None:
    """How a measure merges; None: a key."""
    if column == "n" or column.startswith(("n_", "sum_")):
        return "sum"
    if column.startswith("min_"):
        return "min"
    return "max" if column.startswith("max_") else None
