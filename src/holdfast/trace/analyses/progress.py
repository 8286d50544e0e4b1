"""Compute ETTR, the effective training time ratio.

The ratio is measured for Holdfast's own runs, bounded from job records, or predicted from failure
rates.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from holdfast.core.paths import holdfast_home
from holdfast.trace.analyses.failure_rates import SECTION, buckets, by_size, caveat
from holdfast.trace.analyses.measured import sentences
from holdfast.trace.analyses.result import Analysis, Result
from holdfast.trace.analyses.selection import in_order, size_label, slug
from holdfast.trace.charts import Axis, Bars, Figure, Lines, Series
from holdfast.trace.errors import LeftOut
from holdfast.trace.table import Table

if TYPE_CHECKING:
    from holdfast.core.accounting import RunSummary
    from holdfast.trace.trace import Trace

Values = npt.NDArray[np.float64]


def ettr_bound(
    trace: "Trace",
    *,
    least_gpus: float = 9.0,
    checkpoint_interval_h: float = 0.5,
    restart_within_h: float = 1.0,
) -> Result:
    """Chart an upper bound of the ETTR of large jobs by size, from job records alone.

    The ratio is a share of the GPU time that the jobs held. A failed job loses the time since the
    last multiple of the checkpoint interval. The bound assumes that steps never stalled, that
    cancelled jobs kept all their work, and that no job was rolled back further. The true ETTR is
    therefore lower.

    A second number also counts the GPU time spent waiting after a failure until work continues.
    This number is an estimate. Work continues with the job's next attempt, or with the same user's
    next job of the same name and number of GPUs, which may in fact be different work.

    Args:
        trace: a trace with states, sizes and run times. The second number also needs users and
            submission times.
        least_gpus: only jobs of at least this number of GPUs count; by default more than one node
            of eight.
        checkpoint_interval_h: assumed hours between checkpoints; the study saves every 30 minutes
            (section 6.1).
        restart_within_h: a restart after more than this number of hours does not count.

    Raises:
        LeftOut: columns are missing, or no large job ran and ended.
    """
    trace.require("state", "gpu_num", "run_s")
    has_waits = trace.has("username", "submit_at", "start_at", "end_at") or trace.has(
        "attempt", "start_at", "end_at"
    )
    held = _hours(
        _large(trace.aggregate("failure_causes").where(is_gpu=True), least_gpus), "sum_run_s"
    )
    failed = _large(trace.aggregate("failure_durations").where(is_gpu=True), least_gpus)
    lost = _hours(failed, "run_s", modulo_h=checkpoint_interval_h)
    waits = _hours(
        _large(trace.aggregate("failure_restarts"), least_gpus),
        "restart_s",
        most_h=restart_within_h,
    )
    rows, numbers, captions = [], {}, {}
    for cluster in in_order(trace):
        if cluster in trace.compared or cluster not in held:
            continue
        held_h, lost_h = held[cluster], lost.get(cluster, {})
        waits_h = waits.get(cluster, {}) if has_waits else {}
        for size in sorted(held_h):
            gone, waited = lost_h.get(size, 0.0), waits_h.get(size, 0.0) if has_waits else np.nan
            bound, guess = 1 - gone / held_h[size], (held_h[size] - gone) / (held_h[size] + waited)
            rows.append((cluster, size, held_h[size], gone, waited, bound, guess))
            numbers[f"{slug(cluster)}.ettr_bound.{size:g}_gpus"] = bound
        used, gone, waited = sum(held_h.values()), sum(lost_h.values()), sum(waits_h.values())
        numbers[f"{slug(cluster)}.ettr_bound"] = 1 - gone / used
        captions[cluster] = (
            f"at most {1 - gone / used:.1%} of the GPU time of jobs of at least {least_gpus:g} "
            "GPUs brought training "
            f"forward: {gone:,.0f} of {used:,.0f} GPU-hours were computed since a last save"
        )
        if has_waits:
            numbers[f"{slug(cluster)}.ettr_with_waits"] = (used - gone) / (used + waited)
            captions[cluster] += (
                f" ({(used - gone) / (used + waited):.1%} with {waited:,.0f} GPU-hours of likely "
                "waits)"
            )
    if not rows:
        raise LeftOut(f"Left out: no job of at least {least_gpus:g} GPUs ran and ended.")
    columns = (
        "cluster",
        "gpus",
        "gpu_time_h",
        "lost_gpu_time_h",
        "waiting_gpu_time_h",
        "ettr_bound",
        "ettr_with_waits",
    )
    table = Table.of_rows(columns, rows)
    parts = {"at most": table["ettr_bound"]} | (
        {"with likely waits": table["ettr_with_waits"]} if has_waits else {}
    )
    chart = Bars(
        title="Upper bound of ETTR",
        value=Axis(label="ETTR", low=0.0, high=1.0),
        groups=[f"{row[0]}: {size_label(row[1])} GPUs" for row in rows],
        parts=parts,
    )
    return Result(
        table=table,
        chart=Figure(panels=[chart], columns=1),
        caption=f"{sentences(captions)} An upper bound, assuming a checkpoint every "
        f"{60 * checkpoint_interval_h:g} min: "
        "records do not say what a run saved or rolled back.",
        numbers=numbers,
    )


def measured_ettr(trace: "Trace", *, most: int = 40) -> Result:
    """Chart the measured ETTR of each run of a ledger, and how the rest of its wall time was spent.

    The ETTR is the time of the steps that survive in the final state, divided by the wall time
    since the first start. Both come from the run's records and its journal of steps
    (`holdfast.core.accounting`).

    Args:
        trace: a trace of Holdfast's own ledger.
        most: the number of runs shown, the latest ones; the table and the named numbers have all
            runs.

    Raises:
        LeftOut: no ledger was given, or no run of the ledger took any time.
        HoldfastError: a journal is damaged.
    """
    from holdfast.core.accounting import summarize
    from holdfast.core.ledger import Ledger

    if not trace.ledger_urls:
        raise LeftOut("Left out: no ledger of Holdfast's own runs was given.")
    found: list[RunSummary] = []
    for url in trace.ledger_urls:
        with Ledger.open(url) as ledger:
            found += [summarize(ledger, _home(url), run.run_id) for run in ledger.runs()]
    runs = [summary for summary in found if summary.ettr is not None]
    if not runs:
        raise LeftOut("Left out: the ledger has no run that took any time.")
    causes = list(runs[0].breakdown.by_cause())
    spent_h = np.array([list(summary.breakdown.by_cause().values()) for summary in runs]) / 3600
    wall_s = np.array([summary.wall_s for summary in runs])
    ettr = np.array([float(summary.ettr or 0.0) for summary in runs])
    whole = float((ettr * wall_s).sum() / wall_s.sum())
    least = int(ettr.argmin())
    return Result(
        table=Table(
            {
                "run": np.array([summary.run.run_id for summary in runs], dtype=object),
                "wall_s": wall_s,
                "ettr": ettr,
                "incidents": np.array([len(summary.incidents) for summary in runs]),
                **{f"{cause}_s": 3600 * spent_h[:, number] for number, cause in enumerate(causes)},
            }
        ),
        chart=Figure(
            panels=[
                Bars(
                    title="Where the wall time of runs went",
                    value=Axis(label="Wall time (h)", low=0.0),
                    groups=[summary.run.run_id for summary in runs[-most:]],
                    parts={
                        str(cause): spent_h[-most:, number] for number, cause in enumerate(causes)
                    },
                    stacked=True,
                )
            ],
            columns=1,
        ),
        caption=f"ETTR {whole:.1%} over {len(runs)} runs ({wall_s.sum() / 3600:,.1f} h of wall "
        "time), the least "
        f"{ettr[least]:.1%} of {runs[least].run.run_id}. Measured from the ledger and the journals "
        "of steps.",
        numbers={"ettr": whole, "ettr.least": float(ettr.min()), "ettr.runs": float(len(runs))},
    )


def _home(url: str) -> Path:
    """Return the folder that contains the journals of a ledger.

    This is the folder of an SQLite file, and `holdfast_home()` for other databases.
    """
    from sqlalchemy.engine import make_url

    parsed = make_url(url)
    sqlite = parsed.get_backend_name() == "sqlite" and parsed.database
    return Path(parsed.database or "").parent if sqlite else holdfast_home()


def expected_ettr(
    mttf_h: npt.ArrayLike, *, checkpoint_interval_h: float, restart_h: float, queue_h: float = 0.0
) -> Values:
    """Return the expected ETTR (effective training time ratio) of a long run, 0 to 1.

    Between two failures a run holds its GPUs for the mean time to failure, 1 / f. Each failure
    costs the restart time u, and the work since the last checkpoint, which is half of the
    checkpoint interval c on average. Then the run waits in the queue for a time q. So the ETTR is
    (1 / f - u - c / 2) / (1 / f + q) = (1 - f (u + c / 2)) / (1 + f q).

    The formula assumes many failures, u and c much shorter than 1 / f, and saves that do not stall
    the run. Negative values are replaced by 0.

    Args:
        mttf_h: mean time to failure of the run, in hours.
        checkpoint_interval_h: hours from one checkpoint to the next.
        restart_h: hours from the allocation of GPUs until training continues.
        queue_h: hours of waiting for GPUs after each failure.
    """
    rate = 1 / np.asarray(mttf_h, dtype=float)
    return np.maximum(1 - rate * (restart_h + checkpoint_interval_h / 2), 0.0) / (
        1 + rate * queue_h
    )


def expected_ettr_by_size(
    trace: "Trace",
    *,
    checkpoint_intervals_h: tuple[float, ...] = (0.25, 0.5, 1.0),
    restart_h: float = 5 / 60,
    queue_h: float = 0.0,
) -> Result:
    """Chart the expected ETTR of a run by size, at this trace's rate of infrastructure failures.

    The failure rate per GPU is taken from the trace. The study saves every 30 minutes (section
    6.1). Restarts of 5 minutes without waiting are assumptions of this module.

    Args:
        trace: a trace with states, sizes and run times.
        checkpoint_intervals_h: hours between checkpoints; each interval makes one curve.
        restart_h: hours to restart, see `expected_ettr`.
        queue_h: hours of waiting, see `expected_ettr`.

    Raises:
        LeftOut: the data are missing, as in `by_size`, or there is no infrastructure failure.
            Users' mistakes would not do, since they fail at the start of a job and do not predict
            failures of a long run.
    """
    found = by_size(trace)
    rows, series, numbers, captions = [], [], {}, {}
    for cluster, jobs in found.items():
        failures = jobs.failures["infrastructure"].sum()
        if cluster in trace.compared or not failures:
            continue
        gpu_mttf_h = jobs.gpu_time_h.sum() / failures
        gpus = np.exp2(np.arange(3, max(14, int(np.log2(jobs.gpus[-1])) + 1)))
        for interval_h in checkpoint_intervals_h:
            ettr = expected_ettr(
                gpu_mttf_h / gpus,
                checkpoint_interval_h=interval_h,
                restart_h=restart_h,
                queue_h=queue_h,
            )
            rows += [
                (cluster, interval_h, *row)
                for row in zip(gpus, gpu_mttf_h / gpus, ettr, strict=True)
            ]
            series.append(
                Series(label=f"{cluster}, saved every {60 * interval_h:g} min", x=gpus, y=ettr)
            )
            for size, value in zip(gpus, ettr, strict=True):
                numbers[f"{slug(cluster)}.expected_ettr.{60 * interval_h:g}_min.{size:g}_gpus"] = (
                    float(value)
                )
        words = [
            f"{numbers[f'{slug(cluster)}.expected_ettr.{60 * interval_h:g}_min.1024_gpus']:.3f} "
            "saved every "
            f"{60 * interval_h:g} min"
            for interval_h in checkpoint_intervals_h
        ]
        captions[cluster] = (
            f"at 1,024 GPUs and the rate of infrastructure failures, an ETTR of {', '.join(words)}"
        )
    if not rows:
        raise LeftOut(
            "Left out: no failure is known to be the infrastructure's, and only those have a "
            "steady rate."
        )
    chart = Lines(
        title="ETTR to expect by job size",
        x=Axis(label="GPUs of the run", scale="log2"),
        y=Axis(label="Expected ETTR", low=0, high=1),
        series=series,
    )
    columns = ("cluster", "checkpoint_interval_h", "gpus", "mttf_h", "expected_ettr")
    return Result(
        table=Table.of_rows(columns, rows),
        chart=Figure(panels=[chart], columns=1),
        caption=f"{sentences(captions)} A model, not a measurement: {60 * restart_h:g} min to restart, "
        f"{60 * queue_h:g} min of waiting.{caveat(found)}",
        numbers=numbers,
    )


def _large(table: Table, least_gpus: float) -> Table:
    keep = table["gpu_num"] >= least_gpus
    return Table({name: column[keep] for name, column in table.columns.items()})


def _hours(
    table: Table, column: str, *, modulo_h: float = math.inf, most_h: float = math.inf
) -> dict[str, dict[float, float]]:
    """Sum GPU-hours by cluster and size bucket.

    The GPU-hours of a row are its seconds in `column`, times GPUs, times the number of jobs `n`. A
    column whose name begins with `sum_` is already a sum over jobs, so it is not multiplied by `n`.

    Args:
        table: rows with `cluster`, `gpu_num` and `n`.
        column: name of a column in seconds; NaN counts as 0.
        modulo_h: count only the remainder of the hours after division by this number.
        most_h: leave out rows with more hours.
    """
    hours = table[column].astype(float) / 3600
    hours = np.where(hours <= most_h, hours, 0.0) % modulo_h  # NaN counts as 0 hours.
    gpu_h = hours * table["gpu_num"] * (1 if column.startswith("sum_") else table["n"])
    found: dict[str, dict[float, float]] = {}
    size = buckets(table["gpu_num"])
    for cluster in dict.fromkeys(table["cluster"].tolist()):
        own = table["cluster"] == cluster
        found[cluster] = {
            float(one): float(gpu_h[own & (size == one)].sum()) for one in np.unique(size[own])
        }
        found[cluster] = {one: value for one, value in found[cluster].items() if value}
    return {cluster: sizes for cluster, sizes in found.items() if sizes}


ANALYSES = (
    Analysis(
        name="measured_ettr",
        section=SECTION,
        title="ETTR of Holdfast's own runs",
        run=measured_ettr,
    ),
    Analysis(name="ettr_bound", section=SECTION, title="ETTR, at most", run=ettr_bound),
    Analysis(
        name="expected_ettr_by_size",
        section=SECTION,
        title="ETTR to expect",
        run=expected_ettr_by_size,
    ),
)
