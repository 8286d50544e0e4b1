"""Analyze how jobs end: shares of final states, by cluster, type and size.

The shares are weighted by jobs and by GPU time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from holdfast.core import words
from holdfast.trace.analyses.result import Analysis, Result
from holdfast.trace.analyses.selection import (
    UNKNOWN,
    in_order,
    named,
    size_label,
    size_of,
    size_slug,
    slug,
    some,
    types_in_order,
)
from holdfast.trace.charts import Axis, Bars, Figure
from holdfast.trace.schema import OUTCOMES
from holdfast.trace.table import Table

if TYPE_CHECKING:
    from holdfast.trace.trace import Trace

Values = npt.NDArray[np.float64]

ENDS = ("completed", "cancelled", "failed", "preempted")
COLUMNS = ("cluster", "part", "outcome", "jobs", "gpu_time_h", "share_of_jobs", "share_of_gpu_time")
MEANING = "TIMEOUT, NODE_FAIL and OUT_OF_MEMORY are failures; jobs without an end are left out"


@dataclass(frozen=True, kw_only=True)
class Ends:
    """Count ended jobs and their GPU time (s) by outcome; arrays are in the order of `ENDS`."""

    jobs: Values
    gpu_time_s: Values
    unfinished: float = 0.0
    """Number of jobs that are not counted: still running or waiting, or of unknown state."""

    def shares(self) -> tuple[Values, Values]:
        """Return each outcome's share of the ended jobs and of their GPU time; 0 without jobs."""
        return self.jobs / max(self.jobs.sum(), 1.0), self.gpu_time_s / max(
            self.gpu_time_s.sum(), 1e-300
        )


def ends_by(
    trace: "Trace", cluster: str, column: str = "''", *, gpu: bool = True
) -> dict[object, Ends]:
    """Return the final states of a cluster's GPU or CPU jobs, by a column of `job_counts`.

    Without a column, all jobs are under the key ''.
    """
    found = trace.query(
        f"SELECT {column} AS part, coalesce(state, '{UNKNOWN}') AS state, sum(n)::DOUBLE AS n, "
        "coalesce(sum(sum_gpu_time_s), 0)::DOUBLE AS gpu_time_s "
        f"FROM {trace.prepare('job_counts')} WHERE cluster = ? AND is_gpu = {gpu} GROUP BY ALL",
        [cluster],
    )
    jobs: dict[object, Values] = {}
    gpu_time_s: dict[object, Values] = {}
    unfinished: dict[object, float] = {}
    for part, state, n, seconds in found.rows():
        jobs.setdefault(part, np.zeros(len(ENDS)))
        gpu_time_s.setdefault(part, np.zeros(len(ENDS)))
        if state in OUTCOMES:
            place = ENDS.index(OUTCOMES[state])
            jobs[part][place] += n
            gpu_time_s[part][place] += seconds
        else:
            unfinished[part] = unfinished.get(part, 0.0) + n
    return {
        part: Ends(
            jobs=jobs[part], gpu_time_s=gpu_time_s[part], unfinished=unfinished.get(part, 0.0)
        )
        for part in jobs
    }


def final_states(trace: "Trace") -> Result:
    """Chart shares of GPU jobs that completed, were cancelled, failed or were preempted.

    The shares are among jobs that ended, weighted by jobs and by GPU time, as in the study's figure
    of job states. Columns of the table: `cluster`, `part`, `outcome`, `jobs`, `gpu_time_h`,
    `share_of_jobs`, `share_of_gpu_time`.

    Raises:
        LeftOut: no GPU job has a final state.
    """
    trace.require("state")
    found = {cluster: ends_by(trace, cluster).get("") for cluster in in_order(trace)}
    ended = {
        cluster: ends for cluster, ends in found.items() if ends is not None and ends.jobs.sum() > 0
    }
    some(list(ended), "no GPU job has a final state")
    sentences = []
    for cluster, ends in ended.items():
        of_jobs, of_time = ends.shares()
        sentence = (
            f"{cluster}: {_in_words(of_jobs)} of {words.plainly(round(ends.jobs.sum()), 'GPU job')}; by GPU time, "
            f"{_in_words(of_time)}"
            if ends.gpu_time_s.sum() > 0
            else f"{cluster}: {_in_words(of_jobs)} of {words.plainly(round(ends.jobs.sum()), 'GPU job')}"
        )
        left_out = f" ({ends.unfinished:,.0f} unfinished left out)" if ends.unfinished else ""
        sentences.append(f"{sentence}{left_out}.")
    rows, numbers = _tidy({(cluster, ""): ends for cluster, ends in ended.items()})
    return Result(
        table=Table.of_rows(COLUMNS, rows),
        chart=Figure(panels=_bars(ended)),
        caption=" ".join([*sentences, f"{MEANING}."]),
        numbers=numbers,
    )


def final_states_by_type(trace: "Trace") -> Result:
    """Chart final states of GPU jobs by workload type, weighted by jobs and by GPU time.

    There is one row of panels per cluster. The table has the columns of `final_states`, where
    `part` is the type.

    Raises:
        LeftOut: no cluster has both types and final states.
    """
    trace.require("state", "type")
    by_cluster: dict[str, dict[str, Ends]] = {}
    for cluster in in_order(trace):
        if trace.has("type", cluster=cluster):
            found = ends_by(trace, cluster, f"coalesce(type, '{UNKNOWN}')")
            by_cluster[cluster] = {
                kind: found[kind] for kind in types_in_order(str(part) for part in found)
            }
    return _by_part(by_cluster, "type")


