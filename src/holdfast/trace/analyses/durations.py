"""Analyze how long jobs run: CDFs of GPU jobs, of CPU jobs, and by workload type."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.core import words
from holdfast.trace.analyses.cumulative import BOTH, Group, cdf_panel, cdf_table, counted, headline
from holdfast.trace.analyses.result import Analysis, Result
from holdfast.trace.analyses.selection import in_order, role, slug, some, types_in_order
from holdfast.trace.charts import Axis, Figure

if TYPE_CHECKING:
    from holdfast.trace.trace import Trace


def durations(trace: "Trace", cluster: str, *, gpu: bool = True, type: str | None = None) -> Group:  # noqa: A002
    """Return the durations in seconds of a cluster's GPU or CPU jobs, optionally of one type."""
    where, parameters = f"cluster = ? AND is_gpu = {gpu}", [cluster]
    if type is not None:
        where, parameters = f"{where} AND type = ?", [cluster, type]
    return Group(
        label=type or cluster,
        cluster=cluster,
        part=type or "",
        counted=counted(trace, "job_durations", "duration_s", where, parameters),
        role=role(trace, cluster),
    )


def gpu_job_duration(trace: "Trace") -> Result:
    """Chart the CDF of GPU job durations, weighted by jobs (study: Fig 2a) and by GPU time.

    All clusters are shown. Columns of the table: `cluster`, `part`, `weight`, `duration_s`,
    `share_at_most`.

    Raises:
        LeftOut: no GPU job has a duration.
    """
    groups = _present([durations(trace, cluster) for cluster in in_order(trace)])
    some(groups, "no GPU job has a duration")
    numbers: dict[str, float] = {}
    for group in groups:
        numbers |= headline(group, "duration_s", kind="gpu_job")
    return Result(
        table=cdf_table(groups, column="duration_s"),
        chart=Figure(
            panels=[cdf_panel(groups, x=_axis(trace, "GPU"), weight=weight) for weight in BOTH]
        ),
        caption=_medians(groups, "GPU job") + _against(groups, numbers) + _half_of_gpu_time(groups),
        numbers=numbers,
    )


def cpu_job_duration(trace: "Trace") -> Result:
    """Chart the CDF of durations of jobs without a GPU, for every cluster (study: appendix).

    Columns of the table: `cluster`, `part`, `weight`, `duration_s`, `share_at_most`.

    Raises:
        LeftOut: no CPU job has a duration.
    """
    groups = _present([durations(trace, cluster, gpu=False) for cluster in in_order(trace)])
    some(groups, "the trace has no CPU job with a duration")
    numbers: dict[str, float] = {}
    for group in groups:
        numbers |= headline(group, "duration_s", kind="cpu_job")
    return Result(
        table=cdf_table(groups, column="duration_s", weights=["jobs"]),
        chart=Figure(panels=[cdf_panel(groups, x=_axis(trace, "CPU"))], columns=1),
        caption=_medians(groups, "CPU job"),
        numbers=numbers,
    )


def duration_by_type(trace: "Trace") -> Result:
    """Chart the CDF of GPU job durations by workload type, weighted by jobs and by GPU time.

    The charts weighted by jobs are the study's Fig 6a and 6c. There is one row of panels per
    cluster. Columns of the table: `cluster`, `part` (the type), `weight`, `duration_s`,
    `share_at_most`.

    Raises:
        LeftOut: no cluster has job types and durations.
    """
    trace.require("type")
    types = types_in_order(
        trace.query(
            f"SELECT DISTINCT type FROM {trace.prepare('job_durations')} WHERE type NOTNULL"
        )["type"]
    )
    by_cluster = [
        _present([durations(trace, cluster, type=kind) for kind in types])
        for cluster in in_order(trace)
    ]
    shown = some(
        [groups for groups in by_cluster if groups], "no GPU job has both a type and a duration"
    )
    everything = [group for groups in shown for group in groups]
    numbers: dict[str, float] = {}
    sentences = []
    for groups in shown:
        for group in groups:
            numbers |= headline(group, "duration_s", kind=group.part)
        by_median = sorted(groups, key=lambda group: group.counted.jobs.median)
        shortest, longest = by_median[0], by_median[-1]
        numbers[f"{slug(longest.cluster)}.type_median_ratio"] = longest.counted.jobs.median / max(
            shortest.counted.jobs.median, 1e-9
        )
        sentence = (
            f"{longest.cluster}: {longest.part} runs longest, a median of "
            f"{words.duration(longest.counted.jobs.median)} (n = {longest.counted.jobs.total:,.0f})"
        )
        if len(groups) > 1:
            sentence += (
                f", {shortest.part} shortest, {words.duration(shortest.counted.jobs.median)} "
                f"(n = {shortest.counted.jobs.total:,.0f})"
            )
        sentences.append(f"{sentence}.")
    return Result(
        table=cdf_table(everything, column="duration_s"),
        chart=Figure(
            panels=[
                cdf_panel(groups, x=_axis(trace, "GPU"), weight=weight, title=groups[0].cluster)
                for groups in shown
                for weight in BOTH
            ]
        ),
        caption=" ".join(sentences),
        numbers=numbers,
    )


def _present(groups: Sequence[Group]) -> list[Group]:
    return [group for group in groups if group.counted.jobs.total > 0]


def _axis(trace: "Trace", kind: str) -> Axis:
    meaning = ", as released" if trace.duration == "released" else ""
    return Axis(label=f"{kind} job duration{meaning} (s)", scale="log", low=1.0)


def _medians(groups: Sequence[Group], what: str) -> str:
    each = [
        f"{words.duration(group.counted.jobs.median)} in {group.cluster} (n = "
        f"{group.counted.jobs.total:,.0f})"
        for group in groups
    ]
    return f"The median {what} runs {', '.join(each)}."


def _against(groups: Sequence[Group], numbers: dict[str, float]) -> str:
    """Return a sentence that compares the median durations with the compared traces.

    The ratios are added to `numbers`.
    """
    medians = [group.counted.jobs.median for group in groups if group.role == "compared"]
    sentence = ""
    for group in groups if medians else ():
        own = group.counted.jobs.median
        if group.role == "compared" or own <= 0:
            continue
        low, high = min(medians) / own, max(medians) / own
        numbers[f"{slug(group.cluster)}.gpu_job.times_shorter_least"] = low
        numbers[f"{slug(group.cluster)}.gpu_job.times_shorter_most"] = high
        reach = f"{low:.1f}" if len(medians) == 1 else f"{low:.1f} to {high:.1f}"
        sentence += f" The compared medians are {reach} times that of {group.cluster}."
    return sentence


def _half_of_gpu_time(groups: Sequence[Group]) -> str:
    each = [
        f"{words.duration(group.counted.gpu_time.reached(0.5))} in {group.cluster}"
        for group in groups
        if group.counted.gpu_time.total > 0
    ]
    return f" Half of the GPU time is of jobs of at most {', '.join(each)}." if each else ""


ANALYSES = (
    Analysis(
        name="gpu_job_duration", section="The cluster and its jobs", title="How long GPU jobs run",
        run=gpu_job_duration, source="Fig 2a",
    ),
    Analysis(
        name="duration_by_type", section="The cluster and its jobs", title="How long GPU jobs run, by type",
        run=duration_by_type, source="Fig 6a, 6c",
    ),
    Analysis(
        name="cpu_job_duration", section="The cluster and its jobs", title="How long CPU jobs run",
        run=cpu_job_duration, source="Appendix",
    ),
)  # fmt: skip
