"""Read Acme (NSDI'24): `trace_seren.csv` and `trace_kalos.csv` of AcmeTrace.

Each row is a job: job_id, user, node_num, gpu_num, cpu_num, type, state, submit_time, start_time,
end_time, duration, queue, gpu_time. Kalos also has mem_per_pod_GB, shared_mem_per_pod, fail_time
and stop_time, by which its file is recognised. Times carry their offset (Seren +08:00, Kalos
+00:00; the users of both clusters live at +08:00). Durations are seconds.

A file trace_NAME.csv with another NAME, such as a synthetic trace, describes a cluster NAME of
unknown size. A trace that `holdfast trace twin` drew also has a column `synthetic`. Its cluster is
named NAME-SYNTHETIC, and the report states that no row is real.

Pitfalls of the format:

- Kalos' `duration` is end - submit, contrary to its README. It therefore includes the queue time,
  and so does `gpu_time` (GPUs times duration). Here the run time is end - start, and the released
  values are kept as reported.
- Kalos' RUNNING jobs have no end. Their run time is duration - queue, which is the time until the
  trace was taken.
- CPU jobs have gpu_num 0.
- Evaluation is named Eval.
"""

import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.trace.clusters import Cluster
from holdfast.trace.sources.csv.sql import Columns, Time
from holdfast.trace.sources.csv.text import read_csv
from holdfast.trace.sources.plain_text import cluster_name
from holdfast.trace.sources.reading import Reading, Source, csv_header
from holdfast.trace.sources.sql import state_sql, type_sql

if TYPE_CHECKING:
    import duckdb

SEREN_COLUMNS: Final[Columns] = {
    "job_id": "VARCHAR", "user": "VARCHAR", "node_num": "INTEGER", "gpu_num": "DOUBLE", "cpu_num": "DOUBLE",
    "type": "VARCHAR", "state": "VARCHAR", "submit_time": Time(), "start_time": Time(), "end_time": Time(),
    "duration": "DOUBLE", "queue": "DOUBLE", "gpu_time": "DOUBLE",
}  # fmt: skip
KALOS_COLUMNS: Final[Columns] = {
    **SEREN_COLUMNS, "mem_per_pod_GB": "DOUBLE", "shared_mem_per_pod": "DOUBLE", "fail_time": Time(),
    "stop_time": Time(),
}  # fmt: skip
_KNOWN_BY: Final = frozenset(
    {"job_id", "node_num", "gpu_num", "type", "state", "submit_time", "queue", "gpu_time"}
)
SYNTHETIC: Final = "SYNTHETIC"
"""Value in the column `synthetic` of a synthetic trace, and suffix of its cluster's name."""
_NAME: Final = re.compile(r"trace_([A-Za-z0-9-]+)")
_TYPES: Final = {"Eval": "Evaluation", "Evaluation": "Evaluation"} | {
    name: name for name in ("Pretrain", "SFT", "MLLM", "Debug", "Other")
}


def _cluster(name: str, nodes: int, *, counts_queue: bool) -> Cluster:
    return Cluster(
        name=name,
        source="acme",
        node_num=nodes,
        gpus_per_node=8,
        gpu_num=nodes * 8,
        gpu_model="A100-SXM-80GB",
        gpu_tdp_w=400.0,
        gpu_memory_mib=81920.0,
        utc_offset_h=8.0,
        duration_counts_queue=counts_queue,
        citation="AcmeTrace: Hu et al., NSDI 2024; CC-BY-4.0",
    )


SEREN: Final = _cluster("Seren", 286, counts_queue=False)
KALOS: Final = _cluster("Kalos", 302, counts_queue=True)
"""Number of nodes as in the study, Table 1."""


def _named(path: Path, published: Cluster) -> Cluster:
    """Return the cluster to which a file `trace_NAME.csv` belongs.

    This is the published cluster of that name, or else a cluster NAME of unknown size.
    """
    named = _NAME.fullmatch(cluster_name(path))
    if named is None or named[1].lower() in {SEREN.name.lower(), KALOS.name.lower()}:
        return published
    return Cluster(
        name=named[1], source="acme", duration_counts_queue=published.duration_counts_queue
    )


def _synthetic(cluster: Cluster) -> Cluster:
    counts = (
        "the published counts of " + cluster.citation
        if cluster.citation
        else "the counts of a trace"
    )
    citation = f"{SYNTHETIC}: drawn by Holdfast from {counts}; no row is real"
    return replace(cluster, name=f"{cluster.name}-{SYNTHETIC}", citation=citation)


def _read(connection: "duckdb.DuckDBPyConnection", path: Path, table: str) -> Reading:
    header = csv_header(path)
    is_kalos, is_synthetic = "mem_per_pod_GB" in header, "synthetic" in header
    cluster = _named(path, KALOS if is_kalos else SEREN)
    is_published = bool(cluster.citation)
    if is_synthetic:
        cluster = _synthetic(cluster)
    run_s = "epoch(end_time - start_time)"
    memory = ""
    if is_kalos:
        run_s = f"CASE WHEN state = 'RUNNING' THEN duration - queue ELSE {run_s} END"
        memory = "mem_per_pod_GB * node_num AS mem_gb,"
    select = f"""
        SELECT '{cluster.name}' AS cluster, job_id, "user" AS username, {type_sql("type", _TYPES)} AS type,
            {state_sql("state")} AS state, submit_time AS submit_at, start_time AS start_at, end_time AS end_at,
            {run_s} AS run_s, coalesce(epoch(start_time - submit_time), queue) AS queue_s,
            duration AS reported_duration_s, gpu_time AS reported_gpu_time_s, gpu_num, node_num, cpu_num, {memory}
            zone_offset
        FROM source"""
    columns = KALOS_COLUMNS if is_kalos else SEREN_COLUMNS
    read = read_csv(
        connection,
        path,
        columns={**columns, "synthetic": "VARCHAR"} if is_synthetic else columns,
        select=select,
        table=table,
    )
    if not is_published:
        cluster = replace(cluster, utc_offset_h=_utc_offset_h(connection, table))
    return Reading.of(connection, table, cluster, notes=read.notes(cluster.name))


def _utc_offset_h(connection: "duckdb.DuckDBPyConnection", table: str) -> float:
    """Return the most frequent UTC offset of the times in hours; 0 if no time has an offset."""
    (offset,) = connection.execute(f"SELECT mode(zone_offset) FROM {table}").fetchall()[0]
    if not re.fullmatch(r"[+-]\d\d(:?\d\d)?", offset or ""):
        return 0.0
    ahead = datetime.strptime(offset if len(offset) > 3 else f"{offset}00", "%z").utcoffset()
    return ahead.total_seconds() / 3600 if ahead else 0.0


SOURCE: Final = Source(
    name="acme",
    title="AcmeTrace (NSDI'24): trace_seren.csv, trace_kalos.csv",
    recognises=lambda path: _KNOWN_BY.issubset(csv_header(path)),
    read=_read,
)
