"""Read the CSV files of the scheduler simulators Tiresias and Tethys.

`holdfast trace export` can write such files. Times are seconds since the first submission, and are
read as seconds since 1970. Neither format has states, users or start times. A Tethys job has
`gpu_workers` nodes of `gpu_per_worker` GPUs, and runs for `num_iteration` iterations of
`iteration_computing_time` seconds.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.trace.clusters import Cluster
from holdfast.trace.notes import Note
from holdfast.trace.sources.csv.text import read_csv
from holdfast.trace.sources.plain_text import cluster_name
from holdfast.trace.sources.reading import Reading, Source, csv_header
from holdfast.trace.sources.sql import literal

if TYPE_CHECKING:
    import duckdb

_TIRESIAS: Final = dict.fromkeys(("num_gpu", "submit_time", "iterations", "duration", "interval"), "DOUBLE") | {
    "job_id": "VARCHAR", "model_name": "VARCHAR",
}  # fmt: skip
_TETHYS: Final = {"job_id": "VARCHAR"} | dict.fromkeys(
    (
        "arrival_time", "num_iteration", "iteration_computing_time", "iteration_networking_time", "gpu_workers", "ps",
        "gpu_per_worker", "cpu_per_gpu_worker", "cpu_per_ps_worker", "tensorsizes", "profiled_network",
    ),
    "DOUBLE",
)  # fmt: skip
_JOBS: Final = {
    frozenset(_TIRESIAS): (_TIRESIAS, "submit_time", "duration", "num_gpu", "NULL::INTEGER", "NULL::DOUBLE"),
    frozenset(_TETHYS): (
        _TETHYS, "arrival_time", "num_iteration * iteration_computing_time", "gpu_workers * gpu_per_worker",
        "gpu_workers::INTEGER", "cpu_per_gpu_worker * gpu_workers * gpu_per_worker",
    ),
}  # fmt: skip
"""For each format: its columns, and SQL of submission, duration, GPUs, nodes and CPU cores."""


def _read(connection: "duckdb.DuckDBPyConnection", path: Path, table: str) -> Reading:
    columns, submit, run, gpus, nodes, cpus = _JOBS[frozenset(csv_header(path))]
    name = cluster_name(path)
    select = f"""
        SELECT {literal(name)} AS cluster, job_id, make_timestamp(({submit} * 1e6)::BIGINT) AS submit_at,
            {run} AS run_s, {gpus} AS gpu_num, {nodes} AS node_num, {cpus} AS cpu_num, '' AS zone_offset
        FROM source"""
    read = read_csv(connection, path, columns=columns, select=select, table=table)
    if nodes.startswith("NULL"):
        for column in ("node_num", "cpu_num"):
            connection.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
    note = Note(
        cluster=name, check="simulator-times", rows=read.rows, action="kept",
        sentence="Times count from the first submission; they were read as seconds since 1970.",
    )  # fmt: skip
    return Reading.of(
        connection, table, Cluster(name=name, source=SOURCE.name), notes=(*read.notes(name), note)
    )


SOURCE: Final = Source(
    name="simulator",
    title="the CSV of the simulators Tiresias and Tethys",
    recognises=lambda path: frozenset(csv_header(path)) in _JOBS,
    read=_read,
)
