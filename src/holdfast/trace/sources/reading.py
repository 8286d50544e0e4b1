"""What an adapter makes of its source, and the one way to read CSV: an explicit schema and located errors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.trace.clusters import Cluster

if TYPE_CHECKING:
    import duckdb


@dataclass(frozen=True, kw_only=True)
class Note:
    """Something found, dropped or mended while reading or checking, with its count."""

    cluster: str
    check: str
    """Which check or rule, a slug: `duplicate-job-id`."""
    sentence: str
    """What was found, for a person."""
    rows: int
    """How many rows it concerns."""
    action: str
    """`kept`, `dropped` or `mended`."""
    examples: tuple[str, ...] = ()
    """A few job ids or places."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A source read: a table of jobs in the database, and what is known beside it."""

    table: str
    """Name of the table; its columns are some of `schema.JOB_COLUMNS`."""
    columns: frozenset[str]
    clusters: tuple[Cluster, ...]
    notes: tuple[Note, ...] = field(default=())


@dataclass(frozen=True, kw_only=True)
class Source:
    """An adapter: one published or site's form of job records."""

    name: str
    """As `--format` takes it."""
    title: str
    recognises: Callable[[Path], bool]
    """Whether a path is of this form, by its name and its first few kB; never raises, never reads more."""
    read: Callable[["duckdb.DuckDBPyConnection", Path, str], Reading]
    """`read(connection, path, table)` makes the table. Raises BadTrace."""


def head(path: Path, size_bytes: int = 65536) -> str:
    """The first bytes of a file as text; empty where it is a folder or cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(size_bytes).decode("utf-8", errors="replace")
    except OSError:
        return ""


def csv_header(path: Path) -> tuple[str, ...]:
    """The names in the first line of a CSV file; empty where there is none."""
    line = head(path).partition("\n")[0].strip().lstrip("\ufeff")
    return tuple(name.strip().strip('"') for name in line.split(",")) if line else ()


def read_csv(
    connection: "duckdb.DuckDBPyConnection",
    path: Path,
    *,
    columns: Mapping[str, str],
    select: str,
    table: str,
    delimiter: str = ",",
) -> None:
    """Create `table` as `select` over the CSV file, which the SELECT names `source`.

    Args:
        connection: the database; its `TimeZone` is UTC, so that a TIMESTAMPTZ column is right whatever its offset.
        path: the file; its header must name exactly `columns`, in any order.
        columns: name and DuckDB type of each column of the file.
        select: `SELECT … FROM source`.
        table: name of the table made.
        delimiter: between fields.

    Raises:
        BadTrace: with the line, the column and what was expected.
    """
    raise NotImplementedError  # written by the owner of the sources
