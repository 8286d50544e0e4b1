"""Run the only queries that read whole tables; their results can be merged.

Each `NAME.sql` in this folder is one SELECT over `jobs` (or over `samples` and `devices`). Its
result is small for any size of input, and is called an aggregate. The column names define how two
results are merged:

- `n`, `n_…` and `sum_…` are added.
- `min_…` and `max_…` keep the smaller and the larger value.
- All other columns are keys.

A trace can therefore be divided anywhere (by file, by month, by day of one metric), aggregated by
many workers, and merged. The analyses read only aggregates.
"""

from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent


@cache
def names() -> tuple[str, ...]:
    """Return the names of all aggregates."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.sql")))


def sql(name: str) -> str:
    """Return the SELECT statement of an aggregate."""
    return (FOLDER / f"{name}.sql").read_text().strip().rstrip(";")


def merge_sql(columns: list[str], source: str) -> str:
    """Return SQL that merges partial results into one row per key.

    Args:
        columns: names of the columns of the results.
        source: SQL of the table with the rows of all results.
    """
    keys = [f'"{column}"' for column in columns if _merge(column) is None]
    measures = [
        f'{merge}("{column}") AS "{column}"' for column in columns if (merge := _merge(column))
    ]
    return f"SELECT {', '.join([*keys, *measures])} FROM {source} GROUP BY ALL"


def _merge(column: str) -> str | None:
    """Return the SQL function that merges a column, or None if the column is a key."""
    if column == "n" or column.startswith(("n_", "sum_")):
        return "sum"
    if column.startswith("min_"):
        return "min"
    return "max" if column.startswith("max_") else None
