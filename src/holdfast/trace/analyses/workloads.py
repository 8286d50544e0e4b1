"""Analyze each workload type's share of the jobs and of the GPU time."""

from typing import TYPE_CHECKING

import numpy as np

from holdfast.core import words
from holdfast.trace.analyses.result import Analysis, Result
from holdfast.trace.analyses.selection import UNKNOWN, in_order, named, slug, some, types_in_order
from holdfast.trace.charts import Axis, Bars, Figure
from holdfast.trace.table import Table

if TYPE_CHECKING:
    from holdfast.trace.trace import Trace


RULE_LABELS = {
    "name": "the job's name",
    "pool": "its pool",
    "user": "its user",
    "habit": "what its user mostly runs",
    "guess": "its size and duration alone",
}
"""The report's words for each origin of a job's type, by the rules of `jobtypes`."""


def workload_shares(trace: "Trace") -> Result:
    """Chart each type's share of GPU jobs and of GPU time (study: Fig 4).

    Jobs without a type are included. There is one panel per cluster. Columns of the table:
    `cluster`, `type`, `jobs`, `gpu_time_h`, `share_of_jobs`, `share_of_gpu_time`.

    Raises:
        LeftOut: no cluster has types of GPU jobs.
    """
    trace.require("type")
    sums = trace.query(
        f"SELECT cluster, coalesce(type, '{UNKNOWN}') AS type, sum(n)::DOUBLE AS n, "
        "coalesce(sum(sum_gpu_time_s), 0)::DOUBLE AS gpu_time_s "
        f"FROM {trace.prepare('job_counts')} WHERE is_gpu GROUP BY ALL"
    )
    rules = trace.query(
        f"SELECT cluster, type_rule, sum(n)::DOUBLE AS n FROM {trace.prepare('job_counts')} "
        "WHERE is_gpu AND type_rule IS NOT NULL GROUP BY ALL ORDER BY n DESC"
    )
    rows, panels, sentences = [], [], []
    numbers: dict[str, float] = {}
    for cluster in in_order(trace):
        own = {row[1]: row[2:] for row in sums.where(cluster=cluster).rows()}
        if not named(own):
            continue
        types = types_in_order(own)
        jobs, gpu_time_s = (
            np.array([own[kind][measure] for kind in types], dtype=float) for measure in (0, 1)
        )
        of_jobs, of_time = jobs / jobs.sum(), gpu_time_s / max(gpu_time_s.sum(), 1e-300)
        for place, kind in enumerate(types):
            rows.append(
                (
                    cluster,
                    kind,
                    jobs[place],
                    gpu_time_s[place] / 3600,
                    of_jobs[place],
                    of_time[place],
                )
            )
            key = f"{slug(cluster)}.{slug(kind)}"
            numbers[f"{key}.n"] = float(jobs[place])
            numbers[f"{key}.share_of_jobs"] = float(of_jobs[place])
            numbers[f"{key}.share_of_gpu_time"] = float(of_time[place])
        panels.append(
            Bars(
                title=(
                    f"{cluster} (n = {words.plainly(round(jobs.sum()), 'GPU job')}, {gpu_time_s.sum() / 3600:,.0f} "
                    "GPU h)"
                ),
                value=Axis(label="share", low=0.0),
                groups=types,
                parts={"jobs": of_jobs, "GPU time": of_time},
            )
        )
        many, much = (int(shares[: len(named(types))].argmax()) for shares in (of_jobs, of_time))
        sentence = (
            f"{cluster}: {types[many]} is {of_jobs[many]:.1%} of {words.plainly(round(jobs.sum()), 'GPU job')} and "
            f"{of_time[many]:.1%} of "
            f"the GPU time"
        )
        if much != many:
            sentence += (
                f"; {types[much]} is {of_jobs[much]:.1%} of jobs and {of_time[much]:.1%} "
                "of GPU time"
            )
        if UNKNOWN in own:
            sentence += f"; the type of {of_jobs[-1]:.1%} of jobs is unknown"
        if by_rule := [
            (rule, n / jobs.sum()) for _, rule, n in rules.where(cluster=cluster).rows()
        ]:
            sentence += "; types were assigned by " + ", ".join(
                f"{RULE_LABELS[rule]} ({share:.1%} of jobs)" for rule, share in by_rule
            )
            numbers |= {
                f"{slug(cluster)}.types_told.{rule}_share": float(share) for rule, share in by_rule
            }
        sentences.append(sentence + ".")
    some(panels, "no GPU job has a type")
    return Result(
        table=Table.of_rows(
            ("cluster", "type", "jobs", "gpu_time_h", "share_of_jobs", "share_of_gpu_time"), rows
        ),
        chart=Figure(panels=panels),
        caption=" ".join(sentences),
        numbers=numbers,
    )


ANALYSES = (
    Analysis(
        name="workload_shares", section="The cluster and its jobs", title="What the cluster is used for",
        run=workload_shares, source="Fig 4",
    ),
)  # fmt: skip