def final_states_by_size(trace: "Trace") -> Result:
    """Chart final states of GPU jobs by number of GPUs, weighted by jobs and by GPU time.

    Sizes are grouped into buckets that end at powers of two. The table has the columns of
    `final_states`, where `part` is the bucket.

    Raises:
        LeftOut: no GPU job has a final state.
    """
    trace.require("state")
    by_cluster: dict[str, dict[str, Ends]] = {}
    for cluster in in_order(trace):
        buckets: dict[float, list[Ends]] = {}
        for gpu_num, ends in ends_by(trace, cluster, "gpu_num").items():
            buckets.setdefault(size_of(float(str(gpu_num))), []).append(ends)
        by_cluster[cluster] = {
            size_label(size): Ends(
                jobs=np.sum([ends.jobs for ends in buckets[size]], axis=0),
                gpu_time_s=np.sum([ends.gpu_time_s for ends in buckets[size]], axis=0),
                unfinished=sum(ends.unfinished for ends in buckets[size]),
            )
            for size in sorted(buckets)
        }
    return _by_part(by_cluster, "number of GPUs")


def _by_part(by_cluster: Mapping[str, Mapping[str, Ends]], word: str) -> Result:
    flat = {
        (cluster, part): ends
        for cluster, parts in by_cluster.items()
        for part, ends in parts.items()
    }
    flat = {key: ends for key, ends in flat.items() if ends.jobs.sum() > 0}
    flat = {
        key: ends for key, ends in flat.items() if named(part for of, part in flat if of == key[0])
    }
    some(list(flat), f"no GPU job has a final state and a {word}")
    rows, numbers = _tidy(flat)
    panels, sentences = [], []
    failed = ENDS.index("failed")
    for cluster in by_cluster:
        own = {part: ends for (of, part), ends in flat.items() if of == cluster}
        if not own:
            continue
        panels += _bars(own, cluster)
        worst = max(named(own), key=lambda part: own[part].shares()[0][failed])
        wasted = max(named(own), key=lambda part: own[part].gpu_time_s[failed])
        sentence = (
            f"{cluster}: by {word}, {worst} fails most often ({own[worst].shares()[0][failed]:.1%} "
            "of "
            f"{words.plainly(round(own[worst].jobs.sum()), 'job')})"
        )
        if own[wasted].gpu_time_s[failed] > 0:
            sentence += (
                f" and {wasted} loses most ({own[wasted].gpu_time_s[failed] / 3600:,.0f} "
                "GPU h of failed jobs)"
            )
        sentences.append(sentence + ".")
    return Result(
        table=Table.of_rows(COLUMNS, rows),
        chart=Figure(panels=panels),
        caption=" ".join([*sentences, f"{MEANING}."]),
        numbers=numbers,
    )


def _bars(parts: Mapping[str, Ends], title: str = "") -> list[Bars]:
    """Return stacked bars, weighted by jobs and by GPU time.

    The legend omits outcomes that no job has.
    """
    seen = [
        place for place in range(len(ENDS)) if any(ends.jobs[place] > 0 for ends in parts.values())
    ]
    panels = []
    for weight, name in enumerate(("share of jobs", "share of GPU time")):
        shares = {
            part: ends.shares()[weight]
            for part, ends in parts.items()
            if ends.shares()[weight].sum() > 0
        }
        if not shares:
            continue
        n = {
            part: f"n = {parts[part].jobs.sum():,.0f}"
            if weight == 0
            else f"{parts[part].gpu_time_s.sum() / 3600:,.0f} GPU h"
            for part in shares
        }
        panels.append(
            Bars(
                title=title,
                value=Axis(label=name, low=0.0, high=1.0),
                groups=[f"{part} ({n[part]})" for part in shares],
                parts={
                    ENDS[place]: np.array([share[place] for share in shares.values()])
                    for place in seen
                },
                stacked=True,
            )
        )
    return panels


def _tidy(
    parts: Mapping[tuple[str, str], Ends],
) -> tuple[list[tuple[object, ...]], dict[str, float]]:
    rows: list[tuple[object, ...]] = []
    numbers: dict[str, float] = {}
    for (cluster, part), ends in parts.items():
        of_jobs, of_time = ends.shares()
        key = f"{slug(cluster)}.{_kind(part)}"
        for place, outcome in enumerate(ENDS):
            hours = ends.gpu_time_s[place] / 3600
            rows.append(
                (cluster, part, outcome, ends.jobs[place], hours, of_jobs[place], of_time[place])
            )
            numbers[f"{key}.{outcome}_share_of_jobs"] = float(of_jobs[place])
            numbers[f"{key}.{outcome}_share_of_gpu_time"] = float(of_time[place])
    return rows, numbers


def _kind(part: str) -> str:
    if not part:
        return "gpu_job"
    return size_slug(part) if part[0] in "<0123456789" else slug(part)


def _in_words(shares: Sequence[float] | Values) -> str:
    return ", ".join(
        f"{share:.1%} {outcome}"
        for outcome, share in zip(ENDS, np.asarray(shares).tolist(), strict=True)
        if share > 0 or outcome != "preempted"
    )


ANALYSES = (
    Analysis(
        name="final_states", section="How jobs end", title="How jobs end", run=final_states,
        source="figure of job states",
    ),
    Analysis(
        name="final_states_by_type", section="How jobs end", title="How jobs end, by type", run=final_states_by_type
    ),
    Analysis(
        name="final_states_by_size", section="How jobs end", title="How jobs end, by number of GPUs",
        run=final_states_by_size,
    ),
)  # fmt: skip
