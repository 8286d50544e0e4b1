"""Read any CSV or Parquet file by a column map, a TOML file that assigns its columns.

    [columns]                          # columns of the jobs table, and where they come from
    job_id    = "JobID"                # a column, unchanged
    username  = "owner"
    gpu_num   = {column = "gpus", scale = 0.01}                            # a number times scale
    submit_at = {column = "submitted", zone = "Asia/Shanghai"}             # ISO 8601; zone for times without offset
    start_at  = {column = "started", format = "%d.%m.%Y %H:%M", zone = "Europe/Berlin"}
    end_at    = {column = "ended_ms", unit = "ms"}                         # a number of s, ms, us or ns since …
    end_at    = {column = "ended", unit = "s", origin = "2023-05-17T11:30:13Z"}   # … the Unix epoch, or origin
    nodes     = {column = "hosts", separator = ";"}                        # a list of names; "," by default

    [states]                           # the file's words for states; the schema's own need no entry
    Done = "COMPLETED"

    [types]                            # the file's words for workload types; the schema's own need no entry
    Pretraining = "Pretrain"

    [cluster]                          # all optional
    name = "Borealis"                  # as a column: cluster = "partition" under [columns]
    nodes = 32
    gpus_per_node = 8                  # or gpus = 250, where nodes differ
    gpu_model = "H100-SXM-80GB"
    gpu_tdp_w = 700
    gpu_memory_mib = 81559
    utc_offset_h = 1                   # hours from UTC to the users' local time
    duration_counts_queue = false      # true: reported_duration_s begins at submission
    time_resolution_s = 1              # resolution of its times, s
    citation = ""

    [file]
    delimiter = ","                    # of CSV

`[columns]` may name any of `schema.JOB_COLUMNS`. Missing run_s and queue_s are computed from the
times, and a missing time from the others if possible. Expressions are not possible: prepare such
columns first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.core.errors import BadUse
from holdfast.trace.errors import BadTrace
from holdfast.trace.schema import JOB_COLUMNS
from holdfast.trace.sources.csv.column_map import UNIT_S, ColumnMap, Mapped, read_column_map
from holdfast.trace.sources.csv.sql import Columns, Time, utc_sql
from holdfast.trace.sources.csv.text import read_csv
from holdfast.trace.sources.plain_text import csv_header
from holdfast.trace.sources.reading import Reading, Source
from holdfast.trace.sources.sql import literal, openable, quoted, state_sql, type_sql

if TYPE_CHECKING:
    import duckdb

    from holdfast.trace.notes import Note

CSV_SUFFIXES: Final = frozenset({".csv", ".tsv", ".txt"})


def mapped_source(path: Path) -> Source:
    """Return the adapter that a column map describes.

    Raises:
        BadUse: the map is not valid; the message has the place, the value and the allowed
            values.
    """
    column_map = read_column_map(path)
    return Source(
        name="map",
        title=f"as {path.name} describes it",
        recognises=_recognises,
        read=partial(_read, column_map),
    )


def _recognises(path: Path) -> bool:
    suffix = path.with_suffix("").suffix if path.suffix in {".gz", ".zst"} else path.suffix
    return suffix in CSV_SUFFIXES or path.suffix == ".parquet"


def _read(
    column_map: ColumnMap, connection: "duckdb.DuckDBPyConnection", path: Path, table: str
) -> Reading:
    notes: tuple[Note, ...] = ()
    if path.suffix == ".parquet":
        with openable(connection, path) as file:
            _read_parquet(column_map, connection, path, f"read_parquet({literal(file)})", table)
    else:
        header = csv_header(path, column_map.delimiter)
        _check_columns(column_map, path, header)
        columns = _csv_columns(column_map, header)
        read = read_csv(
            connection,
            path,
            columns=columns,
            select=f"SELECT {_select(column_map)}, zone_offset FROM source",
            table=table,
            delimiter=column_map.delimiter,
        )
        notes = read.notes(column_map.cluster.name)
    clusters = [column_map.cluster]
    if "cluster" in column_map.columns:
        names = connection.execute(f"SELECT DISTINCT cluster FROM {table} ORDER BY ALL").fetchall()
        clusters = [replace(column_map.cluster, name=name) for (name,) in names]
        notes = tuple(replace(note, cluster=clusters[0].name) for note in notes)
    return Reading.of(connection, table, *clusters, notes=notes)


def _check_columns(column_map: ColumnMap, path: Path, present: Sequence[str]) -> None:
    for name, mapped in column_map.columns.items():
        if mapped.column not in present:
            raise BadTrace(
                path,
                f"The column map takes {name} from a column {mapped.column!r}, which is not there.",
                next_step=f"Correct the map; the file has {', '.join(present)}.",
            )


def _csv_columns(column_map: ColumnMap, header: Sequence[str]) -> Columns:
    """Return the type to read each column of the file as, depending on its use.

    Unused columns are read as text.
    """
    columns: dict[str, str | Time] = dict.fromkeys(header, "VARCHAR")
    used: dict[str, str] = {}
    for name, mapped in column_map.columns.items():
        kind = JOB_COLUMNS[name]
        if kind in {"DOUBLE", "INTEGER"} or mapped.unit:
            wanted: str | Time = "DOUBLE"
        elif kind == "TIMESTAMP":
            wanted = Time(zone=mapped.zone, format=mapped.format)
        else:
            wanted = "VARCHAR"
        if mapped.column in used and columns[mapped.column] != wanted:
            raise BadUse(
                f"The column map takes {used[mapped.column]} and {name} from {mapped.column!r}, "
                "one as a "
                f"{_named(columns[mapped.column])} and one as a {_named(wanted)}. Take one of them "
                "from another column."
            )
        used[mapped.column] = name
        columns[mapped.column] = wanted
    return columns


def _named(kind: str | Time) -> str:
    return "time" if isinstance(kind, Time) else {"DOUBLE": "number"}.get(kind, "text")


def _select(column_map: ColumnMap) -> str:
    """Return SQL that computes the job columns from the file's columns."""
    cells = {name: _cell(column_map, name, mapped) for name, mapped in column_map.columns.items()}
    return ", ".join(f"{cell} AS {name}" for name, cell in _derived(cells, column_map).items())


