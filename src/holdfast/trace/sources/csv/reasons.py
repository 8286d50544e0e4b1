"""Add failure reasons from a CSV file to jobs that were read from another file.

The columns are `job_id`, `reason` and optionally `attempt` (0, 1 …); other columns are ignored. A
reason is one of the study's Table 3, or a site's own word. The file may come from `holdfast
diagnose`, from a person, or from a synthetic trace.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.core.errors import NotFound
from holdfast.core.words import plainly
from holdfast.trace.errors import BadTrace
from holdfast.trace.notes import Note
from holdfast.trace.schema import OUTCOMES
from holdfast.trace.sources.csv.sql import Columns
from holdfast.trace.sources.csv.text import read_csv
from holdfast.trace.sources.reading import Reading, csv_header
from holdfast.trace.sources.sql import literal

if TYPE_CHECKING:
    import duckdb

NEEDED: Final[Columns] = {"job_id": "VARCHAR", "reason": "VARCHAR"}
_KINDS: Final[Columns] = {**NEEDED, "attempt": "INTEGER"}
_FAILED: Final = ", ".join(
    literal(state) for state, outcome in OUTCOMES.items() if outcome == "failed"
)
_NAMED: Final = "reasons_named"
_MATCHED: Final = "reasons_matched"
_MAX_EXAMPLES: Final = 3


def join_reasons(connection: "duckdb.DuckDBPyConnection", reading: Reading, path: Path) -> Reading:
    """Set the column `reason` of the jobs from a CSV file.

    - A reason in the file replaces the job's own reason.
    - A row without an attempt applies to every failed attempt of its job.
    - Jobs that did not fail keep their reason.
    - If there are several rows for the same job and attempt, the first one counts.

    Args:
        connection: the database.
        reading: the jobs.
        path: the CSV file.

    Returns:
        The reading with the column `reason`, and with notes. The notes count the failures with a
        new reason, and the rows for unknown jobs, for jobs that did not fail, and for jobs with an
        earlier row.

    Raises:
        BadTrace: the file lacks a column or cannot be read; the message has the place. The reading
            is then unchanged.
        NotFound: there is no such file.
    """
    if not path.is_file():
        raise NotFound(
            f"There is no file {path}. Give a CSV file of the columns job_id and reason."
        )
    header = csv_header(path)
    if missing := [name for name in NEEDED if name not in header]:
        problem = f"Expected the columns job_id and reason; it has no {' and no '.join(missing)}."
        raise BadTrace(
            path,
            problem,
            line=1,
            next_step="Write a CSV file with a header, such as job_id,reason.",
        )
    columns = {name: _KINDS.get(name, "VARCHAR") for name in header}
    attempt = "attempt" if "attempt" in columns else "NULL::INTEGER AS attempt"
    select = (
        f"SELECT job_id, {attempt}, reason FROM source WHERE job_id IS NOT NULL AND reason IS "
        "NOT NULL"
    )
    read = read_csv(connection, path, columns=columns, select=select, table=_NAMED)
    try:
        notes = (*read.notes(reading.clusters[0].name), *_joined(connection, reading, path))
    finally:
        connection.execute(f"DROP TABLE IF EXISTS {_NAMED}; DROP TABLE IF EXISTS {_MATCHED}")
    return replace(
        reading,
        columns=reading.columns | {"reason"},
        notes=reading.notes + notes,
        lacking={cluster: lacking - {"reason"} for cluster, lacking in reading.lacking.items()},
    )


def _joined(connection: "duckdb.DuckDBPyConnection", reading: Reading, path: Path) -> list[Note]:
    """Set the reasons from the table `_NAMED`, and return the notes."""
    own = "coalesce(jobs.attempt, 0)" if "attempt" in reading.columns else "0"
    failed = f"coalesce(jobs.state IN ({_FAILED}), false)" if "state" in reading.columns else "true"
    connection.execute(f"""
        CREATE OR REPLACE TABLE {_MATCHED} AS
        SELECT jobs.rowid AS job, named.rowid AS named, named.attempt, named.reason, {failed} AS failed
        FROM {reading.table} AS jobs JOIN {_NAMED} AS named
            ON jobs.job_id = named.job_id AND {own} = coalesce(named.attempt, {own})""")
    if "reason" not in reading.columns:
        connection.execute(f"ALTER TABLE {reading.table} ADD COLUMN reason VARCHAR")
    # A row for one attempt takes precedence over a row for all attempts.
    connection.execute(f"""
        UPDATE {reading.table} AS jobs SET reason = given.reason FROM (
            SELECT job, first(reason ORDER BY attempt NULLS LAST, named) AS reason
            FROM {_MATCHED} WHERE failed GROUP BY job
        ) AS given WHERE jobs.rowid = given.job""")
    given = connection.execute(
        f"SELECT count(DISTINCT job) FROM {_MATCHED} WHERE failed"
    ).fetchall()[0][0]
    unmatched = f"FROM {_NAMED} WHERE rowid NOT IN (SELECT named FROM {_MATCHED})"
    of_others = (
        f"FROM {_NAMED} WHERE rowid IN (SELECT named FROM {_MATCHED} GROUP BY named HAVING "
        "NOT bool_or(failed))"
    )
    repeats = (
        f"SELECT job_id FROM {_NAMED} QUALIFY row_number() OVER (PARTITION BY job_id, "
        "attempt ORDER BY rowid) > 1"
    )
    absent, others, twice = (
        connection.execute(f"SELECT count(*), (list(DISTINCT job_id ORDER BY job_id))[:{_MAX_EXAMPLES}] {rows}")
        .fetchall()[0]
        for rows in (unmatched, of_others, f"FROM ({repeats})")
    )  # fmt: skip
    found = {
        "reason-given": (
            given, [], "kept", f"{plainly(given, 'failure has', 'failures have')} the reason that {path.name} records."
        ),
        "reason-of-no-job": (
            *absent, "dropped", f"{plainly(absent[0], 'reason')} of {path.name} named no job read here."
        ),
        "reason-of-no-failure": (
            *others, "dropped", f"{plainly(others[0], 'reason')} of {path.name} named a job that did not fail."
        ),
        "reason-twice": (
            *twice, "dropped", f"{plainly(twice[0], 'row')} of {path.name} named a job that had one; the first counts."
        ),
    }  # fmt: skip
    return [
        Note(
            cluster=reading.clusters[0].name, check=check, sentence=sentence, rows=rows, action=action,
            examples=tuple(examples or ()),
        )
        for check, (rows, examples, action, sentence) in found.items()
        if rows or check == "reason-given"
    ]  # fmt: skip
