"""Analyze how long jobs wait from submission to start: overall, by type, by size and by pool."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.core import words
from holdfast.trace.analyses.cumulative import (
    BOTH,
    Counted,
    Group,
    cdf_panel,
    cdf_table,
    counted,
    headline,
)
from holdfast.trace.analyses.result import Analysis, Result
from holdfast.trace.analyses.selection import (
    OTHERS,
    UNKNOWN,
    in_order,
    named,
    role,
    size_label,
    size_of,
    size_slug,
    slug,
    some,
    types_in_order,
)
from holdfast.trace.charts import Axis, Figure

if TYPE_CHECKING:
    from holdfast.trace.trace import Trace

NONE_WAITED = "no GPU job has both a time of submission and one of start"


def queues(
    trace: "Trace",
    cluster: str,
    *,
    split: str = "type",
    parts: Sequence[str] | None = None,
    gpu: bool = True,
) -> Counted:
    """Return the seconds that a cluster's GPU or CPU jobs waited.

    Args:
        trace: the trace.
        cluster: one of the trace's clusters.
        split: the column that `parts` refers to: `type`, `pool` or `gpu_num`.
        parts: count only jobs whose `split` is one of these; a missing value is `UNKNOWN`. None
            counts all jobs.
        gpu: True for GPU jobs, False for CPU jobs.
    """
    where = f"cluster = ? AND split = ? AND is_gpu = {gpu}"
    parameters: list[object] = [cluster, split]
    if parts is not None:
        where += f" AND list_contains(?, coalesce(part, '{UNKNOWN}'))"
        parameters.append(list(parts))
    return counted(trace, "job_queues", "queue_s", where, parameters)


def queue(trace: "Trace") -> Result:
    """Chart the CDF of the time that GPU jobs waited, weighted by jobs and by their later GPU time.

    All clusters share a panel. CPU jobs appear only in the named numbers. Columns of the table:
    `cluster`, `part`, `weight`, `queue_s`, `share_at_most`.

    Raises:
        LeftOut: no GPU job has both a submission time and a start time.
    """
    groups = []
    numbers: dict[str, float] = {}
    for cluster in in_order(trace):
        of_cpu = queues(trace, cluster, gpu=False)
        if of_cpu.jobs.total > 0:
            numbers |= headline(
                Group(label="", cluster=cluster, counted=of_cpu), "queue_s", kind="cpu_job"
            )
        group = Group(
            label=cluster,
            cluster=cluster,
            counted=queues(trace, cluster),
            role=role(trace, cluster),
        )
        if group.counted.jobs.total > 0:
            groups.append(group)
            numbers |= headline(group, "queue_s", kind="gpu_job")
    some(groups, NONE_WAITED)
    each = [
        f"{words.duration(group.counted.jobs.median)} in {group.cluster} (mean "
        f"{words.duration(group.counted.jobs.mean)}, n = {group.counted.jobs.total:,.0f})"
        for group in groups
    ]
    return Result(
        table=cdf_table(groups, column="queue_s"),
        chart=Figure(panels=[cdf_panel(groups, x=_axis(), weight=weight) for weight in BOTH]),
        caption=(
            f"The median GPU job waits {', '.join(each)}; what waited less than a second is "
            "drawn at 1 s."
        ),
        numbers=numbers,
    )


def queue_by_type(trace: "Trace") -> Result:
    """Chart the CDF of the time that GPU jobs waited by type, weighted by jobs and by GPU time.

    The charts weighted by jobs are the study's Fig 6b and 6d. There is one row of panels per
    cluster. Columns of the table: `cluster`, `part` (the type), `weight`, `queue_s`,
    `share_at_most`.

    Raises:
        LeftOut: no cluster has types, or no job has both a submission time and a start time.
    """
    trace.require("type")
    return _by_part(trace, "type", "type")


def queue_by_size(trace: "Trace") -> Result:
    """Chart the CDF of the time that GPU jobs waited, by number of GPUs in power-of-two buckets.

    Columns of the table: `cluster`, `part` (the bucket), `weight`, `queue_s`, `share_at_most`.

    Raises:
        LeftOut: no GPU job has both a submission time and a start time.
    """
    return _by_part(trace, "gpu_num", "number of GPUs")


def queue_by_pool(trace: "Trace", *, most: int = 8) -> Result:
    """Chart the CDF of the time that GPU jobs waited, by pool.

    The pools with the most jobs have a curve each, at most `most` of them. All other pools share
    one curve. Columns of the table: `cluster`, `part` (the pool), `weight`, `queue_s`,
    `share_at_most`.

    Raises:
        LeftOut: no cluster has pools, or no job has both a submission time and a start time.
    """
    trace.require("pool")
    return _by_part(trace, "pool", "pool", most=most)


def _by_part(trace: "Trace", split: str, word: str, *, most: int | None = None) -> Result:
    by_cluster = [
        _groups(trace, cluster, split, most)
        for cluster in in_order(trace)
        if trace.has(split, cluster=cluster)
    ]
    shown = [groups for groups in by_cluster if named(group.part for group in groups)]
    some(shown, f"{NONE_WAITED}, and a {word}")
    numbers: dict[str, float] = {}
    sentences = []
    for groups in shown:
        for group in groups:
            numbers |= headline(group, "queue_s", kind=_kind(split, group.part))
        by_mean = sorted(
            (group for group in groups if named([group.part])),
            key=lambda group: group.counted.jobs.mean,
        )
        shortest, longest = by_mean[0], by_mean[-1]
        sentence = (
            f"{longest.cluster}: by {word}, {longest.part} waits longest (mean "
            f"{words.duration(longest.counted.jobs.mean)}, median "
            f"{words.duration(longest.counted.jobs.median)}, "
            f"n = {longest.counted.jobs.total:,.0f})"
        )
        if len(by_mean) > 1:
            sentence += (
                f", {shortest.part} least (mean {words.duration(shortest.counted.jobs.mean)}, "
                f"n = {shortest.counted.jobs.total:,.0f})"
            )
        sentences.append(f"{sentence}.")
    return Result(
        table=cdf_table([group for groups in shown for group in groups], column="queue_s"),
        chart=Figure(
            panels=[
                cdf_panel(groups, x=_axis(), weight=weight, title=groups[0].cluster)
                for groups in shown
                for weight in BOTH
            ]
        ),
        caption=" ".join(sentences),
        numbers=numbers,
    )


def _groups(trace: "Trace", cluster: str, split: str, most: int | None) -> list[Group]:
    found = trace.query(
        f"SELECT coalesce(part, '{UNKNOWN}') AS part, sum(n)::DOUBLE AS n FROM "
        f"{trace.prepare('job_queues')} "
        "WHERE cluster = ? AND split = ? AND is_gpu GROUP BY ALL ORDER BY n DESC, part",
        [cluster, split],
    )
    parts = [str(part) for part in found["part"].tolist()]
    if split == "type":
        gathered = {part: [part] for part in types_in_order(parts)}
    else:
        gathered = {}
        for place, part in enumerate(sorted(parts, key=float) if split == "gpu_num" else parts):
            name = size_label(size_of(float(part))) if split == "gpu_num" else part
            gathered.setdefault(name if most is None or place < most else OTHERS, []).append(part)
    return [
        Group(
            label=name,
            cluster=cluster,
            part=name,
            counted=queues(trace, cluster, split=split, parts=members),
            role=role(trace, cluster),
        )
        for name, members in gathered.items()
    ]


def _kind(split: str, part: str) -> str:
    """Return the name of a part within the key of a number, such as `gpus_5_8` or `pool_vc1`."""
    if split == "gpu_num":
        return size_slug(part)
    return slug(part) if split == "type" else f"pool_{slug(part)}"


def _axis() -> Axis:
    return Axis(label="queue time of GPU jobs (s)", scale="log", low=1.0)


ANALYSES = (
    Analysis(name="queue", section="Waiting and capacity", title="How long GPU jobs wait", run=queue),
    Analysis(
        name="queue_by_type", section="Waiting and capacity", title="How long GPU jobs wait, by type",
        run=queue_by_type, source="Fig 6b, 6d",
    ),
    Analysis(
        name="queue_by_size", section="Waiting and capacity", title="How long GPU jobs wait, by number of GPUs",
        run=queue_by_size,
    ),
    Analysis(
        name="queue_by_pool", section="Waiting and capacity", title="How long GPU jobs wait, by pool",
        run=queue_by_pool,
    ),
)  # fmt: skip
