"""Find the times at which checkpoints arrived in a trace.

Evaluation jobs are submitted in batches, one batch per checkpoint.
"""

from collections.abc import Iterable
from typing import Final

from holdfast.core.errors import BadUse

GAP_S: Final = 600.0
"""A pause between submissions of at least this many seconds separates two checkpoints."""
MIN_JOBS: Final = 10
"""A batch with at least this many jobs counts as a checkpoint's evaluation.

The batches of the study have about 60 jobs. Smaller batches are usually trials that a person
started by hand.
"""
MOST: Final = 100
"""The number of checkpoints that are simulated: the first ones of the trace."""


def arrivals_of(jobs: str) -> tuple[float, ...]:
    """Return the arrival times of the checkpoints in a trace, in seconds since the first one.

    Args:
        jobs: job records in a form that `holdfast.trace` recognises.

    Raises:
        BadUse: the records cannot be read, or have no batch of evaluations.
    """
    from holdfast.trace import load

    with load(jobs) as trace:
        typed = "AND type = 'Evaluation'" if trace.has("type") else ""
        table = trace.query(
            f"SELECT epoch(submit_at) AS at_s FROM jobs WHERE submit_at IS NOT NULL AND gpu_num > 0 {typed} ORDER BY 1"
        )
        found = arrivals_s(table["at_s"].tolist())
    if not found:
        raise BadUse(
            f"{jobs} has no {MIN_JOBS} evaluation jobs that were submitted together. Name other job records."
        )
    return found


def arrivals_s(submits_s: Iterable[float]) -> tuple[float, ...]:
    """Return the time of the first submission in each batch, in seconds since the first batch.

    Args:
        submits_s: the submission times of evaluation jobs in seconds, in ascending order.
    """
    batches: list[list[float]] = []
    for at_s in submits_s:
        if batches and at_s - batches[-1][-1] < GAP_S:
            batches[-1].append(at_s)
        else:
            batches.append([at_s])
    first_s = [batch[0] for batch in batches if len(batch) >= MIN_JOBS]
    return tuple(at_s - first_s[0] for at_s in first_s[:MOST])
