"""Read PAI (Alibaba, 2020): `pai_task_table.csv`, or AcmeTrace's join of jobs, tasks and instances.

`pai_task_table.csv` has no header. Each row is a task with inst_num instances: job_name, task_name,
inst_num, status, start_time, end_time, plan_cpu, plan_mem, plan_gpu, gpu_type. start_time is the
launch, since the submission is in another table. The GPUs of a row are the sum over all its
instances.

In AcmeTrace's CSV, each row is a task with one of its instances. There are columns of the task, of
the job (suffix _j) and of the instance (suffix _i), and also runtime (the task's end - start),
duration (the instance's end - start), queue (the instance's start - the task's start) and
start_date. The GPUs of a row are only the GPUs of this instance, plan_gpu / 100, which gives the
study's mean of 0.68 and maximum of 8 GPUs. There is no id and no user.

plan_gpu and plan_cpu are hundredths of GPUs and CPUs, and plan_mem is GB, for one instance. Times
are seconds since an unpublished moment. Read as Unix times, they give the right hour of the day and
day of the week at UTC+8, and wrong dates (such as a start_date of 1970). Terminated is the state of
a task that succeeded.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.trace.clusters import Cluster
from holdfast.trace.sources.csv.sql import Columns
from holdfast.trace.sources.csv.text import read_csv
from holdfast.trace.sources.reading import Reading, Source, csv_header
from holdfast.trace.sources.sql import state_sql

if TYPE_CHECKING:
    import duckdb

_TASK: Final[Columns] = {
    "task_name": "VARCHAR", "inst_num": "DOUBLE", "status": "VARCHAR", "start_time": "DOUBLE", "end_time": "DOUBLE",
    "plan_cpu": "DOUBLE", "plan_mem": "DOUBLE", "plan_gpu": "DOUBLE", "gpu_type": "VARCHAR",
}  # fmt: skip
TASK_COLUMNS: Final[Columns] = {"job_name": "VARCHAR", **_TASK}
JOINED_COLUMNS: Final[Columns] = {
    **_TASK, "status_j": "VARCHAR", "start_time_j": "DOUBLE", "end_time_j": "DOUBLE", "runtime": "DOUBLE",
    "status_i": "VARCHAR", "start_time_i": "DOUBLE", "end_time_i": "DOUBLE", "duration": "DOUBLE", "queue": "DOUBLE",
    "start_date": "VARCHAR",
}  # fmt: skip
STATES: Final = {
    "Terminated": "COMPLETED",
    "Failed": "FAILED",
    "Running": "RUNNING",
    "Waiting": "PENDING",
}
CLUSTER: Final = Cluster(
    name="PAI",
    source="pai",
    gpu_num=6742,  # the study, section 2
    utc_offset_h=8.0,
    citation="Alibaba cluster-trace-gpu-v2020: Weng et al., NSDI 2022",
)


def _is_task_table(path: Path) -> bool:
    return path.name.startswith("pai_task_table.csv") and len(csv_header(path)) == len(TASK_COLUMNS)


def _recognises(path: Path) -> bool:
    return _is_task_table(path) or set(JOINED_COLUMNS).issubset(csv_header(path))


def _read(connection: "duckdb.DuckDBPyConnection", path: Path, table: str) -> Reading:
    alone = _is_task_table(path)
    read = read_csv(
        connection,
        path,
        columns=TASK_COLUMNS if alone else JOINED_COLUMNS,
        select=_TASKS if alone else _JOINED,
        table=table,
        has_header=not alone,
    )
    return Reading.of(connection, table, CLUSTER, notes=read.notes(CLUSTER.name))


def _at(seconds: str) -> str:
    return f"make_timestamp(({seconds} * 1e6)::BIGINT)"


_TASKS: Final = f"""
    SELECT 'PAI' AS cluster, job_name || '/' || task_name AS job_id, task_name AS name,
        {state_sql("status", STATES)} AS state, {_at("start_time")} AS start_at, {_at("end_time")} AS end_at,
        end_time - start_time AS run_s, coalesce(plan_gpu, 0) / 100 * inst_num AS gpu_num,
        plan_cpu / 100 * inst_num AS cpu_num, plan_mem * inst_num AS mem_gb, gpu_type AS gpu_model
    FROM source"""
_JOINED: Final = f"""
    SELECT 'PAI' AS cluster, task_name AS name, {state_sql("status", STATES)} AS state,
        {_at("start_time")} AS submit_at, {_at("start_time_i")} AS start_at, {_at("end_time_i")} AS end_at,
        end_time_i - start_time_i AS run_s, start_time_i - start_time AS queue_s, duration AS reported_duration_s,
        coalesce(plan_gpu, 0) / 100 AS gpu_num, plan_cpu / 100 AS cpu_num, plan_mem AS mem_gb, gpu_type AS gpu_model
    FROM source"""

SOURCE: Final = Source(
    name="pai",
    title="Alibaba's PAI: pai_task_table.csv, or AcmeTrace's pai_trace.csv",
    recognises=_recognises,
    read=_read,
)
