"""Define the normalised tables, which every adapter writes and every analysis reads.

Times have the type `TIMESTAMP` and are in UTC. A column that a source lacks is missing from the
adapter's table and NULL in the view `jobs`, and `Trace.has` returns False for it. Sizes are numbers
of GPUs, where 0.5 is half a GPU. Durations are in seconds.
"""

from typing import Final

JOB_COLUMNS: Final = {
    "cluster": "VARCHAR",  # name of the cluster; never NULL
    "job_id": "VARCHAR",
    "attempt": "INTEGER",  # 0, 1 … counts restarts under one id
    "name": "VARCHAR",
    "username": "VARCHAR",
    "pool": "VARCHAR",  # virtual cluster, partition, namespace or queue that holds the quota
    "type": "VARCHAR",  # one of TYPES, NULL where unknown
    # how `holdfast.trace.jobtypes` assigned the type; absent where the source has types
    "type_rule": "VARCHAR",
    "state": "VARCHAR",  # one of STATES
    # failure reason from the source: a reason of the study's Table 3, or the source's own word
    "reason": "VARCHAR",
    "exit_code": "INTEGER",
    "submit_at": "TIMESTAMP",
    "start_at": "TIMESTAMP",  # NULL: has not started
    "end_at": "TIMESTAMP",  # NULL: has not ended
    "run_s": "DOUBLE",  # end - start
    "queue_s": "DOUBLE",  # start - submit
    "reported_duration_s": "DOUBLE",  # the source's own duration, with or without queue time
    "reported_gpu_time_s": "DOUBLE",
    "gpu_num": "DOUBLE",  # GPUs held; 0: a CPU job
    "node_num": "INTEGER",
    "cpu_num": "DOUBLE",
    "mem_gb": "DOUBLE",  # host memory of the whole job
    "gpu_model": "VARCHAR",
    "nodes": "VARCHAR[]",  # names of the job's nodes
    "gpus": "VARCHAR[]",  # names of the job's GPUs as in telemetry: NODE-INDEX
    # UTC offset of the submission time in the source, such as +08:00; '' where the source has none
    "zone_offset": "VARCHAR",
}
"""Name and DuckDB type of each column of jobs. A job has one row per attempt."""

TYPES: Final = ("Pretrain", "Evaluation", "SFT", "MLLM", "Debug", "Other")
"""Workload types of the study (section 3.2), in the order of its figures."""

STATES: Final = (
    "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "RUNNING", "PENDING",
    "UNKNOWN",
)  # fmt: skip
"""Final states, with Slurm's names; adapters convert other names to these."""

OUTCOMES: Final = {
    "COMPLETED": "completed",
    "CANCELLED": "cancelled",
    "FAILED": "failed",
    "TIMEOUT": "failed",
    "NODE_FAIL": "failed",
    "OUT_OF_MEMORY": "failed",
    "PREEMPTED": "preempted",
}
"""Outcome of each final state.

As in the study, TIMEOUT and NODE_FAIL count as failures (AcmeTrace, note 1). Jobs in other states
have not ended.
"""

DEVICE_COLUMNS: Final = {
    "cluster": "VARCHAR",
    "device": "INTEGER",
    "name": "VARCHAR",
    "node": "VARCHAR",
    "gpu": "INTEGER",  # index on its node; NULL: the device is a node
}

DURATIONS: Final = ("run", "released")
"""Definitions of `duration_s` in the view `jobs`.

`run` is end minus start, for every source. `released` is the source's own column, which the study's
figures use (Kalos' column includes the queue time).
"""


def jobs_view(tables: dict[str, frozenset[str]], *, duration: str) -> str:
    """Return SQL that creates the view `jobs`, which combines all adapters' tables.

    The view adds the columns `duration_s` (see `DURATIONS`), `gpu_time_s` (GPUs times
    `duration_s`), `is_gpu`, and `outcome` (one of `OUTCOMES`, or `unfinished`).

    Args:
        tables: for each table, its name and the columns of `JOB_COLUMNS` that it has.
        duration: one of `DURATIONS`.
    """
    parts = []
    for table, present in tables.items():
        run = "run_s" if "run_s" in present else "NULL::DOUBLE"
        own = f"coalesce(reported_duration_s, {run})" if "reported_duration_s" in present else run
        columns = [
            f'"{name}"' if name in present else f'NULL::{kind} AS "{name}"'
            for name, kind in JOB_COLUMNS.items()
        ]
        chosen = own if duration == "released" else run
        parts.append(f"SELECT {', '.join(columns)}, {chosen} AS duration_s FROM {table}")
    outcome = " ".join(f"WHEN '{state}' THEN '{outcome}'" for state, outcome in OUTCOMES.items())
    return (
        "CREATE OR REPLACE VIEW jobs AS SELECT *, gpu_num * duration_s AS gpu_time_s, gpu_num > 0 AS is_gpu, "
        f"CASE state {outcome} ELSE 'unfinished' END AS outcome FROM ({' UNION ALL '.join(parts)})"
    )
