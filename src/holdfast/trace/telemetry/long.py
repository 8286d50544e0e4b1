"""Read long telemetry, with one row per sample: any Parquet file, and AcmeTrace's IPMI files (CSV).

Columns are found by their usual names, or named by the caller. A device has a column of its own, or
is given by the labels of dcgm-exporter (`Hostname` or `instance`, and `gpu`).
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from holdfast.core.errors import BadUse
from holdfast.core.words import plainly
from holdfast.trace.errors import BadTrace
from holdfast.trace.notes import Note
from holdfast.trace.sources.reading import csv_header, read_rows
from holdfast.trace.telemetry.checks import empty_note, unit_sentence
from holdfast.trace.telemetry.inputs import SERVER_POWER, Given
from holdfast.trace.telemetry.metrics import (
    FP64_BLANK,
    INT32_BLANK,
    INT64_BLANK,
    RATIO,
    Metric,
    device_named,
    metric_named,
)
from holdfast.trace.telemetry.recorded import form_of, remark_of, samples_of
from holdfast.trace.telemetry.summary import Summary, insert, quoted, summary_of_rows

if TYPE_CHECKING:
    import duckdb

NAMES: Final = {
    "at": ("at", "time", "timestamp", "ts", "datetime", "date"),
    "value": ("value", "val"),
    "metric": ("metric", "__name__", "name_of_metric", "metric_name"),
    "device": (
        "device",
        "device_name",
        "series",
        "uuid",
        "node",
        "host",
        "hostname",
        "instance",
        "name",
    ),
    "node": ("hostname", "node", "host", "instance"),
    "gpu": ("gpu", "gpu_index", "gpu_id"),
}
"""Usual names of each column in lower case, the most likely name first."""


@dataclass(frozen=True, kw_only=True)
class LongSource:
    """The rows of one metric, as SQL.

    `select` returns the columns at (TIMESTAMP, UTC), name (of the device) and value (DOUBLE, as
    written in the file).
    """

    path: Path
    metric: Metric
    factor: float | None
    select: str
    remark: str = ""
    """A note for the report about how times were read; empty if there is none."""


def open_long(
    connection: "duckdb.DuckDBPyConnection", given: Given, columns: Mapping[str, str] | None = None
) -> list[LongSource]:
    """Return the metrics in a long Parquet file, an IPMI file, or recorded tool output.

    Args:
        connection: the database with which to read the file.
        given: the file, and its metric if the file's name or the user gives one.
        columns: names of the file's columns, by the keys of `NAMES`.

    Raises:
        BadUse: no metric is given, neither by the user nor by a column nor by the file's name.
        BadTrace: a column is missing or has the wrong type.
    """
    if given.form == "ipmi":
        return [_ipmi(connection, given)]
    if given.form == "recorded":
        return _recorded(connection, given)
    import duckdb

    source = f"read_parquet({quoted(str(given.path))})"
    try:
        described = connection.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()
    except duckdb.Error as error:
        raise BadTrace(
            given.path, f"cannot be read ({error}).", next_step="Check that it is Parquet."
        ) from error
    types = {row[0]: row[1] for row in described}
    roles = _roles(given.path, tuple(types), dict(columns or {}))
    device = f'"{roles["device"]}"::VARCHAR'
    if "gpu" in roles and roles["device"] != roles["gpu"] and "node" in roles:
        device = f"""concat("{roles["node"]}", '-', "{roles["gpu"]}")"""
    at = _time_sql(given.path, roles["at"], types[roles["at"]])
    base = (
        f'SELECT {at} AS "at", {device} AS name, "{roles["value"]}"::DOUBLE AS value FROM {source}'
    )
    if given.metric is not None:
        return [LongSource(path=given.path, metric=given.metric, factor=given.factor, select=base)]
    if "metric" not in roles:
        if not (by_name := metric_named(given.path.stem)):
            raise BadUse(
                f"{given.path}: it has no column of metrics, and its name is not a metric. "
                "Name it after the metric that it holds, such as GPU_UTIL.parquet."
            )
        return [LongSource(path=given.path, metric=by_name[0], factor=by_name[1], select=base)]
    of_metric = f'"{roles["metric"]}"'
    found = []
    for (name,) in connection.execute(
        f"SELECT DISTINCT {of_metric} FROM {source} ORDER BY ALL"
    ).fetchall():
        if name is not None and (named := metric_named(str(name))):
            select = f"{base} WHERE {of_metric} = {quoted(str(name))}"
            found.append(
                LongSource(path=given.path, metric=named[0], factor=named[1], select=select)
            )
    if not found:
        raise BadUse(
            f"{given.path}: none of its metrics is known. `holdfast trace formats` lists those that are."
        )
    return found


def factor_of(connection: "duckdb.DuckDBPyConnection", source: LongSource) -> float:
    """Return the factor from the file's unit to the metric's, by the rules of `found_factor`."""
    if source.factor is None and source.metric.may_be_ratio:
        fractional = (
            "SELECT count(*) FILTER (value > 1) = 0 AND count(*) FILTER (value <> round(value)) > 0"
            f" FROM ({source.select})"
        )
        return RATIO if connection.execute(fractional).fetchall()[0][0] else 1.0
    if source.factor is not None or source.metric.coarse is None:
        return source.factor or 1.0
    most, factor = source.metric.coarse
    finer = f"SELECT count(*) > 0 FROM ({source.select}) WHERE value > {most} AND value <= {source.metric.high}"
    return 1.0 if connection.execute(finer).fetchall()[0][0] else factor


def kept_sql(source: LongSource, factor: float) -> str:
    """Return a SELECT of the valid samples: at, name and value (FLOAT, in the metric's unit)."""
    metric = source.metric
    return (
        f'SELECT "at", name, (value * {factor})::FLOAT AS value FROM ({source.select}) WHERE "at" IS NOT NULL '
        f"AND name IS NOT NULL AND NOT ({_sentinel_sql()}) AND (value * {factor})::FLOAT "
        f"BETWEEN {metric.low} AND {metric.high}"
    )


def summary_of_long(
    connection: "duckdb.DuckDBPyConnection", source: LongSource, cluster: str
) -> tuple[Summary, str]:
    """Compute the aggregates of a metric.

    Returns:
        The summary, and a SELECT of the rows that were used: at, device and value.
    """
    factor = factor_of(connection, source)
    kept = kept_sql(source, factor)
    notes = _notes_of_values(connection, source, factor, cluster)
    names = [
        name
        for (name,) in connection.execute(
            f"SELECT DISTINCT name FROM ({kept}) ORDER BY name"
        ).fetchall()
    ]
    devices = [device_named(name, source.metric) for name in names]
    # The name is unique: a view still reads these rows when another file of the metric is read.
    table = f"names_of_{source.metric.name.lower()}_{secrets.token_hex(4)}"
    connection.execute(f"CREATE TABLE {table} (name VARCHAR, device INTEGER)")
    columns = {
        "name": np.array(names, dtype=object),
        "device": np.arange(len(names), dtype=np.int32),
    }
    insert(connection, table, columns, {})
    rows = f'SELECT "at", device, value FROM ({kept}) JOIN {table} USING (name)'
    duplicates, gaps = steps_of(connection, rows, source.path.name, cluster)
    if duplicates:
        rows = f'SELECT "at", device, max(value) AS value FROM ({rows}) GROUP BY "at", device'
    return summary_of_rows(
        connection, source.metric, rows, devices, [*notes, *duplicates, *gaps]
    ), rows


def steps_of(
    connection: "duckdb.DuckDBPyConnection", rows: str, file: str, cluster: str
) -> tuple[list[Note], list[Note]]:
    """Return notes about repeated times and gaps, from the times between a device's samples."""
    steps = connection.execute(
        f'SELECT device, step_us, count(*) AS n FROM (SELECT device, epoch_us("at") - '
        f'lag(epoch_us("at")) OVER (PARTITION BY device ORDER BY "at") AS step_us FROM ({rows})) '
        "WHERE step_us IS NOT NULL GROUP BY ALL"
    ).fetchnumpy()
    step_us, n = (
        np.asarray(steps["step_us"], dtype=np.int64),
        np.asarray(steps["n"], dtype=np.int64),
    )
    moves = step_us > 0
    if not moves.any():
        return [], []
    distinct, where = np.unique(step_us[moves], return_inverse=True)
    interval_us = distinct[np.bincount(where, weights=n[moves]).argmax()]
    duplicates, gaps = int(n[~moves].sum()), step_us > 2 * interval_us
    repeated, silent = [], []
    if duplicates:
        sentence = f"{file}: {plainly(duplicates, 'sample')} repeated a device's time; one of each was kept."
        repeated = [
            Note(
                cluster=cluster,
                check="telemetry-duplicate-time",
                sentence=sentence,
                rows=duplicates,
                action="dropped",
            )
        ]
    if gaps.any():
        count, hours = int(n[gaps].sum()), float(((step_us - interval_us) * n)[gaps].sum()) / 3.6e9
        found = plainly(count, "gap")
        sentence = f"{file}: {found} of more than two sampling intervals, {hours:,.1f} device hours in all."
        silent = [
            Note(
                cluster=cluster, check="telemetry-gap", sentence=sentence, rows=count, action="kept"
            )
        ]
    return repeated, silent


def _notes_of_values(
    connection: "duckdb.DuckDBPyConnection", source: LongSource, factor: float, cluster: str
) -> list[Note]:
    metric, file = source.metric, source.path.name
    rows, sentinels, out = connection.execute(
        f"SELECT count(*), count(*) FILTER (sentinel), count(*) FILTER (NOT sentinel AND "
        f"NOT (value * {factor})::FLOAT BETWEEN {metric.low} AND {metric.high}) "
        f"FROM (SELECT *, {_sentinel_sql()} AS sentinel FROM ({source.select}) "
        f"WHERE value IS NOT NULL AND NOT isnan(value))"
    ).fetchall()[0]
    if not rows:
        return [empty_note(f"{file}, {metric.name}", cluster)]  # the file may hold other metrics
    between = f"{metric.low:g} to {metric.high:g} {metric.unit}"
    found = [
        (
            "telemetry-sentinel",
            sentinels,
            "dropped",
            f"{plainly(sentinels, 'sample')} held DCGM's marker for no value.",
        ),
        (
            "telemetry-out-of-range",
            out,
            "dropped",
            f"{plainly(out, 'sample')} of {metric.name} lay outside {between}.",
        ),
    ]
    if source.remark:
        found.append(("telemetry-times", rows, "mended", source.remark))
    if factor != 1 and source.factor is None:
        found.append(("telemetry-unit", rows - sentinels - out, "mended", unit_sentence(metric)))
    return [
        Note(
            cluster=cluster, check=check, sentence=f"{file}: {sentence}", rows=count, action=action
        )
        for check, count, action, sentence in found
        if count
    ]


def _sentinel_sql() -> str:
    return (
        f"value >= {INT32_BLANK} AND value < {INT32_BLANK + 16} OR value >= {FP64_BLANK:.0f} AND "
        f"value < {FP64_BLANK + 16:.0f} OR value >= {float(INT64_BLANK)!r}"
    )


def _roles(path: Path, present: tuple[str, ...], mapped: dict[str, str]) -> dict[str, str]:
    by_lower = {name.lower(): name for name in reversed(present)}
    roles = {
        role: by_lower[name]
        for role, names in NAMES.items()
        for name in reversed(names)
        if name in by_lower
    }
    for role, name in mapped.items():
        if role not in NAMES or name not in present:
            raise BadUse(
                f"{path}: no column {name!r} for {role!r}. Its columns: {', '.join(present)}."
            )
    roles |= mapped
    for role in ("at", "value", "device"):
        if role not in roles:
            expected = ", ".join(NAMES[role])
            raise BadTrace(
                path, f"no column looks like the {role} of a sample; expected one of {expected}.",
                next_step="Rename that column, or from Python name it with columns=.",
            )  # fmt: skip
    return roles


def _time_sql(path: Path, column: str, kind: str) -> str:
    if kind == "TIMESTAMP WITH TIME ZONE":
        return f"timezone('UTC', \"{column}\")"
    if kind.startswith("TIMESTAMP"):
        return f'"{column}"::TIMESTAMP'
    if kind in ("BIGINT", "INTEGER", "UBIGINT", "UINTEGER", "DOUBLE", "FLOAT"):
        # Seconds, or milliseconds as in Prometheus' own files.
        seconds = f'CASE WHEN "{column}" > 1e11 THEN "{column}" / 1000.0 ELSE "{column}" END'
        return f"make_timestamp((({seconds}) * 1e6)::BIGINT)"
    if kind == "VARCHAR":
        return f"timezone('UTC', \"{column}\"::TIMESTAMPTZ)"
    next_step = "Write it as a timestamp, or from Python name another column with columns=."
    raise BadTrace(
        path, f"is of type {kind}, which is not a time.", column=column, next_step=next_step
    )


def _recorded(connection: "duckdb.DuckDBPyConnection", given: Given) -> list[LongSource]:
    """Return the metrics in the output of a tool.

    If the output does not name its metrics, the metric of the file is used.
    """
    form = form_of(given.path)
    assert form is not None, "telemetry_in has checked the form"
    table = f"recorded_{secrets.token_hex(4)}"
    kinds = {"at": "TIMESTAMP", "name": "VARCHAR", "metric": "VARCHAR", "value": "DOUBLE"}
    read_rows(connection, table, kinds, samples_of(given.path, form))
    found = []
    for (name,) in connection.execute(
        f"SELECT DISTINCT metric FROM {table} ORDER BY ALL"
    ).fetchall():
        named = metric_named(name) if name else (given.metric, given.factor)
        if named is None or named[0] is None:
            continue
        select = f'SELECT "at", name, value FROM {table} WHERE metric = {quoted(name)}'
        found.append(
            LongSource(
                path=given.path,
                metric=named[0],
                factor=named[1],
                select=select,
                remark=remark_of(form),
            )
        )
    if not found:
        raise BadUse(
            f"{given.path}: it names no metric that is known. Name the file after the metric that it holds, such as "
            "GPU_UTIL.csv; `holdfast trace formats` lists the metrics."
        )
    return found


def _ipmi(connection: "duckdb.DuckDBPyConnection", given: Given) -> LongSource:
    """Read AcmeTrace's ipmi/*.csv, which has one row per reading.

    Only readings of the power of whole servers are kept.
    """
    assert given.metric is not None
    names = csv_header(given.path)
    time = next((name for name in names if name.lower() in NAMES["at"]), None)
    if time is None:
        raise BadTrace(
            given.path, "no column `Time`.", line=1, next_step="Give the file with its first line."
        )
    node = next((name for name in names if name.lower() in NAMES["device"]), None)
    types = ", ".join(f"{quoted(name)}: 'VARCHAR'" for name in names)
    source = (
        f"read_csv({quoted(str(given.path))}, auto_detect = false, header = true, delim = ',', quote = '\"', "
        f"columns = {{{types}}})"
    )
    wrong = connection.execute(
        f'SELECT line, "{time}", power FROM (SELECT row_number() OVER () + 1 AS line, "{time}", '
        f'"{SERVER_POWER}" AS power FROM {source}) WHERE try_cast("{time}" AS TIMESTAMPTZ) IS NULL '
        f"OR (power IS NOT NULL AND try_cast(power AS DOUBLE) IS NULL) ORDER BY line LIMIT 1"
    ).fetchall()
    if wrong:
        line, stamp, power = wrong[0]
        raise BadTrace(
            given.path, f"{stamp!r} is no time, or {power!r} no number.", line=line, column=SERVER_POWER,
            next_step="Correct or delete that line.",
        )  # fmt: skip
    name = f'"{node}"' if node else quoted(given.path.stem)
    select = (
        f'SELECT timezone(\'UTC\', "{time}"::TIMESTAMPTZ) AS "at", {name} AS name, '
        f'"{SERVER_POWER}"::DOUBLE AS value FROM {source}'
    )
    return LongSource(path=given.path, metric=given.metric, factor=1.0, select=select)
