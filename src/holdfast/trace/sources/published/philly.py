"""Read Philly (Microsoft, 2017) in its three formats.

`cluster_job_log` of philly-traces is a JSON list of jobs {status, vc, jobid, attempts,
submitted_time, user} with attempts {start_time, end_time, detail: [{ip, gpus: [gpu0 …]}]}. Each
attempt becomes a row. All attempts except the last count as failed, because they were tried again.
The last attempt has the job's status. An attempt waits from the end of the previous attempt.
Missing times are null or the text None.

AcmeTrace's CSV has a row per attempt, `JOB-attemptN`: jobname, vc, user, state, submit_time,
start_time, end_time, gpu_num, gpu_alloc, node_list, duration, queue. Lists are in Python's
notation. Times are rounded to minutes, while duration and queue are the exact seconds. The start is
therefore computed as submission + queue, and the end as start + duration. A spreadsheet program
damaged some hashes of vc and user (6.21E+12).

Sia's CSV has a row per job that ran: timestamp (submission), duration, num_gpus, gpu_time, cluster
(the virtual cluster).

Times are local times of the US Pacific coast, since the datacenter's utilisation files have PDT and
PST. duration is end - start, in seconds. In the repeated hour of 2017-11-05, times are read as PST.
"""

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from zoneinfo import ZoneInfo

from holdfast.trace.clusters import Cluster
from holdfast.trace.errors import BadTrace
from holdfast.trace.sources.csv.sql import Columns, Time
from holdfast.trace.sources.csv.text import read_csv
from holdfast.trace.sources.json_stream import json_objects
from holdfast.trace.sources.reading import Reading, Source, csv_header, head
from holdfast.trace.sources.rows import read_rows
from holdfast.trace.sources.sql import state_sql

if TYPE_CHECKING:
    import duckdb

CITATION: Final = "Philly traces: Jeon et al., ATC 2019; CC-BY-4.0"
PACIFIC: Final = "America/Los_Angeles"
JOB_STATES: Final = {"Pass": "COMPLETED", "Killed": "CANCELLED", "Failed": "FAILED"}

_MINUTES: Final = Time(zone=PACIFIC, format="%Y/%m/%d %H:%M")
ACME_COLUMNS: Final[Columns] = {
    "jobname": "VARCHAR", "vc": "VARCHAR", "user": "VARCHAR", "state": "VARCHAR",
    "submit_time": _MINUTES, "start_time": _MINUTES, "end_time": _MINUTES, "gpu_num": "DOUBLE", "gpu_alloc": "VARCHAR",
    "node_list": "VARCHAR", "duration": "DOUBLE", "queue": "DOUBLE",
}  # fmt: skip
SIA_COLUMNS: Final[Columns] = {
    "timestamp": Time(zone=PACIFIC), "duration": "DOUBLE", "num_gpus": "DOUBLE", "gpu_time": "DOUBLE",
    "cluster": "VARCHAR",
}  # fmt: skip
LOG_COLUMNS: Final = {
    "cluster": "VARCHAR", "job_id": "VARCHAR", "attempt": "INTEGER", "username": "VARCHAR", "pool": "VARCHAR",
    "state": "VARCHAR", "submit_at": "TIMESTAMP", "start_at": "TIMESTAMP", "end_at": "TIMESTAMP", "run_s": "DOUBLE",
    "queue_s": "DOUBLE", "gpu_num": "DOUBLE", "node_num": "INTEGER", "nodes": "VARCHAR[]", "gpus": "VARCHAR[]",
    "zone_offset": "VARCHAR",
}  # fmt: skip
_LOG_KEYS: Final = re.compile(
    r'^\s*\[\s*\{(?=.*"jobid")(?=.*"vc")(?=.*"submitted_time")', re.DOTALL
)
_GPU_INDEX: Final = re.compile(r"\d+$")


def _cluster(time_resolution_s: float) -> Cluster:
    # Number of GPUs: section 2 of the study. Offset: daylight saving time, as for most of the
    # trace.
    return Cluster(
        name="Philly", source="philly", gpu_num=2490, utc_offset_h=-7.0, time_resolution_s=time_resolution_s,
        citation=CITATION,
    )  # fmt: skip


def _recognises(path: Path) -> bool:
    header = set(csv_header(path))
    return (
        header.issuperset(ACME_COLUMNS)
        or header == set(SIA_COLUMNS)
        or _LOG_KEYS.match(head(path)) is not None
    )


