"""Make the two tables that open the report: the clusters, and a comparison of their jobs."""

import math
from typing import TYPE_CHECKING

from holdfast.core import words
from holdfast.trace.analyses.cumulative import Counted, counted
from holdfast.trace.analyses.outcomes import ENDS, Ends, ends_by
from holdfast.trace.analyses.queues import queues
from holdfast.trace.analyses.result import Analysis, Result
from holdfast.trace.analyses.selection import capacity_gpus, in_order, slug, some
from holdfast.trace.distribution import Distribution
from holdfast.trace.table import Table

if TYPE_CHECKING:
    from holdfast.trace.trace import Trace

NAN = float("nan")
CLUSTER_COLUMNS = (
    "cluster", "source", "nodes", "gpus_per_node", "gpus", "gpu_model", "gpu_memory_gib", "gpu_tdp_w", "jobs",
    "gpu_jobs", "gpu_time_h", "first_submission", "last_submission", "days", "compared", "citation",
)  # fmt: skip
COMPARISON_COLUMNS = (
    "cluster", "job_num", "cpu_job_num", "gpu_job_num",
    "avg_run_time_gpu_s", "avg_queue_time_gpu_s", "avg_gpu_num", "med_run_time_gpu_s", "med_queue_time_gpu_s",
    "med_gpu_num", "max_run_time_gpu_s", "max_gpu_num",
    "complete_rate_gpu", "cancel_rate_gpu", "fail_rate_gpu", "preempt_rate_gpu",
    "complete_gpu_time_s", "cancel_gpu_time_s", "fail_gpu_time_s", "preempt_gpu_time_s",
    "complete_rate_gpu_time", "cancel_rate_gpu_time", "fail_rate_gpu_time", "preempt_rate_gpu_time",
    "avg_run_time_cpu_s", "avg_queue_time_cpu_s", "med_run_time_cpu_s", "med_queue_time_cpu_s",
    "complete_rate_cpu", "cancel_rate_cpu", "fail_rate_cpu", "preempt_rate_cpu",
)  # fmt: skip
"""Columns of AcmeTrace's cluster_summary.csv, with units, and a column for preempted jobs."""


def cluster_table(trace: "Trace") -> Result:
    """Tabulate the clusters: nodes, GPUs and the time covered (study: Table 1).

    Unknown values are missing. The first and last submission are UTC times in ISO 8601, and `days`
    is the time between them.

    Raises:
        LeftOut: the trace has no job.
    """
    sums = trace.query(
        "SELECT cluster, sum(n)::DOUBLE AS n, coalesce(sum(n) FILTER (is_gpu), 0)::DOUBLE AS "
        "n_gpu, "
        "coalesce(sum(sum_gpu_time_s), 0)::DOUBLE / 3600 AS gpu_time_h, "
        "strftime(min(min_submit_at), '%Y-%m-%dT%H:%M:%S') AS first_at, "
        "strftime(max(max_submit_at), '%Y-%m-%dT%H:%M:%S') AS last_at, "
        "epoch(max(max_submit_at) - min(min_submit_at)) / 86400 AS days "
        f"FROM {trace.prepare('job_counts')} GROUP BY cluster"
    )
    jobs_of = {str(row[0]): row[1:] for row in sums.rows()}
    rows, sentences = [], []
    numbers: dict[str, float] = {}
    for name in in_order(trace):
        if name not in jobs_of:
            continue
        cluster, (jobs, gpu_jobs, gpu_time_h, first, last, days) = (
            trace.clusters[name],
            jobs_of[name],
        )
        gpus = capacity_gpus(trace, name)
        memory_gib = None if cluster.gpu_memory_mib is None else cluster.gpu_memory_mib / 1024
        known = (cluster.node_num, cluster.gpus_per_node, gpus)
        rows.append(
            (
                name, cluster.source, *(NAN if value is None else value for value in known), cluster.gpu_model,
                NAN if memory_gib is None else memory_gib, NAN if cluster.gpu_tdp_w is None else cluster.gpu_tdp_w,
                jobs, gpu_jobs, gpu_time_h, first, last, days, "yes" if name in trace.compared else "no",
                cluster.citation,
            )
        )  # fmt: skip
        numbers |= {
            f"{slug(name)}.n": jobs,
            f"{slug(name)}.gpu_time_h": gpu_time_h,
            f"{slug(name)}.days": days,
        }
        if gpus is not None:
            numbers[f"{slug(name)}.gpus"] = gpus
        size = "" if gpus is None else f"{words.plainly(round(gpus), 'GPU')}, "
        covered = "" if first is None else f" submitted from {str(first)[:10]} to {str(last)[:10]}"
        number = words.plainly(round(jobs), "job")
        sentences.append(f"{name}: {size}{number}, {gpu_jobs:,.0f} of them with GPUs{covered}.")
    some(rows, "the trace has no job")
    return Result(
        table=Table.of_rows(CLUSTER_COLUMNS, rows),
        chart=None,
        caption=" ".join(sentences),
        numbers=numbers,
    )


