"""Convert Slurm's records to rows of the jobs table.

The input is an SQL relation with the texts that sacct prints (`FIELDS`), one row per record,
without job steps. The output of `sacct --json` is converted to the same texts first. Each distinct
state, resource, node list and exit code is parsed once by `fields`, and then looked up for every
row. The database parses the times. Three million jobs therefore take only seconds.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from zoneinfo import ZoneInfo

from holdfast.trace.clusters import Cluster
from holdfast.trace.errors import BadTrace
from holdfast.trace.schema import JOB_COLUMNS
from holdfast.trace.sources.findings import MAX_EXAMPLES, Findings
from holdfast.trace.sources.reading import Reading, drops_bad_rows
from holdfast.trace.sources.rows import literal, read_rows
from holdfast.trace.sources.slurm.fields import (
    LAST_UNIX_S,
    NEVER,
    NO_NODES,
    elapsed_s,
    exit_code_of,
    failure_reason,
    is_known,
    nodes_of,
    resources_of,
    state_of,
    zone_of,
)
from holdfast.trace.sources.slurm.gres import tres_of_gres, with_gres

if TYPE_CHECKING:
    import duckdb

SOURCE_NAME: Final = "slurm"
FIELDS: Final = (
    "cluster", "job_id", "shown_id", "restarts", "name", "username", "pool", "state", "reason", "exit_code", "submit",
    "start", "end", "elapsed", "allocated", "requested", "nodes", "allocated_gres", "requested_gres", "node_count",
)  # fmt: skip
"""Names of a record's texts, which are NULL or empty if missing.

`job_id` is JobIDRaw if the file has it. `shown_id` is the id that Slurm shows to people: `123_4`
for a task of an array, `123+1` for a part of a heterogeneous job. The last three texts are of Slurm
up to 20.11, where resources may be missing from TRES and present in GRES.
"""
READERS: Final[Mapping[str, Callable[[str], object]]] = {
    "exit_code": exit_code_of,
    "elapsed": elapsed_s,
    "allocated": resources_of,
    "requested": resources_of,
    "nodes": nodes_of,
    "allocated_gres": tres_of_gres,
    "requested_gres": tres_of_gres,
}
"""For each of these texts, the function that parses it, called once for each distinct value.

