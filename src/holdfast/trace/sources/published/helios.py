"""Read Helios (SenseTime, 2020): `cluster_log.csv` of HeliosData, or AcmeTrace's CSV.

Each row is a job: job_id, user, vc, gpu_num, cpu_num, node_num, state, submit_time, start_time,
end_time, duration, queue. AcmeTrace's CSV also has the column cluster. HeliosData has one folder
per cluster (Earth, Saturn, Uranus, Venus), whose name becomes the cluster. vc is the virtual
cluster, which is read as the pool. duration is end - start and queue is start - submit, in seconds.

Pitfalls of the format: times are in UTC+8 without an offset. A job id is unique only within its
cluster. Half of the jobs hold no GPU.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.trace.clusters import Cluster
from holdfast.trace.sources.csv.sql import Columns, Time
from holdfast.trace.sources.csv.text import read_csv
from holdfast.trace.sources.reading import Reading, Source, csv_header
from holdfast.trace.sources.sql import literal, state_sql

if TYPE_CHECKING:
    import duckdb

SHANGHAI: Final = "Asia/Shanghai"
COLUMNS: Final[Columns] = {
    "job_id": "VARCHAR", "user": "VARCHAR", "vc": "VARCHAR", "gpu_num": "DOUBLE", "cpu_num": "DOUBLE",
    "node_num": "INTEGER", "state": "VARCHAR", "submit_time": Time(zone=SHANGHAI), "start_time": Time(zone=SHANGHAI),
    "end_time": Time(zone=SHANGHAI), "duration": "DOUBLE", "queue": "DOUBLE",
}  # fmt: skip
NODES: Final = {"Venus": 133, "Earth": 143, "Saturn": 262, "Uranus": 264}
"""Number of nodes of each cluster, with 8 GPUs each: Hu et al., SC 2021, Table 1."""


def _cluster(name: str) -> Cluster:
    nodes = NODES.get(name)
    return Cluster(
        name=name,
        source="helios",
        node_num=nodes,
        gpus_per_node=8,
        gpu_num=nodes * 8 if nodes else None,
        utc_offset_h=8.0,
        citation="HeliosData: Hu et al., SC 2021; CC-BY-4.0",
    )


def _read(connection: "duckdb.DuckDBPyConnection", path: Path, table: str) -> Reading:
    columns, cluster = COLUMNS, literal(path.parent.name if path.parent.name in NODES else "Helios")
    if "cluster" in csv_header(path):
        columns, cluster = {**COLUMNS, "cluster": "VARCHAR"}, "cluster"
    select = f"""
        SELECT {cluster} AS cluster, job_id, "user" AS username, vc AS pool, {state_sql("state")} AS state,
            submit_time AS submit_at, start_time AS start_at, end_time AS end_at, epoch(end_time - start_time) AS run_s,
            epoch(start_time - submit_time) AS queue_s, duration AS reported_duration_s, gpu_num, node_num, cpu_num,
            zone_offset
        FROM source"""
    read = read_csv(connection, path, columns=columns, select=select, table=table)
    names = [
        row[0]
        for row in connection.execute(
            f"SELECT DISTINCT cluster FROM {table} ORDER BY ALL"
        ).fetchall()
    ]
    return Reading.of(connection, table, *map(_cluster, names), notes=read.notes(names[0]))


SOURCE: Final = Source(
    name="helios",
    title="Helios: cluster_log.csv, or AcmeTrace's helios_trace.csv",
    recognises=lambda path: set(COLUMNS).issubset(csv_header(path)),
    read=_read,
)
