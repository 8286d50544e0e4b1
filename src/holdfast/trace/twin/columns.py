"""The columns of a normalised trace that `fit` and `export` read."""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from holdfast.core.errors import BadUse

if TYPE_CHECKING:
    from holdfast.trace.clusters import Cluster
    from holdfast.trace.trace import Trace


def jobs_of(trace: "Trace") -> tuple["Cluster", dict[str, npt.NDArray[Any]]]:
    """The cluster of a trace, and its jobs as NumPy columns, in the order of submission.

    `submit_s` is Unix time; `queue_s` and `duration_s` are seconds, the latter from the start. Columns that the trace
    has not are not among them.

    Raises:
        BadUse: the trace holds several clusters, or has not the times that a twin or a simulator needs.
    """
    names = [name for name in trace.clusters if name not in trace.compared]
    if len(names) != 1:
        raise BadUse(
            f"The trace holds {len(names)} clusters: {', '.join(names)}. Give the jobs of one of them."
        )
    needed = {
        "submit_at": "submit_s",
        "queue_s": "queue_s",
        "run_s": "duration_s",
        "gpu_num": "gpu_num",
    }
    if missing := [column for column in needed if not trace.has(column)]:
        raise BadUse(
            f"The trace has no {' and no '.join(missing)}, without which no jobs can be replayed. Use another."
        )
    optional = {
        "type": "type",
        "state": "state",
        "reason": "reason",
        "username": "user",
        "job_id": "job_id",
    }
    numbers = {"node_num": "node_num", "cpu_num": "cpu_num"}
    selected = [
        "epoch(submit_at) AS submit_s",
        "queue_s",
        "run_s AS duration_s",
        "gpu_num",
        *(
            f"{column} AS {name}"
            for column, name in (optional | numbers).items()
            if trace.has(column)
        ),
    ]
    table = trace.query(
        f"SELECT {', '.join(selected)} FROM jobs WHERE cluster = ? ORDER BY submit_at", [names[0]]
    )
    columns = dict(table.columns)
    for name in numbers.values():
        # A node count that nobody knows is left to the reader's default, which it has for the column alone.
        if name in columns and np.isnan(columns[name].astype(float)).any():
            del columns[name]
    return trace.clusters[names[0]], columns
