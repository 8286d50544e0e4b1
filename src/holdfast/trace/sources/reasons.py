"""Reasons of failures that are recorded beside the jobs: a CSV of job ids, joined to a reading.

Columns `job_id` and `reason`, and `attempt` (0, 1 …) where one attempt of a job is meant; others are not read. A reason
is one of the study's Table 3 or a site's own word. What `holdfast diagnose` or a person said of a failed job comes
into a trace this way; so do the causes that a twin has.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.trace.errors import BadTrace
from holdfast.trace.schema import OUTCOMES
from holdfast.trace.sources.csv_sql import Columns
from holdfast.trace.sources.csv_text import read_csv
from holdfast.trace.sources.reading import Note, Reading, csv_header
from holdfast.trace.sources.sql import literal

if TYPE_CHECKING:
    import duckdb

NEEDED: Final[Columns] = {"job_id": "VARCHAR", "reason": "VARCHAR"}
_KINDS: Final[Columns] = {**NEEDED, "attempt": "INTEGER"}
_FAILED: Final = ", ".join(literal(state) for state, outcome in OUTCOMES.items() if outcome == "failed")
_NAMED: Final = "reasons_named"
_MOST_EXAMPLES: Final = 3


def join_reasons(connection: "duckdb.DuckDBPyConnection", reading: Reading, path: Path) -> Reading:
    """The reading with the reasons of a CSV file: the column `reason` of its table, added where there was none.

    A reason of the file goes before one that the job had. A row without an attempt is of every attempt of its job that
    failed. Jobs that did not fail keep what they had: why a job failed says nothing of one that did not. Of several
    rows of the same job and attempt the first counts. Notes say how many failures were given a reason, and how many
    rows name jobs that are not there, did not fail, or had a row already.

    Raises:
        BadTrace: the file has not the columns, or cannot be read; says where. The reading is then as it was.
    """
    header = csv_header(path)
    if missing := [name for name in NEEDED if name not in header]:
        problem = f"Expected the columns job_id and reason; it has no {' and no '.join(missing)}."
        raise BadTrace(path, problem, line=1, next_step="Write a CSV file with a header, such as job_id,reason.")
    columns = {name: _KINDS.get(name, "VARCHAR") for name in header}
    attempt = "attempt" if "attempt" in columns else "NULL::INTEGER AS attempt"
    select = f"SELECT job_id, {attempt}, reason FROM source WHERE job_id IS NOT NULL AND reason IS NOT NULL"
    read = read_csv(connection, path, columns=columns, select=select, table=_NAMED)
    try:
        connection.execute(
            f"CREATE OR REPLACE TABLE {_NAMED} AS SELECT job_id, attempt, first(reason ORDER BY rowid) AS reason, "
            f"count(*) AS n FROM {_NAMED} GROUP BY job_id, attempt"
        )
        notes = (*read.notes(reading.clusters[0].name), *_joined(connection, reading, path))
    finally:
        connection.execute(f"DROP TABLE {_NAMED}")
    return replace(
        reading,
        columns=reading.columns | {"reason"},
        notes=reading.notes + notes,
        lacking={cluster: lacking - {"reason"} for cluster, lacking in reading.lacking.items()},
    )


def _joined(connection: "duckdb.DuckDBPyConnection", reading: Reading, path: Path) -> tuple[Note, ...]:
    if "reason" not in reading.columns:
        connection.execute(f"ALTER TABLE {reading.table} ADD COLUMN reason VARCHAR")
    own = "coalesce(jobs.attempt, 0)" if "attempt" in reading.columns else "0"
    same = f"jobs.job_id = named.job_id AND {own} = coalesce(named.attempt, {own})"
    failed = f"jobs.state IN ({_FAILED})" if "state" in reading.columns else "true"
    # One attempt's own row goes before a row of all attempts, so it is written after it.
    given = 0
    for which in ("IS NULL", "IS NOT NULL"):
        given += connection.execute(
            f"UPDATE {reading.table} AS jobs SET reason = named.reason FROM {_NAMED} AS named "
            f"WHERE {same} AND {failed} AND named.attempt {which}"
        ).fetchall()[0][0]
    found = f"SELECT named.*, bool_or({failed}) AS failed FROM {_NAMED} AS named LEFT JOIN {reading.table} AS jobs"
    found = f"SELECT job_id, n, any_value(there) AS there"
    return ()