def _cell(column_map: ColumnMap, name: str, mapped: Mapped) -> str:
    cell = quoted(mapped.column)
    match JOB_COLUMNS[name]:
        case "TIMESTAMP" if mapped.unit:
            return (
                f"make_timestamp((({cell} * {UNIT_S[mapped.unit]} + {mapped.origin_s}) * "
                "1e6)::BIGINT)"
            )
        case "VARCHAR[]":
            separator = literal(mapped.separator)
            return f"list_transform(string_split({cell}, {separator}), lambda name: trim(name))"
        case "INTEGER" | "DOUBLE" as kind:
            return f"({cell} * {mapped.scale})::{kind}" if mapped.scale != 1 else f"{cell}::{kind}"
        case "VARCHAR" if name == "state":
            return state_sql(f"{cell}::VARCHAR", column_map.states)
        case "VARCHAR" if name == "type":
            return type_sql(f"{cell}::VARCHAR", column_map.types)
        case kind:
            return f"{cell}::{kind}"


def _derived(cells: Mapping[str, str], column_map: ColumnMap) -> dict[str, str]:
    """Return the cells that the map defines, and cells that can be derived from them."""
    derived = dict(cells)
    derived.setdefault("cluster", literal(column_map.cluster.name))
    submit, start, end = (cells.get(name) for name in ("submit_at", "start_at", "end_at"))
    if not start and submit and "queue_s" in cells:
        derived["start_at"] = start = f"{submit} + to_seconds({cells['queue_s']})"
    if not end and start and "run_s" in cells:
        derived["end_at"] = f"{start} + to_seconds({cells['run_s']})"
    if start and end:
        derived.setdefault("run_s", f"epoch({end} - {start})")
    if submit and start:
        derived.setdefault("queue_s", f"epoch({start} - {submit})")
    return derived


def _read_parquet(
    column_map: ColumnMap,
    connection: "duckdb.DuckDBPyConnection",
    path: Path,
    file: str,
    table: str,
) -> None:
    import duckdb

    try:
        kinds = {row[0]: row[1] for row in connection.execute(f"DESCRIBE FROM {file}").fetchall()}
        _check_columns(column_map, path, tuple(kinds))
        cells = {
            quoted(mapped.column): cell
            for name, mapped in column_map.columns.items()
            if (cell := _parquet_cell(JOB_COLUMNS[name], mapped, kinds[mapped.column]))
        }
        replaced = ", ".join(f"{cell} AS {name}" for name, cell in cells.items())
        source = f"SELECT * REPLACE ({replaced}) FROM {file}" if cells else f"FROM {file}"
        connection.execute(
            f"CREATE OR REPLACE TABLE {table} AS WITH source AS ({source}) SELECT "
            f"{_select(column_map)} FROM source"
        )
    except duckdb.Error as error:
        sentence = str(error).partition("\n")[0].rstrip(".")
        raise BadTrace(
            path, f"It cannot be read: {sentence}.", next_step="Correct the file or its column map."
        ) from error
    if not connection.execute(f"SELECT count(*) FROM {table}").fetchall()[0][0]:
        raise BadTrace(path, "It holds no job.", next_step="Give a file with at least one row.")


def _parquet_cell(wanted: str, mapped: Mapped, kind: str) -> str:
    """Return SQL that converts a Parquet column to the form that a CSV column has.

    A time becomes a UTC TIMESTAMP, and a list of names becomes a text. '' means that the column
    stays unchanged.
    """
    cell = quoted(mapped.column)
    if wanted == "VARCHAR[]":
        return (
            f"array_to_string({cell}, {literal(mapped.separator)})" if kind.endswith("[]") else ""
        )
    if wanted != "TIMESTAMP" or mapped.unit:
        return ""
    if kind == "TIMESTAMP WITH TIME ZONE":
        return f"timezone('UTC', {cell})"
    if kind.startswith(("TIMESTAMP", "DATE")):
        return f"timezone('UTC', timezone({literal(mapped.zone)}, {cell}::TIMESTAMP))"
    return utc_sql(cell, Time(zone=mapped.zone, format=mapped.format))