def comparison_table(trace: "Trace") -> Result:
    """Compare the clusters' jobs: counts, run and queue times, GPUs, final states (study: Table 2).

    Columns are as in AcmeTrace's cluster_summary.csv, but times are in seconds, and rates are
    shares of the jobs that ended. Unknown values are missing.

    Raises:
        LeftOut: the trace has no job.
    """
    rows = []
    numbers: dict[str, float] = {}
    for name in in_order(trace):
        row = _row(trace, name)
        if row["job_num"]:
            rows.append((name, *row.values()))
            numbers |= {
                f"{slug(name)}.{column}": value
                for column, value in row.items()
                if not math.isnan(value)
            }
    some(rows, "the trace has no job")
    table = Table.of_rows(COMPARISON_COLUMNS, rows)
    columns = ("cluster", "gpu_job_num", "avg_run_time_gpu_s", "med_run_time_gpu_s", "avg_gpu_num")
    sentences = [
        f"{name}: {words.plainly(round(gpu_jobs), 'GPU job')}, none of a known run time."
        if math.isnan(mean)
        else f"{name}: {words.plainly(round(gpu_jobs), 'GPU job runs', 'GPU jobs run')} "
        f"{words.duration(mean)} on average (median {words.duration(median)}) on {gpus:.3g} GPUs."
        for name, gpu_jobs, mean, median, gpus in zip(
            *(table[column].tolist() for column in columns), strict=True
        )
    ]
    return Result(
        table=table,
        chart=None,
        caption=" ".join([*sentences, "Rates are of the jobs that ended."]),
        numbers=numbers,
    )


def _row(trace: "Trace", name: str) -> dict[str, float]:
    """Return the row of a cluster, in the order of `COMPARISON_COLUMNS`."""
    (total, of_cpu, of_gpu) = next(
        trace.query(
            "SELECT coalesce(sum(n), 0)::DOUBLE AS n, coalesce(sum(n) FILTER (NOT is_gpu), "
            "0)::DOUBLE AS cpu, "
            "coalesce(sum(n) FILTER (is_gpu), 0)::DOUBLE AS gpu FROM "
            f"{trace.prepare('job_counts')} WHERE cluster = ?",
            [name],
        ).rows()
    )
    runs = {gpu: _runs(trace, name, gpu=gpu).jobs for gpu in (True, False)}
    waits = {gpu: queues(trace, name, gpu=gpu).jobs for gpu in (True, False)}
    gpus = counted(trace, "job_counts", "gpu_num", "cluster = ? AND is_gpu", [name]).jobs
    ends = {gpu: ends_by(trace, name, gpu=gpu).get("") for gpu in (True, False)}
    values = [
        total, of_cpu, of_gpu,
        runs[True].mean, waits[True].mean, gpus.mean, runs[True].median, waits[True].median,
        gpus.median, _greatest(runs[True]), _greatest(gpus),
        *_rates(ends[True])[0], *_gpu_time(ends[True]), *_rates(ends[True])[1],
        runs[False].mean, waits[False].mean, runs[False].median, waits[False].median,
        *_rates(ends[False])[0],
    ]  # fmt: skip
    return dict(zip(COMPARISON_COLUMNS[1:], values, strict=True))


def _runs(trace: "Trace", name: str, *, gpu: bool) -> Counted:
    return counted(trace, "job_durations", "duration_s", f"cluster = ? AND is_gpu = {gpu}", [name])


def _rates(ends: Ends | None) -> tuple[list[float], list[float]]:
    nothing = [NAN] * len(ENDS)
    if ends is None or ends.jobs.sum() == 0:
        return nothing, nothing
    of_jobs, of_time = ends.shares()
    return of_jobs.tolist(), of_time.tolist() if ends.gpu_time_s.sum() > 0 else nothing


def _gpu_time(ends: Ends | None) -> list[float]:
    return [NAN] * len(ENDS) if ends is None or ends.jobs.sum() == 0 else ends.gpu_time_s.tolist()


def _greatest(distribution: Distribution) -> float:
    return float(distribution.values[-1]) if len(distribution.values) else NAN


ANALYSES = (
    Analysis(
        name="clusters", section="The cluster and its jobs", title="The clusters", run=cluster_table, source="Table 1"
    ),
    Analysis(
        name="comparison", section="The cluster and its jobs", title="The traces side by side",
        run=comparison_table, source="Table 2",
    ),
)  # fmt: skip
