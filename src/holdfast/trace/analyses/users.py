"""Analyze each user's share of GPU time and jobs, and their waits and final states."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from holdfast.core import words
from holdfast.trace.analyses.result import Analysis, Result
from holdfast.trace.analyses.selection import UNKNOWN, in_order, role, slug, some
from holdfast.trace.charts import Axis, Bars, Figure, Lines, Series
from holdfast.trace.schema import OUTCOMES
from holdfast.trace.table import Table

if TYPE_CHECKING:
    from holdfast.trace.trace import Trace

Values = npt.NDArray[np.float64]

SHOWN = 20
"""Number of users shown by name; the others are combined as `others`."""
NO_USERS = "no GPU job has a user"


@dataclass(frozen=True, kw_only=True)
class Users:
    """Hold the count, GPU time and waits of each user's GPU jobs.

    Each array has one entry per user. The user with the most GPU time comes first.
    """

    names: list[str]
    jobs: Values
    gpu_time_s: Values
    queued: Values
    """Number of jobs with a known wait."""
    queue_s: Values
    """Sum of the waits in seconds."""
    ended: Values
    """Number of jobs with a final state."""
    cancelled: Values
    failed: Values

    def shown(self, most: int) -> "Users":
        """Keep the first `most` users, and combine all others into one."""
        if len(self.names) <= most:
            return self

        def gathered(values: Values) -> Values:
            return np.append(values[:most], values[most:].sum())

        return Users(
            names=[*self.names[:most], f"{len(self.names) - most:,} others"],
            jobs=gathered(self.jobs),
            gpu_time_s=gathered(self.gpu_time_s),
            queued=gathered(self.queued),
            queue_s=gathered(self.queue_s),
            ended=gathered(self.ended),
            cancelled=gathered(self.cancelled),
            failed=gathered(self.failed),
        )


def users_of(trace: "Trace", cluster: str) -> Users | None:
    """Return the users of a cluster; None if it has no GPU jobs or no user names."""
    if not trace.has("username", cluster=cluster):
        return None

    def among(outcome: str) -> str:
        return ", ".join(f"'{state}'" for state, of in OUTCOMES.items() if outcome in (of, "any"))

    table = trace.query(
        f"""
        SELECT coalesce(username, '{UNKNOWN}') AS username, sum(n)::DOUBLE AS n,
            coalesce(sum(sum_gpu_time_s), 0)::DOUBLE AS gpu_time_s,
            sum(n_queued)::DOUBLE AS n_queued, coalesce(sum(sum_queue_s), 0)::DOUBLE AS queue_s,
            coalesce(sum(n) FILTER (state IN ({among("any")})), 0)::DOUBLE AS n_ended,
            coalesce(sum(n) FILTER (state IN ({among("cancelled")})), 0)::DOUBLE AS n_cancelled,
            coalesce(sum(n) FILTER (state IN ({among("failed")})), 0)::DOUBLE AS n_failed
        FROM {trace.prepare("job_users")} WHERE cluster = ? AND is_gpu
        GROUP BY ALL ORDER BY gpu_time_s DESC, n DESC, username
        """,
        [cluster],
    )
    if not len(table):
        return None
    return Users(
        names=[str(name) for name in table["username"].tolist()],
        jobs=table["n"],
        gpu_time_s=table["gpu_time_s"],
        queued=table["n_queued"],
        queue_s=table["queue_s"],
        ended=table["n_ended"],
        cancelled=table["n_cancelled"],
        failed=table["n_failed"],
    )


def lorenz(amounts: Values) -> tuple[Values, Values]:
    """Return the Lorenz curve of amounts, the largest amount first.

    Returns:
        Shares of the users, and the share of the total that they hold together, both from 0 to 1.
    """
    ordered = np.sort(amounts)[::-1]
    have = np.append(0.0, np.cumsum(ordered)) / max(float(ordered.sum()), 1e-300)
    return np.linspace(0.0, 1.0, len(have)), have


def gini(amounts: Values) -> float:
    """Return the Gini coefficient: 0 if all amounts are equal, near 1 if one user has all."""
    people, have = lorenz(amounts)
    return float(2 * np.trapezoid(have, people) - 1)


def user_shares(trace: "Trace", *, most: int = SHOWN) -> Result:
    """Chart how GPU time and GPU jobs are spread over users: Lorenz curves and the largest shares.

    Columns of the table: `cluster`, `user`, `jobs`, `gpu_time_h`, `share_of_jobs`,
    `share_of_gpu_time`. It has the `most` users with the most GPU time, and one row for all others.

    Raises:
        LeftOut: no cluster names its users.
    """
    people = _people(trace)
    rows: list[tuple[object, ...]] = []
    curves: dict[str, list[Series]] = {"GPU time": [], "jobs": []}
    bars, sentences = [], []
    numbers: dict[str, float] = {}
    for cluster, users in people.items():
        shown = users.shown(most)
        of_jobs, of_time = users.jobs.sum(), max(float(users.gpu_time_s.sum()), 1e-300)
        rows += [
            (cluster, name, jobs, seconds / 3600, jobs / of_jobs, seconds / of_time)
            for name, jobs, seconds in zip(
                shown.names, shown.jobs.tolist(), shown.gpu_time_s.tolist(), strict=True
            )
        ]
        for weight, amounts in (("GPU time", users.gpu_time_s), ("jobs", users.jobs)):
            x, y = lorenz(amounts)
            label = f"{cluster} (n = {words.plainly(len(users.names), 'person', 'people')})"
            curves[weight].append(Series(label=label, x=x, y=y, role=role(trace, cluster)))
        if cluster not in trace.compared:
            bars.append(
                Bars(
                    title=(
                        f"{cluster} (n = {words.plainly(round(of_jobs), 'GPU job')}, "
                        f"{users.gpu_time_s.sum() / 3600:,.0f} GPU h)"
                    ),
                    value=Axis(label="share", low=0.0),
                    groups=shown.names,
                    parts={"jobs": shown.jobs / of_jobs, "GPU time": shown.gpu_time_s / of_time},
                )
            )
        tenth = max(1, round(len(users.names) / 10))
        top = float(lorenz(users.gpu_time_s)[1][tenth])
        key = f"{slug(cluster)}.users"
        numbers |= {
            f"{key}.n": float(len(users.names)),
            f"{key}.top_1_share_of_gpu_time": float(users.gpu_time_s[0] / of_time),
            f"{key}.top_10_percent_share_of_gpu_time": top,
            f"{key}.gini_gpu_time": gini(users.gpu_time_s),
            f"{key}.gini_jobs": gini(users.jobs),
        }
        sentences.append(
            f"{cluster}: the {tenth:,} of {words.plainly(len(users.names), 'person', 'people')} "
            f"with the most GPU time {'has' if tenth == 1 else 'have'} {top:.1%} of it "
            f"(Gini coefficient {numbers[f'{key}.gini_gpu_time']:.2f}; of jobs "
            f"{numbers[f'{key}.gini_jobs']:.2f})."
        )
    lines = [
        Lines(
            x=Axis(label=f"share of people, most {weight} first", low=0.0, high=1.0),
            y=Axis(label=f"share of {weight}", low=0.0, high=1.0),
            series=series,
        )
        for weight, series in curves.items()
    ]
    return Result(
        table=Table.of_rows(
            ("cluster", "user", "jobs", "gpu_time_h", "share_of_jobs", "share_of_gpu_time"), rows
        ),
        chart=Figure(panels=[*lines, *bars]),
        caption=" ".join(sentences),
        numbers=numbers,
    )


def user_waits(trace: "Trace", *, most: int = SHOWN) -> Result:
    """Chart the mean wait of each user's GPU jobs.

    The `most` users with the most GPU time have a bar each, and all others share one. Columns of
    the table: `cluster`, `user`, `n`, `mean_queue_s`, `waited_h` (job-hours).

    Raises:
        LeftOut: no cluster names its users, or no GPU job has both a submission time and a start
            time.
    """
    rows: list[tuple[object, ...]] = []
    panels, sentences = [], []
    numbers: dict[str, float] = {}
    for cluster, users in _people(trace).items():
        if cluster in trace.compared or users.queued.sum() == 0:
            continue
        shown = users.shown(most)
        mean = shown.queue_s / np.where(shown.queued > 0, shown.queued, np.nan)
        rows += [
            (cluster, *row)
            for row in zip(
                shown.names,
                shown.queued.tolist(),
                mean.tolist(),
                (shown.queue_s / 3600).tolist(),
                strict=True,
            )
        ]
        panels.append(
            Bars(
                title=f"{cluster} (n = {words.plainly(round(users.queued.sum()), 'GPU job')})",
                value=Axis(label="mean queue time (s)", scale="symlog", low=0.0),
                groups=shown.names,
                parts={"mean queue time": mean},
            )
        )
        overall = float(users.queue_s.sum() / users.queued.sum())
        longest, least = int(np.nanargmax(mean)), int(np.nanargmin(mean))
        numbers[f"{slug(cluster)}.users.longest_mean_queue_s"] = float(mean[longest])
        numbers[f"{slug(cluster)}.users.shortest_mean_queue_s"] = float(mean[least])
        sentences.append(
            f"{cluster}: of those shown {shown.names[longest]} waits longest, "
            f"{words.duration(float(mean[longest]))} a "
            f"job, {shown.names[least]} least, {words.duration(float(mean[least]))}; all "
            f"{words.duration(overall)} "
            f"(n = {users.queued.sum():,.0f})."
        )
    some(panels, "no GPU job with a user has both a submission and a start time")
    return Result(
        table=Table.of_rows(("cluster", "user", "n", "mean_queue_s", "waited_h"), rows),
        chart=Figure(panels=panels),
        caption=" ".join(sentences),
        numbers=numbers,
    )


def user_outcomes(trace: "Trace", *, most: int = SHOWN) -> Result:
    """Chart the share of each user's GPU jobs that were cancelled or failed.

    The `most` users with the most GPU time have a bar each, and all others share one. Columns of
    the table: `cluster`, `user`, `n` (jobs that ended), `cancelled_share`, `failed_share`.

    Raises:
        LeftOut: no cluster names its users, or no GPU job has a final state.
    """
    rows: list[tuple[object, ...]] = []
    panels, sentences = [], []
    numbers: dict[str, float] = {}
    for cluster, users in _people(trace).items():
        if cluster in trace.compared or users.ended.sum() == 0:
            continue
        shown = users.shown(most)
        ended = np.where(shown.ended > 0, shown.ended, np.nan)
        cancelled, failed = shown.cancelled / ended, shown.failed / ended
        rows += [
            (cluster, *row)
            for row in zip(
                shown.names, shown.ended.tolist(), cancelled.tolist(), failed.tolist(), strict=True
            )
        ]
        panels.append(
            Bars(
                title=f"{cluster} (n = {words.plainly(round(users.ended.sum()), 'GPU job')} that ended)",
                value=Axis(label="share of the person's jobs", low=0.0, high=1.0),
                groups=shown.names,
                parts={"cancelled": cancelled, "failed": failed},
                stacked=True,
            )
        )
        worst = int(np.nanargmax(failed))
        overall = float(users.failed.sum() / users.ended.sum())
        numbers[f"{slug(cluster)}.users.greatest_failed_share"] = float(failed[worst])
        sentences.append(
            f"{cluster}: of those shown {shown.names[worst]} has the most failures, "
            f"{failed[worst]:.1%} of "
            f"{words.plainly(round(shown.ended[worst]), 'job')}; all {overall:.1%} of {users.ended.sum():,.0f}."
        )
    some(panels, "no GPU job with a user has a final state")
    return Result(
        table=Table.of_rows(("cluster", "user", "n", "cancelled_share", "failed_share"), rows),
        chart=Figure(panels=panels),
        caption=" ".join(sentences),
        numbers=numbers,
    )


def _people(trace: "Trace") -> dict[str, Users]:
    trace.require("username")
    found = {cluster: users_of(trace, cluster) for cluster in in_order(trace)}
    people = {cluster: users for cluster, users in found.items() if users is not None}
    some(list(people), NO_USERS)
    return people


ANALYSES = (
    Analysis(name="user_shares", section="People", title="Who uses the cluster", run=user_shares),
    Analysis(name="user_waits", section="People", title="How long people wait", run=user_waits),
    Analysis(
        name="user_outcomes", section="People", title="How people's jobs end", run=user_outcomes
    ),
)
