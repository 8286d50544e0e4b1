"""Read Alibaba's GPU cluster of 2023 (openb): `openb_pod_list_*.csv` and `openb_node_list_*.csv`.

Each row is a pod: name, cpu_milli, memory_mib, num_gpu, gpu_milli, gpu_spec, qos, pod_phase,
creation_time, deletion_time, scheduled_time. Lists that were sampled from the default list (such as
multigpu50) have only the first five columns. Units are thousandths of CPUs and of GPUs, and MiB.
Times are seconds since an unpublished moment, and are read as if this were the Unix epoch.
Durations are therefore right and dates are wrong.

Pitfalls of the format:

- A pod with num_gpu 1 may share its GPU, so it holds num_gpu times gpu_milli / 1000 GPUs.
- The times of a pod that was not scheduled are empty.
- `pod_phase` is the phase when the trace was taken. Running pods have a deletion_time nevertheless;
  they are read as RUNNING.
- gpu_spec lists the GPU models that the pod accepts (`V100M16|V100M32`), and not the model that it
  got.

The size of the cluster comes from the node list beside the pod list, if there is one; only nodes
with GPUs count.
"""

import csv
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.trace.clusters import Cluster
from holdfast.trace.errors import BadTrace
from holdfast.trace.sources.csv.sql import Columns
from holdfast.trace.sources.csv.text import read_csv
from holdfast.trace.sources.reading import Reading, Source, csv_header
from holdfast.trace.sources.sql import state_sql

if TYPE_CHECKING:
    import duckdb

SIZES: Final[Columns] = {
    "name": "VARCHAR", "cpu_milli": "DOUBLE", "memory_mib": "DOUBLE", "num_gpu": "DOUBLE", "gpu_milli": "DOUBLE",
}  # fmt: skip
COLUMNS: Final[Columns] = {
    **SIZES, "gpu_spec": "VARCHAR", "qos": "VARCHAR", "pod_phase": "VARCHAR", "creation_time": "DOUBLE",
    "deletion_time": "DOUBLE", "scheduled_time": "DOUBLE",
}  # fmt: skip
STATES: Final = {
    "Succeeded": "COMPLETED",
    "Failed": "FAILED",
    "Running": "RUNNING",
    "Pending": "PENDING",
}
NODE_LISTS: Final = ("openb_node_list_gpu_node.csv", "openb_node_list_all_node.csv")
CITATION: Final = "Alibaba cluster-trace-gpu-v2023: Weng et al., ATC 2023"
_MIB_IN_A_GB: Final = 1024.0


def _recognises(path: Path) -> bool:
    return {"name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli"}.issubset(csv_header(path))


def _read(connection: "duckdb.DuckDBPyConnection", path: Path, table: str) -> Reading:
    header = csv_header(path)
    columns = (
        COLUMNS
        if "pod_phase" in header
        else SIZES
        if set(header) <= set(SIZES)
        else {**SIZES, "gpu_spec": "VARCHAR"}
    )
    variant = path.name.partition(".")[0].removeprefix("openb_pod_list_")
    name = (
        "openb"
        if variant == "default" or variant == path.name.partition(".")[0]
        else f"openb-{variant}"
    )
    gpus = "num_gpu * CASE WHEN num_gpu > 0 THEN gpu_milli / 1000 ELSE 0 END"
    times = ""
    if "pod_phase" in columns:
        times = f"""
            qos AS pool, {state_sql("pod_phase", STATES)} AS state, {_at("creation_time")} AS submit_at,
            {_at("scheduled_time")} AS start_at, {_at("deletion_time")} AS end_at,
            deletion_time - scheduled_time AS run_s, scheduled_time - creation_time AS queue_s, '' AS zone_offset,"""
    select = f"""
        SELECT '{name}' AS cluster, name AS job_id, name, {times} {gpus} AS gpu_num, 1 AS node_num,
            cpu_milli / 1000 AS cpu_num, memory_mib / {_MIB_IN_A_GB} AS mem_gb
        FROM source"""
    read = read_csv(connection, path, columns=columns, select=select, table=table)
    cluster = _with_nodes(
        Cluster(name=name, source="openb", utc_offset_h=8.0, citation=CITATION), path.parent
    )
    return Reading.of(connection, table, cluster, notes=read.notes(name))


def _at(seconds: str) -> str:
    return f"make_timestamp(({seconds} * 1e6)::BIGINT)"


def _with_nodes(cluster: Cluster, folder: Path) -> Cluster:
    """Return the cluster with the size given by the node list in a folder, if there is one."""
    path = next((folder / name for name in NODE_LISTS if (folder / name).is_file()), None)
    if path is None:
        return cluster
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    try:
        sizes = [int(row["gpu"]) for row in rows if int(row["gpu"])]
    except (KeyError, TypeError, ValueError) as error:
        raise BadTrace(
            path,
            f"Expected a number of GPUs in column 'gpu' of every row: {error}.",
            next_step="Correct or remove it.",
        ) from error
    models = sorted({row.get("model") or "" for row in rows if row["gpu"] != "0"})
    return replace(
        cluster,
        node_num=len(sizes),
        gpus_per_node=sizes[0] if len(set(sizes)) == 1 else None,
        gpu_num=sum(sizes),
        gpu_model=models[0] if len(models) == 1 else "",
    )


SOURCE: Final = Source(
    name="openb",
    title="Alibaba's GPU trace of 2023: openb_pod_list_*.csv",
    recognises=_recognises,
    read=_read,
)
