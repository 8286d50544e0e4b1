"""The normalised tables: what every adapter makes of its source, and every analysis reads.

Times are `TIMESTAMP`, UTC without a zone. A column that a source does not have is absent from what its adapter makes
and NULL in the view `jobs`; `Trace.has` tells which. Sizes of GPUs are GPUs (0.5 is half of one), times seconds.
"""

from typing import Final

JOB_COLUMNS: Final = {
    "cluster": "VARCHAR",  # which cluster it ran on; never NULL
    "job_id": "VARCHAR",
    "attempt": "INTEGER",  # 0, 1 … where a job was started again under its id
    "name": "VARCHAR",
    "username": "VARCHAR",
    "pool": "VARCHAR",  # virtual cluster, partition, namespace or queue: what quota it ran on
    "type": "VARCHAR",  # one of TYPES, NULL where unknown
    "type_rule": "VARCHAR",  # how `holdfast.trace.jobtypes` told the type; absent where the source has types
    "state": "VARCHAR",  # one of STATES
    "reason": "VARCHAR",  # why it failed, where the source knows: a reason of the study's Table 3, or its own word
    "exit_code": "INTEGER",
    "submit_at": "TIMESTAMP",
    "start_at": "TIMESTAMP",  # NULL: has not started
    "end_at": "TIMESTAMP",  # NULL: has not ended
    "run_s": "DOUBLE",  # end - start
    "queue_s": "DOUBLE",  # start - submit
    "reported_duration_s": "DOUBLE",  # what the source itself calls duration, whatever it counts
    "reported_gpu_time_s": "DOUBLE",
    "gpu_num": "DOUBLE",  # GPUs held; 0: a CPU job
    "node_num": "INTEGER",
    "cpu_num": "DOUBLE",
    "mem_gb": "DOUBLE",  # of the whole job
    "gpu_model": "VARCHAR",
    "nodes": "VARCHAR[]",  # names of its nodes
    "gpus": "VARCHAR[]",  # names of its GPUs as telemetry has them: NODE-INDEX
    "zone_offset": "VARCHAR",  # of the submission time as the source wrote it, such as +08:00; '' where it wrote none
}
"""Column of a job and its DuckDB type. One row an attempt."""

TYPES: Final = ("Pretrain", "Evaluation", "SFT", "MLLM", "Debug", "Other")
"""Types of workload, the study's (section 3.2), in its order of the figures."""

STATES: Final = (
    "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "RUNNING", "PENDING",
    "UNKNOWN",
)  # fmt: skip
"""Final states, Slurm's words; adapters translate."""

OUTCOMES: Final = {
    "COMPLETED": "completed",
    "CANCELLED": "cancelled",
    "FAILED": "failed",
    "TIMEOUT": "failed",
    "NODE_FAIL": "failed",
    "OUT_OF_MEMORY": "failed",
    "PREEMPTED": "preempted",
}
"""How a job ended, as the study counts (TIMEOUT and NODE_FAIL are failures: AcmeTrace, note 1); others have not."""

DEVICE_COLUMNS: Final = {
    "cluster": "VARCHAR",
    "device": "INTEGER",
    "name": "VARCHAR",
    "node": "VARCHAR",
    "gpu": "INTEGER",  # index on its node; NULL: the device is a node
}

DURATIONS: Final = ("run", "released")
"""What `duration_s` of the view means: `run`, end - start whatever the source calls duration; `released`, the
source's own column, as the study's figures have it (Kalos' counts the queue)."""


def jobs_view(tables: dict[str, frozenset[str]], *, duration: str) -> str:
    """SQL of the view `jobs`: the adapters' tables together, with what is derived.

    Args:
        tables: name of each table and the columns of `JOB_COLUMNS` that it has.
        duration: one of `DURATIONS`.

    Derived: `duration_s` (see `DURATIONS`), `gpu_time_s` = GPUs times `duration_s`, `is_gpu`, `outcome` (one of
    `OUTCOMES`, or `unfinished`).
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