def _read(connection: "duckdb.DuckDBPyConnection", path: Path, table: str) -> Reading:
    header = csv_header(path)
    if "jobname" in header:
        return _read_acme(connection, path, table)
    if "num_gpus" in header:
        return _read_sia(connection, path, table)
    rows = read_rows(connection, table, LOG_COLUMNS, _attempts(path))
    if not rows:
        raise BadTrace(path, "It holds no job.", next_step="Give cluster_job_log of philly-traces.")
    return Reading.of(connection, table, _cluster(1.0))


def _read_acme(connection: "duckdb.DuckDBPyConnection", path: Path, table: str) -> Reading:
    start = "coalesce(submit_time + to_seconds(queue), start_time)"
    nodes = "replace(replace(trim(node_list, '[] '), '''', ''), ' ', '')"
    select = f"""
        SELECT 'Philly' AS cluster, regexp_extract(jobname, '^(.*?)(-attempt\\d+)?$', 1) AS job_id,
            TRY_CAST(regexp_extract(jobname, '-attempt(\\d+)$', 1) AS INTEGER) AS attempt, "user" AS username,
            vc AS pool, {state_sql("state", JOB_STATES)} AS state, submit_time AS submit_at, {start} AS start_at,
            coalesce({start} + to_seconds(duration), end_time) AS end_at, duration AS run_s, queue AS queue_s,
            duration AS reported_duration_s, gpu_num,
            CASE WHEN {nodes} <> '' THEN len(string_split({nodes}, ',')) END::INTEGER AS node_num,
            CASE WHEN {nodes} <> '' THEN string_split({nodes}, ',') END AS nodes, zone_offset
        FROM source"""
    read = read_csv(connection, path, columns=ACME_COLUMNS, select=select, table=table)
    return Reading.of(connection, table, _cluster(60.0), notes=read.notes("Philly"))


def _read_sia(connection: "duckdb.DuckDBPyConnection", path: Path, table: str) -> Reading:
    select = """
        SELECT 'Philly' AS cluster, cluster AS pool, "timestamp" AS submit_at, duration AS run_s,
            duration AS reported_duration_s, gpu_time AS reported_gpu_time_s, num_gpus AS gpu_num, zone_offset
        FROM source"""
    read = read_csv(connection, path, columns=SIA_COLUMNS, select=select, table=table)
    return Reading.of(connection, table, _cluster(1.0), notes=read.notes("Philly"))


def _attempts(path: Path) -> Iterator[tuple[Any, ...]]:
    """Yield a row of `LOG_COLUMNS` for each attempt, or one row for a job without attempts."""
    next_step = "Give cluster_job_log of philly-traces, whole."
    for line, job in json_objects(path, frozenset(), next_step=next_step):
        try:
            submitted = _seconds(job["submitted_time"])
            attempts = job["attempts"] or [{"start_time": None, "end_time": None, "detail": []}]
            waits_since = submitted
            for number, attempt in enumerate(attempts):
                start, end = _seconds(attempt["start_time"]), _seconds(attempt["end_time"])
                last = number == len(attempts) - 1
                nodes = [held["ip"] for held in attempt["detail"]]
                gpus = [
                    f"{held['ip']}-{_index(name)}"
                    for held in attempt["detail"]
                    for name in held["gpus"]
                ]
                yield (
                    "Philly", job["jobid"], number, job["user"], job["vc"],
                    JOB_STATES.get(job["status"], "UNKNOWN") if last else "FAILED",
                    submitted, start, end, _between(start, end), _between(waits_since, start),
                    # An attempt without detail held an unknown number of GPUs.
                    float(len(gpus)) if attempt["detail"] else None, len(nodes) or None, nodes or None, gpus or None,
                    "",
                )  # fmt: skip
                waits_since = end
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            problem = (
                "Expected a job of status, vc, jobid, attempts, submitted_time and user: "
                f"{error!r}."
            )
            raise BadTrace(path, problem, line=line, next_step=next_step) from error


def _seconds(text: str | None) -> float | None:
    """Convert a time in the log to seconds since the Unix epoch."""
    if text is None or text == "None":
        return None
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(PACIFIC), fold=1).timestamp()


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def _index(gpu: str) -> str:
    found = _GPU_INDEX.search(gpu)
    if found is None:
        raise ValueError(f"no GPU is called {gpu!r}")
    return found[0]


SOURCE: Final = Source(
    name="philly",
    title="Philly: cluster_job_log (JSON), or its CSV of AcmeTrace or Sia",
    recognises=_recognises,
    read=_read,
)