The functions raise ValueError.
"""

SENTENCES: Final = {
    "unreadable-row": ("dropped", "Records that could not be read are left out."),
    "slurm-steps": (
        "dropped",
        "Records of job steps are parts of jobs and were not counted as jobs.",
    ),
    "slurm-never-started": (
        "mended",
        (
            "Jobs that ended before they got a node have, in Slurm, the time of their end as their "
            "start; they have none."
        ),
    ),
    "slurm-pending-arrays": (
        "kept",
        "A record of an array's waiting tasks was counted as one job, however many.",
    ),
    "slurm-heterogeneous": (
        "kept",
        "Components of heterogeneous jobs were each counted as a job, as Slurm does.",
    ),
    "slurm-gpu-shares": (
        "kept",
        (
            "Jobs hold shards or MPS shares of GPUs; how many make one GPU is not recorded, so they "
            "count as no GPU."
        ),
    ),
    "slurm-unknown-state": (
        "kept",
        "States that Slurm's manual does not have were read as UNKNOWN.",
    ),
    "slurm-eligible-as-start": (
        "mended",
        (
            "This Slurm gives the time a job became eligible as its start; the start was taken from "
            "end and elapsed time."
        ),
    ),
    "slurm-exit-code-lost": (
        "mended",
        (
            "This Slurm prints 0 as the exit code of every job that no signal ended; those of failed "
            "jobs are left empty."
        ),
    ),
    "slurm-no-zone": (
        "kept",
        (
            "Times have no zone and were read as UTC. Name the zone, or export with "
            "SLURM_TIME_FORMAT=%s."
        ),
    ),
    "slurm-recorded-twice": (
        "dropped",
        "A job's record was there more than once; the latest one was kept.",
    ),
    "slurm-requeued": ("kept", "Jobs ran more than once under their id; each run is an attempt."),
    "slurm-resized": (
        "mended",
        (
            "Jobs changed their size while they ran; each is one job, with as many GPUs as it held on "
            "average."
        ),
    ),
}
_FAILED: Final = ("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
_NOTHING: Final = ", ".join(literal(text) for text in sorted({*NEVER, *NO_NODES, "0"}))
"""Texts that mean no value, in at least one of the fields."""
_SEEN: Final = {
    "slurm-never-started": "never_started",
    "slurm-pending-arrays": "contains(odd_id, '_[')",
    "slurm-heterogeneous": "contains(odd_id, '+')",
    "slurm-gpu-shares": "has_shares",
    "slurm-unknown-state": "odd_state IS NOT NULL",
    "slurm-no-zone": "is_local",
}
"""For each check, an SQL condition on the table, valid while it has the working columns."""
_WORKING: Final = (
    "odd_id",
    "odd_state",
    "never_started",
    "has_shares",
    "is_local",
    "is_bad",
    "is_resized",
)


def write_jobs(
    connection: "duckdb.DuckDBPyConnection",
    path: Path,
    table: str,
    source: str,
    *,
    present: frozenset[str],
    zone: tzinfo | None,
    findings: Findings,
    faults: Callable[[], Iterator[BadTrace]],
) -> Reading:
    """Create the table of jobs, one row per record.

    Args:
        connection: the database.
        path: the file.
        table: name of the new table; its columns depend on `present`.
        source: SQL of a relation with the texts `FIELDS`; it is read twice.
        present: names of the `FIELDS` that the file has.
        zone: time zone of times without an offset; None means UTC, and adds a note.
        findings: the problems counted so far.
        faults: a function that reads the file again, slowly, and yields an error for each record
            with an unreadable field.

    Raises:
        BadTrace: there is no job, or a record cannot be read; the error comes from `faults`.
    """
    source = with_gres(connection, f"{table}_gres", source, present)
    lookups = [f"{table}_gres", *_look_up(connection, table, source)]
    try:
        connection.execute(
            f"CREATE OR REPLACE TABLE {table} AS {_jobs_sql(table, source, present, zone or UTC)}"
        )
    finally:
        for name in lookups:
            connection.execute(f"DROP TABLE IF EXISTS {name}")
    _refuse(connection, path, table, findings, faults)
    clusters = connection.execute(
        f"SELECT cluster, epoch(min(submit_at)) FROM {table} GROUP BY cluster ORDER BY cluster"
    ).fetchall()
    if not clusters:
        raise BadTrace(path, "The file holds no job.", next_step="Give one with at least one job.")
    _count(connection, table, findings, has_zone=zone is not None)
    _join_resized(connection, table, findings)
    settle_records(connection, table, findings)
    for name in (*_WORKING, *_absent(present)):
        connection.execute(f"ALTER TABLE {table} DROP COLUMN {name}")
    known = [
        Cluster(name=name, source=SOURCE_NAME, utc_offset_h=_utc_offset_h(zone, at_s))
        for name, at_s in clusters
    ]
    return Reading.of(connection, table, *known, notes=findings.notes(known[0].name, SENTENCES))


def configured_zone(connection: "duckdb.DuckDBPyConnection") -> tzinfo | None:
    """Return the zone for times without an offset, from the database's variable `zone`.

    Return None if the variable is not set.

    Raises:
        BadUse: the variable is not a time zone.
    """
    row = connection.execute("SELECT getvariable('zone')").fetchone()
    return zone_of(str(row[0])) if row and row[0] else None


def settle_records(connection: "duckdb.DuckDBPyConnection", table: str, findings: Findings) -> None:
    """Drop records that describe the same run twice, and number the runs of a job.

    - Of several records with the same submission and start, the latest is kept.
    - A record of a waiting job is dropped if another record of the same submission has started.
      Exports of adjacent periods may contain both.
    - Slurm submits a requeued job again under its id, so the runs of a job are numbered by
      submission time in `attempt`.

    Args:
        connection: the database.
        table: a table with `cluster`, `job_id`, `attempt`, `submit_at`, `start_at` and `end_at`.
        findings: receives the number of dropped records and of repeated runs.
    """
    several = f"SELECT cluster, job_id FROM {table} GROUP BY cluster, job_id HAVING count(*) > 1"
    repeated = connection.execute(
        f"DELETE FROM {table} USING (SELECT rowid AS id, row_number() OVER"
        " (PARTITION BY cluster, job_id, submit_at, start_at ORDER BY end_at DESC NULLS LAST, "
        "rowid DESC) AS place,"
        " start_at IS NULL AND max(start_at) OVER (PARTITION BY cluster, job_id, submit_at) IS NOT "
        "NULL AS waited"
        f" FROM {table} WHERE (cluster, job_id) IN ({several})) AS again"
        f" WHERE {table}.rowid = again.id AND (place > 1 OR waited) RETURNING {table}.job_id"
    ).fetchall()
    again = connection.execute(
        f"UPDATE {table} SET attempt = greatest(attempt, place) FROM (SELECT rowid AS id, "
        "row_number() OVER"
        " (PARTITION BY cluster, job_id ORDER BY submit_at, start_at NULLS LAST) - 1 AS place"
        f" FROM {table} WHERE (cluster, job_id) IN ({several})) AS numbered"
        f" WHERE {table}.rowid = numbered.id AND place > 0 RETURNING {table}.job_id"
    ).fetchall()
    for check, rows in (("slurm-recorded-twice", repeated), ("slurm-requeued", again)):
        for (job_id,) in rows:
            findings.add(check, job_id)


def _join_resized(connection: "duckdb.DuckDBPyConnection", table: str, findings: Findings) -> None:
    """Join the records of a job that was resized while it ran.

    Slurm ends one record with RESIZING and starts the next record. The job starts with the first
    record and ends with the last, which gives its state. Its number of GPUs is its GPU time divided
    by its run time, so that no GPU hour is lost or counted twice.
    """
    run = "PARTITION BY cluster, job_id, submit_at"
    once = (
        f"SELECT rowid, *, bool_or(is_resized) OVER ({run}) AS of_resized FROM {table} QUALIFY "
        "row_number() OVER"
        " (PARTITION BY cluster, job_id, submit_at, start_at ORDER BY end_at DESC NULLS LAST, "
        "rowid DESC) = 1"
    )
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE resized AS SELECT rowid AS place, row_number() OVER"
        f" ({run} ORDER BY start_at DESC NULLS LAST, rowid DESC) = 1 AS is_last, min(start_at) "
        f"OVER ({run}) AS began,"
        f" sum(gpu_num * run_s) OVER ({run}) / nullif(sum(run_s) OVER ({run}), 0) AS held,"
        f" sum(reported_duration_s) OVER ({run}) AS reported FROM ({once}) WHERE of_resized"
    )
    ids = connection.execute(
        f"UPDATE {table} SET start_at = began, run_s = epoch(end_at - began), queue_s = "
        "epoch(began - submit_at),"
        " gpu_num = coalesce(held, gpu_num), reported_duration_s = reported FROM resized"
        f" WHERE {table}.rowid = place AND is_last RETURNING job_id"
    ).fetchall()
    connection.execute(
        f"DELETE FROM {table} USING resized WHERE {table}.rowid = place AND NOT is_last"
    )
    connection.execute("DROP TABLE resized")
    for (job_id,) in sorted(ids):
        findings.add("slurm-resized", job_id)


def _look_up(connection: "duckdb.DuckDBPyConnection", table: str, source: str) -> list[str]:
    """Create tables that map each distinct text to its meaning."""
    fields = ("state", "reason", "exit_code", "elapsed", "allocated", "requested", "nodes")
    distinct = ", ".join(f"list(DISTINCT {name})" for name in fields)
    texts = connection.execute(f"SELECT {distinct} FROM {source}").fetchall()[0]
    states, reasons, exit_codes, elapsed, allocated, requested, nodes = (
        [text for text in column or () if text] for column in texts
    )

    def make(name: str, columns: Mapping[str, str], rows: Iterable[Sequence[Any]]) -> str:
        read_rows(connection, f"{table}_{name}", {"text": "VARCHAR", **columns}, rows)
        return f"{table}_{name}"

    kinds = {
        name: JOB_COLUMNS[name]
        for name in ("gpu_num", "gpu_model", "cpu_num", "mem_gb", "node_num")
    }
    resources = ((text, _read(resources_of, text)) for text in {*allocated, *requested})
    return [
        make(
            "states",
            {"state": "VARCHAR", "reason": "VARCHAR", "is_known": "BOOLEAN"},
            ((text, *state_of(text), is_known(text)) for text in states),
        ),
        make("reasons", {"reason": "VARCHAR"}, ((text, failure_reason(text)) for text in reasons)),
        make(
            "exit_codes",
            {"exit_code": "INTEGER"},
            ((text, _read(exit_code_of, text)) for text in exit_codes),
        ),
        make(
            "elapsed", {"elapsed_s": "DOUBLE"}, ((text, _read(elapsed_s, text)) for text in elapsed)
        ),
        make("nodes", {"nodes": "VARCHAR[]"}, ((text, _read(nodes_of, text)) for text in nodes)),
        make(
            "resources",
            {**kinds, "has_shares": "BOOLEAN"},
            (
                (text, *(getattr(read, name) for name in (*kinds, "has_shares")))
                for text, read in resources
                if read
            ),
        ),
    ]


def _read(reader: Callable[[str], Any], text: str) -> Any:
    try:
        return reader(text)
    except ValueError:
        return None  # `_jobs_sql` marks the row as bad, since the text has no value.


def _jobs_sql(table: str, source: str, present: frozenset[str], zone: tzinfo) -> str:
    """Return SQL of the jobs with the working columns; it uses the tables of `_look_up`."""
    never = _never_started_sql(present)
    held = ", ".join(
        f"CASE WHEN got.text IS NULL THEN asked.{name} ELSE got.{name} END AS {name}"
        for name in ("gpu_model", "cpu_num", "mem_gb", "node_num")
    )
    unread = " OR ".join(
        f"({text} IS NOT NULL AND {text} NOT IN ({_NOTHING}) AND {value} IS NULL)"
        for text, value in {
            "submit": "submit_at", "start": "start_raw", '"end"': "end_at", "elapsed": "spent.elapsed_s",
            "allocated": "got.text", "requested": "asked.text", "t.nodes": "held.nodes",
            "t.exit_code": "code.exit_code",
        }.items()
    )  # fmt: skip
    texts = ", ".join(f"nullif({name}, '') AS {name}" for name in FIELDS if name != "end")
    # If the file has both times, a missing one means that the job did not start or did not end.
    elapsed = "NULL" if {"start", "end"} <= present else "spent.elapsed_s"
    failed = ", ".join(literal(state) for state in _FAILED)
    return f"""
    WITH texts AS (SELECT {texts}, nullif("end", '') AS "end" FROM {source}),
    submitted AS (SELECT *, {_time_sql("submit", zone)} AS submit_at FROM texts),
    started AS (SELECT *, {_time_sql("start", zone, after="submit_at")} AS start_raw FROM submitted),
    ended AS (SELECT *, {_time_sql('"end"', zone, after="start_raw")} AS end_at FROM started),
    t AS (SELECT *, coalesce({never}, false) AS never_started,
          CASE WHEN never_started THEN NULL ELSE start_raw END AS start_at FROM ended)
    SELECT
        cluster, job_id, coalesce(try_cast(restarts AS INTEGER), 0) AS attempt,
        rtrim(coalesce(name, ''), chr(10)) AS name,
        username, pool, coalesce(stands.state, 'UNKNOWN') AS state,
        CASE WHEN stands.state IN ({failed}) THEN coalesce(stands.reason, why.reason) END AS reason,
        code.exit_code, submit_at, start_at, end_at,
        coalesce(epoch(end_at - start_at), CASE WHEN stands.state NOT IN ('RUNNING', 'PENDING') THEN {elapsed} END)
            AS run_s,
        epoch(start_at - submit_at) AS queue_s,
        CASE WHEN NOT never_started THEN spent.elapsed_s END AS reported_duration_s,
        coalesce(CASE WHEN got.text IS NULL THEN asked.gpu_num ELSE got.gpu_num END, 0) AS gpu_num, {held}, held.nodes,
        '' AS zone_offset,
        CASE WHEN contains(shown_id, '_[') OR contains(shown_id, '+') THEN shown_id END AS odd_id,
        CASE WHEN NOT coalesce(stands.is_known, false) THEN coalesce(t.state, '') END AS odd_state, never_started,
        coalesce(CASE WHEN got.text IS NULL THEN asked.has_shares ELSE got.has_shares END, false) AS has_shares,
        coalesce({_is_local("submit")}, false) AS is_local,
        coalesce(starts_with(t.state, 'RESIZING'), false) AS is_resized,
        {unread} OR (restarts IS NOT NULL AND try_cast(restarts AS INTEGER) IS NULL) AS is_bad
    FROM t
    LEFT JOIN {table}_states AS stands ON stands.text = t.state
    LEFT JOIN {table}_reasons AS why ON why.text = t.reason
    LEFT JOIN {table}_exit_codes AS code ON code.text = t.exit_code
    LEFT JOIN {table}_elapsed AS spent ON spent.text = t.elapsed
    LEFT JOIN {table}_nodes AS held ON held.text = t.nodes
    LEFT JOIN {table}_resources AS got ON got.text = t.allocated
    LEFT JOIN {table}_resources AS asked ON asked.text = t.requested"""


def _never_started_sql(present: frozenset[str]) -> str:
    """Return an SQL condition for jobs that ended before they got a node.

    Slurm sets the start of such a job to its end. The allocation or the nodes in the record show
    that nothing was allocated. Without these fields, a cancelled job with no duration is assumed to
    have waited only.
    """
    none = ", ".join(literal(text) for text in sorted(NO_NODES))
    if "allocated" in present:
        nothing = "allocated IS NULL"
    elif "nodes" in present:
        nothing = f"coalesce(nodes, '') IN ({none})"
    else:
        nothing = "starts_with(state, 'CANCELLED')"
    # Without a column of ends, a job that took no time counts as ended when it started.
    at_once = "start_raw IS NOT NULL AND elapsed IN ('0', '00:00:00')"
    ended = "start_raw = end_at" if "end" in present else at_once
    return f"{nothing} AND {ended}"


def _is_local(text: str) -> str:
    """Return an SQL condition for a time that has no offset and is not a Unix time."""
    return f"(contains({text}, 'T') AND NOT {_has_offset(text)})"


def _has_offset(text: str) -> str:
    return f"regexp_matches({text}[11:], 'Z$|[+-]')"


def _time_sql(text: str, zone: tzinfo, *, after: str | None = None) -> str:
    """Return SQL that converts a time to UTC; NULL for an invalid time, or one that is not set yet.

    Args:
        text: the column with the time as text.
        zone: time zone of times without an offset.
        after: an earlier time of the same job. When clocks are set back, an hour occurs twice. A
            time in this hour is read as the second occurrence if the first would be before `after`.
    """
    local = f"try_cast({text} AS TIMESTAMP)"
    if isinstance(zone, ZoneInfo):
        name, hour = literal(zone.key), "INTERVAL 1 HOUR"
        passage = f"timezone('UTC', timezone({name}, {local}))"
        same = f"timezone({name}, timezone('UTC', {passage} {{}} {hour})) = {local}"
        first = f"CASE WHEN {same.format('-')} THEN {passage} - {hour} ELSE {passage} END"
        second = f"CASE WHEN {same.format('+')} THEN {passage} + {hour} ELSE {passage} END"
        at = f"CASE WHEN {first} < {after} THEN {second} ELSE {first} END" if after else first
    else:
        offset = zone.utcoffset(None) or timedelta()
        at = f"{local} - to_seconds({offset.total_seconds():.0f})"
    return (
        f"CASE WHEN try_cast({text} AS BIGINT) BETWEEN 0 AND {LAST_UNIX_S}"
        f" THEN make_timestamp(nullif({text}::BIGINT, 0) * 1000000)"
        f" WHEN {_has_offset(text)} THEN timezone('UTC', try_cast({text} AS TIMESTAMPTZ)) ELSE "
        f"{at} END"
    )


def _refuse(
    connection: "duckdb.DuckDBPyConnection",
    path: Path,
    table: str,
    findings: Findings,
    faults: Callable[[], Iterator[BadTrace]],
) -> None:
    """Raise the error for the first unreadable record.

    If `load` was called to drop unreadable rows, drop and count all of them instead.
    """
    count = connection.execute(f"SELECT count(*) FROM {table} WHERE is_bad").fetchall()[0][0]
    if not count:
        return
    found = [fault for fault, _ in zip(faults(), range(MAX_EXAMPLES), strict=False)]
    if not found:  # The database reads fewer forms of times than Python does.
        raise BadTrace(
            path,
            f"{count} records have a field that cannot be read.",
            next_step="Look at their times.",
        )
    if not drops_bad_rows(connection):
        connection.execute(f"DROP TABLE {table}")
        raise found[0]
    connection.execute(f"DELETE FROM {table} WHERE is_bad")
    findings.add("unreadable-row", *(str(fault) for fault in found), rows=count)


def _count(
    connection: "duckdb.DuckDBPyConnection", table: str, findings: Findings, *, has_zone: bool
) -> None:
    """Count the rows that meet each condition in `_SEEN`, with a few examples."""
    seen = {
        check: condition
        for check, condition in _SEEN.items()
        if not (has_zone and check == "slurm-no-zone")
    }
    counts = ", ".join(
        f"count(*) FILTER ({condition}),"
        f" min({'odd_state' if check == 'slurm-unknown-state' else 'coalesce(odd_id, job_id)'}, "
        f"{MAX_EXAMPLES})"
        f" FILTER ({condition})"
        for check, condition in seen.items()
    )
    row = connection.execute(f"SELECT {counts} FROM {table}").fetchall()[0]
    for check, count, examples in zip(seen, row[::2], row[1::2], strict=True):
        if count:
            findings.add(check, *examples, rows=count)


def _absent(present: frozenset[str]) -> list[str]:
    """Return the columns of the jobs table for which the file has no field."""
    needs = {
        "name": {"name"}, "username": {"username"}, "pool": {"pool"}, "exit_code": {"exit_code"}, "nodes": {"nodes"},
        "reported_duration_s": {"elapsed"},
    }  # fmt: skip
    needs |= {
        name: {"allocated", "requested", "allocated_gres", "requested_gres"}
        for name in ("gpu_num", "gpu_model", "cpu_num", "mem_gb", "node_num")
    }
    all_of = {
        "submit_at": {"submit"}, "start_at": {"start"}, "end_at": {"end"},
        "queue_s": {"submit", "start"},
    }  # fmt: skip
    absent = [name for name, fields in needs.items() if present.isdisjoint(fields)]
    if "elapsed" not in present and not {"start", "end"} <= present:
        absent.append("run_s")
    return absent + [name for name, fields in all_of.items() if not fields <= present]


def _utc_offset_h(zone: tzinfo | None, at_s: float | None) -> float:
    offset = datetime.fromtimestamp(at_s or 0.0, zone or UTC).utcoffset()
    return offset.total_seconds() / 3600 if offset is not None else 0.0
