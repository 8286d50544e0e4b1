"""Run all analyses on a trace, in the order of the report."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.trace.analyses.capacity import beyond_capacity
from holdfast.trace.analyses.catalogue import Assumptions, catalogue
from holdfast.trace.analyses.result import Analysis
from holdfast.trace.errors import LeftOut
from holdfast.trace.findings import findings
from holdfast.trace.report.model import Entry, Progress, Read, Report

if TYPE_CHECKING:
    from holdfast.trace.trace import Trace


def characterize(
    trace: "Trace",
    *,
    analyses: Sequence[Analysis] | None = None,
    assumptions: Assumptions | None = None,
    title: str = "",
    progress: Progress | None = None,
) -> Report:
    """Run all analyses on a trace.

    If the trace lacks the input of an analysis, the report states the reason in place of a result.

    Args:
        trace: the trace.
        analyses: the analyses, in the order of the report; None means all analyses.
        assumptions: values that no trace contains; None means the study's values.
        title: title of the page; by default the names of the clusters.
        progress: called before each analysis.
    """
    assumed = assumptions or Assumptions()
    analyses = catalogue(assumed) if analyses is None else analyses
    entries = []
    for done, analysis in enumerate(analyses):
        if progress is not None:
            progress(analysis.title, done, len(analyses))
        try:
            entries.append(Entry(analysis=analysis, result=analysis.run(trace)))
        except LeftOut as why:
            entries.append(Entry(analysis=analysis, left_out=str(why)))
    numbers = {
        name: number
        for entry in entries
        if entry.result
        for name, number in entry.result.numbers.items()
    }
    main = [name for name in trace.clusters if name not in trace.compared]
    return Report(
        title=title or f"Where the GPU time of {_listed(main)} goes",
        clusters=_read(trace),
        notes=[*trace.notes, *beyond_capacity(trace)],
        findings=findings(numbers, main),
        entries=entries,
        parameters=assumed.in_words(),
        duration=trace.duration,
    )


def _read(trace: "Trace") -> list[Read]:
    try:
        table = trace.prepare("job_counts")
    except LeftOut:
        return []
    found = trace.query(
        "SELECT cluster, sum(n)::DOUBLE AS n, coalesce(sum(n) FILTER (is_gpu), 0)::DOUBLE AS n_gpu, "
        "coalesce(sum(sum_gpu_time_s), 0)::DOUBLE AS gpu_time_s, "
        "strftime(min(min_submit_at), '%Y-%m-%dT%H:%M:%SZ') AS first, "
        f"strftime(max(max_submit_at), '%Y-%m-%dT%H:%M:%SZ') AS last FROM {table} GROUP BY cluster"
    )
    rows = {str(name): rest for name, *rest in found.rows()}
    return [
        Read(
            cluster=cluster,
            jobs=int(rows[name][0]),
            gpu_jobs=int(rows[name][1]),
            gpu_time_s=float(rows[name][2]),
            first=str(rows[name][3] or ""),
            last=str(rows[name][4] or ""),
            compared=name in trace.compared,
        )
        for name, cluster in trace.clusters.items()
        if name in rows
    ]


def _listed(names: Sequence[str]) -> str:
    """Join names to a phrase: `Seren`, `Seren and Kalos`, `A, B and C`."""
    return (
        " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))) if names else "the cluster"
    )
