"""Check job records: find contradictions, count them, and mend, drop or keep the rows.

The checks run before any analysis, on each adapter's table:

- A row with an impossible time still counts as a job, without the impossible time.
- A repeated row is dropped.
- A row with a contradiction that cannot be resolved is kept and reported.

Telemetry has its own checks (`holdfast.trace.telemetry`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from holdfast.trace.notes import Note
from holdfast.trace.sources.reading import Reading

if TYPE_CHECKING:
    import duckdb

    from holdfast.trace.clusters import Cluster

EXAMPLES = 3
LONGEST_RUN_S = 366 * 86400
FUTURE_S = 86400
"""Seconds that a time may lie in the future.

Clocks differ, and time zones are mistaken, so times up to a day ahead are accepted.
"""


@dataclass(frozen=True, kw_only=True)
class Check:
    """Define a check for a contradiction within one row.

    `when` is an SQL condition that is true for a contradictory row, and `mend` the SQL that mends
    the row. Both may use the columns of the adapter's table. `when` may also use `now` and the
    attributes of the row's cluster, which are NULL if unknown: `known_gpu_num`,
    `known_gpus_per_node`, `counts_queue`, `resolution_s`. In a check with a `mend`, `when` may use
    only the columns.
    """

    name: str
    sentence: str
    needs: tuple[str, ...]
    when: str
    mend: str = ""
    """SQL assignments that make the row consistent; if empty, the row is kept unchanged."""


CHECKS: tuple[Check, ...] = (
    Check(
        name="end-before-start",
        sentence="end before they start; their run time is left out",
        needs=("start_at", "end_at", "run_s"),
        when="end_at < start_at",
        mend="end_at = NULL, run_s = NULL",
    ),
    Check(
        name="negative-run-time",
        sentence="have a negative run time; it is left out",
        needs=("run_s",),
        when="run_s < 0",
        mend="run_s = NULL",
    ),
    Check(
        name="start-before-submission",
        sentence="start before they are submitted; their waiting time is left out",
        needs=("submit_at", "start_at", "queue_s"),
        when="start_at < submit_at",
        mend="queue_s = NULL",
    ),
    Check(
        name="negative-waiting-time",
        sentence="have a negative waiting time; it is left out",
        needs=("queue_s",),
        when="queue_s < 0",
        mend="queue_s = NULL",
    ),
    Check(
        name="negative-gpus",
        sentence="have a negative number of GPUs; it is left out",
        needs=("gpu_num",),
        when="gpu_num < 0",
        mend="gpu_num = NULL",
    ),
    Check(
        name="in-the-future",
        sentence="have times after this report was made: is the time zone right?",
        needs=("submit_at",),
        when=f"submit_at > now + to_seconds({FUTURE_S})",
    ),
    Check(
        name="longer-than-a-year",
        sentence="ran for over a year",
        needs=("run_s",),
        when=f"run_s > {LONGEST_RUN_S}",
    ),
    Check(
        name="duration-contradicts-times",
        sentence="have a duration that differs from their times",
        needs=("reported_duration_s", "submit_at", "start_at", "end_at"),
        when="abs(reported_duration_s - epoch(end_at - CASE WHEN counts_queue THEN submit_at ELSE start_at END))"
        " > greatest(resolution_s, 1)",
    ),
    Check(
        name="gpu-time-contradicts-duration",
        sentence="have a GPU time that is not their GPUs times their duration; it is computed anew",
        needs=("reported_gpu_time_s", "reported_duration_s", "gpu_num"),
        # Allow a second for rounding, a thousandth for single-precision figures.
        when="abs(reported_gpu_time_s - reported_duration_s * gpu_num)"
        " > greatest(1, gpu_num, 0.001 * abs(reported_gpu_time_s))",
    ),
    Check(
        name="wider-than-the-cluster",
        sentence="hold more GPUs than the cluster has",
        needs=("gpu_num",),
        when="gpu_num > known_gpu_num",
    ),
    Check(
        name="more-gpus-than-their-nodes-have",
        sentence="hold more GPUs than their nodes have",
        needs=("gpu_num", "node_num"),
        when="node_num > 0 AND gpu_num > node_num * known_gpus_per_node",
    ),
    Check(
        name="ended-without-an-end",
        sentence="have ended at an unknown time",
        needs=("state", "end_at", "start_at"),
        when="state NOT IN ('RUNNING', 'PENDING', 'UNKNOWN') AND start_at IS NOT NULL AND end_at IS NULL",
    ),
    Check(
        name="completed-without-a-start",
        sentence="have completed without a start time; their GPU time is unknown",
        needs=("state", "end_at", "start_at", "run_s"),
        when="state = 'COMPLETED' AND start_at IS NULL AND end_at IS NOT NULL AND run_s IS NULL",
    ),
    Check(
        name="running-with-an-end",
        sentence="are running or pending by their state, but have an end",
        needs=("state", "end_at"),
        when="state IN ('RUNNING', 'PENDING') AND end_at IS NOT NULL",
    ),
    Check(
        name="unknown-state",
        sentence="have a state that is not known",
        needs=("state",),
        when="coalesce(state, 'UNKNOWN') = 'UNKNOWN'",
    ),
)


NO_GPUS = "no-gpus"
_LOOK = "Look whether the field of GPUs is the right one."
_WHERE_GPUS_ARE = {
    "slurm": "Configure Slurm to record them: AccountingStorageTRES=gres/gpu in slurm.conf.",
    "kubernetes": "Look which resource the pods ask for: kubectl get pods -o json.",
    "kueue": "Look which resource the workloads ask for: kubectl get workloads -o json.",
}


def note_missing_gpus(
    connection: "duckdb.DuckDBPyConnection",
    readings: Sequence[Reading],
    notes: Sequence[Note],
    *,
    compared: frozenset[str],
) -> list[Note]:
    """Prepend a note for each cluster that has no GPU job although its source has a field for GPUs.

    All GPU figures of the cluster are then empty. More likely than a cluster without GPU jobs is a
    field that was not recorded or not understood. Clusters in `compared` are skipped.
    """
    without_gpus = []
    for reading in readings:
        if "gpu_num" not in reading.columns:
            continue
        found = connection.execute(
            f"SELECT cluster, count(*) FROM {reading.table} GROUP BY cluster"
            " HAVING coalesce(max(gpu_num), 0) <= 0 ORDER BY cluster"
        ).fetchall()
        sources = {cluster.name: cluster.source for cluster in reading.clusters}
        for cluster, rows in found:
            if cluster not in compared and "gpu_num" in reading.columns_of(cluster):
                where = _WHERE_GPUS_ARE.get(sources.get(cluster, ""), _LOOK)
                sentence = f"No job has a GPU, so all figures about GPUs are missing. {where}"
                without_gpus.append(
                    Note(
                        cluster=cluster, check=NO_GPUS, sentence=sentence, rows=rows, action="kept"
                    )
                )
    return [*without_gpus, *(note for note in notes if note.check != NO_GPUS)]


def check_jobs(
    connection: "duckdb.DuckDBPyConnection", reading: Reading, *, now_s: float
) -> tuple[Note, ...]:
    """Run every check on an adapter's table; mend or drop rows where a check requires it.

    Args:
        connection: the database that holds the table.
        reading: the table, its columns and its clusters.
        now_s: the current time, in seconds since the Unix epoch.

    Returns:
        One note for each check and cluster with at least one contradictory row.
    """
    notes = list(_drop_repeated(connection, reading))
    checks = [check for check in CHECKS if reading.columns.issuperset(check.needs)]
    rows = _rows_with_known_attributes(reading.table, reading.clusters, now_s)
    counts = ", ".join(f"count(*) FILTER ({check.when})" for check in checks)
    found = connection.execute(
        f"SELECT cluster, {counts} FROM {rows} GROUP BY cluster ORDER BY cluster"
    ).fetchall()
    for cluster, *numbers in found:
        for check, number in zip(checks, numbers, strict=True):
            if number:
                notes.append(
                    Note(
                        cluster=cluster,
                        check=check.name,
                        sentence=_plural(number, check.sentence),
                        rows=number,
                        action="mended" if check.mend else "kept",
                        examples=_examples(connection, rows, reading, cluster, check.when),
                    )
                )
    mends = {note.check for note in notes if note.action == "mended"}
    for check in checks:
        if check.name in mends:
            connection.execute(f"UPDATE {reading.table} SET {check.mend} WHERE {check.when}")
    if "submit_at" in reading.columns:
        notes += _days_without_submissions(connection, reading.table)
    return tuple(notes)


def _rows_with_known_attributes(table: str, clusters: Sequence["Cluster"], now_s: float) -> str:
    """Return SQL for the table's rows, joined with the known attributes of their cluster."""

    def sql(value: float | bool | None) -> str:
        return "NULL" if value is None else str(value).lower()

    known = ", ".join(
        f"('{_quoted(one.name)}', {sql(one.gpu_num)}::DOUBLE, {sql(one.gpus_per_node)}::DOUBLE, "
        f"{sql(one.duration_counts_queue)}, {one.time_resolution_s})"
        for one in clusters
    )
    return (
        f"(SELECT *, make_timestamp({round(now_s * 1e6)}) AS now FROM {table} LEFT JOIN (VALUES {known}) "
        "known(cluster, known_gpu_num, known_gpus_per_node, counts_queue, resolution_s) USING (cluster))"
    )


