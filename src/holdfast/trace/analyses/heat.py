"""Analyze temperatures of GPUs and their memory, and failures by temperature.

The study has temperatures in its appendix, and failures by temperature in section 5.2.
"""

from typing import TYPE_CHECKING

import numpy as np

from holdfast.trace.analyses.measured import cdf, measured, optional, over, sentences
from holdfast.trace.analyses.result import Analysis, Result
from holdfast.trace.analyses.selection import slug
from holdfast.trace.causes import causes_of
from holdfast.trace.charts import Axis, Figure, Lines, Series
from holdfast.trace.distribution import Distribution
from holdfast.trace.errors import LeftOut
from holdfast.trace.table import Table

if TYPE_CHECKING:
    from holdfast.trace.trace import Trace

SECTION = "Power, heat and carbon"
METRICS = {"GPU_TEMP": "gpu_temp", "MEMORY_TEMP": "memory_temp"}


def temperature(trace: "Trace", *, hot_c: float = 65.0) -> Result:
    """Chart the CDF of GPU and GPU memory temperatures, and the shares above `hot_c`.

    The study has this figure in its appendix.

    Args:
        trace: a trace with the metrics GPU_TEMP or MEMORY_TEMP.
        hot_c: the temperature in degrees Celsius above which a sample counts as hot.

    Raises:
        LeftOut: the telemetry has neither metric.
    """
    curves: dict[tuple[str, str], Distribution] = {}
    for metric in METRICS:
        for cluster, heat in optional(trace, metric).items():
            real = (
                heat.values != 0
                if metric == "MEMORY_TEMP"
                else np.ones(len(heat.values), dtype=bool)
            )
            if real.any():  # GPUs without a memory sensor report 0.
                curves[cluster, metric] = Distribution(heat.values[real], heat.weights[real])
    if not curves:
        raise LeftOut("Left out: the telemetry has no temperatures (GPU_TEMP, MEMORY_TEMP).")
    numbers: dict[str, float] = {}
    captions: dict[str, str] = {}
    for (cluster, metric), heat in curves.items():
        key = f"{slug(cluster)}.{METRICS[metric]}"
        numbers |= {
            f"{key}.median_c": heat.median,
            f"{key}.mean_c": heat.mean,
            f"{key}.max_c": float(heat.values[-1]),
            f"{key}.hot_share": over(heat, hot_c),
        }
        what = "cores" if metric == "GPU_TEMP" else "memory"
        words = (
            f"{what} {heat.median:g} °C in the median, above {hot_c:g} °C in "
            f"{over(heat, hot_c):.1%} of the samples"
        )
        captions[cluster] = f"{captions[cluster]}, {words}" if cluster in captions else words
    for cluster in captions:
        core, memory = (
            numbers.get(f"{slug(cluster)}.{name}.median_c") for name in METRICS.values()
        )
        if core is not None and memory is not None:
            numbers[f"{slug(cluster)}.memory_hotter_c"] = memory - core
    panel, table = cdf(trace, "Temperature", Axis(label="temperature (°C)"), curves, unit="c")
    return Result(
        table=table,
        chart=Figure(panels=[panel], columns=1),
        caption=sentences(captions),
        numbers=numbers,
    )


def failures_and_heat(trace: "Trace", *, metric: str = "GPU_TEMP") -> Result:
    """Chart each month's infrastructure failures against the month's mean temperature.

    A month is included if telemetry covers at least one day of it.

    Args:
        trace: a trace with the metric, and with final states and ends of jobs.
        metric: GPU_TEMP or MEMORY_TEMP.

    Raises:
        LeftOut: a column or the metric is missing, or fewer than two months have both failures and
            temperatures.
    """
    hours = measured(trace, "metric_hours").where(metric=metric)
    if not len(hours):
        raise LeftOut(f"Left out: the telemetry has no {metric}.")
    trace.require("state", "end_at")
    failures = trace.aggregate("failure_months").where(is_gpu=True)
    infrastructure = np.array(
        [cause.category == "Infrastructure" for cause in causes_of(failures)], dtype=bool
    )
    failed_in = failures["month"].astype("datetime64[M]")
    hour_in = hours["hour"].astype("datetime64[M]")
    rows, series, numbers, captions = [], [], {}, {}
    for cluster in dict.fromkeys(hours["cluster"].tolist()):
        own, own_failures = hours["cluster"] == cluster, failures["cluster"] == cluster
        months = [
            (
                month,
                float(
                    hours["sum_value"][own & (hour_in == month)].sum()
                    / hours["n"][own & (hour_in == month)].sum()
                ),
                float(failures["n"][own_failures & infrastructure & (failed_in == month)].sum()),
            )
            for month in np.unique(hour_in[own])
            if (own & (hour_in == month)).sum() >= 24 and own_failures.any()
        ]
        if len(months) < 2:
            continue
        heat, counts = (
            np.array([month[1] for month in months]),
            np.array([month[2] for month in months]),
        )
        rows += [(cluster, str(month), *values) for month, *values in months]
        series.append(Series(label=cluster, x=heat, y=counts, style="points"))
        hottest = int(heat.argmax())
        numbers[f"{slug(cluster)}.heat.failures_of_hottest_month"] = float(counts[hottest])
        numbers[f"{slug(cluster)}.heat.mean_failures_of_other_months"] = float(
            np.delete(counts, hottest).mean()
        )
        captions[cluster] = (
            f"{counts[hottest]:g} infrastructure failures in the hottest month "
            f"({months[hottest][0]}, "
            f"{heat[hottest]:.1f} °C in the mean), {np.delete(counts, hottest).mean():.3g} in the "
            "mean of the others"
        )
    if not rows:
        raise LeftOut("Left out: fewer than two months have both temperatures and job records.")
    chart = Lines(
        title="Infrastructure failures and heat, by month",
        x=Axis(label=f"mean {metric} (°C)"),
        y=Axis(label="infrastructure failures of the month", low=0.0),
        series=series,
    )
    return Result(
        table=Table.of_rows(("cluster", "month", "mean_c", "infrastructure_failures"), rows),
        chart=Figure(panels=[chart], columns=1),
        caption=f"{sentences(captions)} A few months do not show a cause.",
        numbers=numbers,
    )


ANALYSES = (
    Analysis(
        name="temperature", section=SECTION, title="Temperature", run=temperature, source="Appendix"
    ),
    Analysis(
        name="failures_and_heat",
        section=SECTION,
        title="Failures and heat",
        run=failures_and_heat,
        source="Section 5.2",
    ),
)