def _examples(
    connection: "duckdb.DuckDBPyConnection", rows: str, reading: Reading, cluster: str, when: str
) -> tuple[str, ...]:
    if "job_id" not in reading.columns:
        return ()
    found = connection.execute(
        f"SELECT job_id FROM {rows} WHERE cluster = ? AND ({when}) ORDER BY job_id LIMIT {EXAMPLES}",
        [cluster],
    ).fetchall()
    return tuple(str(job_id) for (job_id,) in found)


def _drop_repeated(connection: "duckdb.DuckDBPyConnection", reading: Reading) -> list[Note]:
    """Keep only one row per attempt of a job: the row that ended last."""
    if "job_id" not in reading.columns:
        return []
    key = ["cluster", "job_id", *(["attempt"] if "attempt" in reading.columns else [])]
    order = "end_at DESC NULLS LAST, rowid" if "end_at" in reading.columns else "rowid"
    action: Literal["kept", "dropped"] = "dropped"
    # Compare hashes first: they need a third of the memory, and few traces repeat an id.
    hashed = f"hash({', '.join(key)})"
    repeated = (
        f"SELECT rowid AS place, cluster, job_id, row_number() OVER (PARTITION BY {', '.join(key)} ORDER BY {order})"
        f" AS turn FROM {reading.table} WHERE {hashed} IN"
        f" (SELECT {hashed} FROM {reading.table} WHERE job_id IS NOT NULL GROUP BY 1 HAVING count(*) > 1)"
    )
    connection.execute(
        f"CREATE OR REPLACE TEMP TABLE repeated AS SELECT * FROM ({repeated}) WHERE turn > 1"
    )
    found = connection.execute(
        f"SELECT cluster, count(*), list_sort(list(DISTINCT job_id))[:{EXAMPLES}] FROM repeated"
        " GROUP BY cluster ORDER BY cluster"
    ).fetchall()
    if found:
        connection.execute(
            f"DELETE FROM {reading.table} WHERE rowid IN (SELECT place FROM repeated)"
        )
    connection.execute("DROP TABLE repeated")
    return [
        Note(
            cluster=cluster,
            check="repeated-job-id",
            sentence=_plural(number, "repeat the id of another; the one that ended last is kept"),
            rows=number,
            action=action,
            examples=tuple(sorted(examples)),
        )
        for cluster, number, examples in found
    ]


def _days_without_submissions(connection: "duckdb.DuckDBPyConnection", table: str) -> list[Note]:
    """Find whole days without submissions in a busy trace.

    The records of such days were probably lost.
    """
    found = connection.execute(
        f"""
        WITH days AS (SELECT cluster, submit_at::DATE AS day, count(*) AS n FROM {table}
                      WHERE submit_at IS NOT NULL GROUP BY ALL),
        steps AS (SELECT cluster, day, lead(day) OVER (PARTITION BY cluster ORDER BY day) - day - 1 AS missing,
                  avg(n) OVER (PARTITION BY cluster) AS usual FROM days)
        SELECT cluster, sum(missing)::BIGINT, list(day::VARCHAR ORDER BY missing DESC, day)[:{EXAMPLES}]
        FROM steps WHERE missing > 0 AND usual >= 100 GROUP BY cluster ORDER BY cluster
        """
    ).fetchall()
    return [
        Note(
            cluster=cluster,
            check="days-without-submissions",
            sentence=f"{number:,} {'day has' if number == 1 else 'days have'} no submission at all: is a part missing?",
            rows=number,
            action="kept",
            examples=tuple(f"after {day}" for day in days),
        )
        for cluster, number, days in found
    ]


def _plural(number: int, sentence: str) -> str:
    return f"{number:,} jobs {sentence}" if number != 1 else f"1 job: {sentence}"


def _quoted(text: str) -> str:
    return text.replace("'", "''")
