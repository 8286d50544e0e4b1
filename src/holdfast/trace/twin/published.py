"""The two published clusters: from the counts that their authors published to a calibration.

What was published are margins: durations and queueing times by type, jobs and GPU time by GPU count, GPU time by type,
quartiles of the GPU count by type. `tilt` makes the joint table of them. The prior says only what the boxes of Fig 5
say: a type asks for what lies between its whiskers, seldom for more.
"""

import tomllib
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from importlib import resources
from typing import Any, Final

import numpy as np

from holdfast.core.errors import BadUse
from holdfast.trace.twin import habits
from holdfast.trace.twin.bins import BINS, bin_edges, bin_means, padded
from holdfast.trace.twin.model import CPU, Calibration, Floats
from holdfast.trace.twin.outcomes import published_states
from holdfast.trace.twin.tilt import Condition, raked, tilted

CLUSTERS: Final = ("seren", "kalos")

OUTLIERS: Final = 0.05
"""How much likelier a GPU count within a type's whiskers is than one above, in the prior; falls with the distance."""


@lru_cache(maxsize=2)
def calibration(cluster: str) -> Calibration:
    """The calibration of a published cluster, `seren` or `kalos`; solved in about two seconds, then kept.

    Raises:
        BadUse: there is no such cluster.
    """
    if cluster.lower() not in CLUSTERS:
        message = f"The twin knows no cluster {cluster!r}. Say one of {', '.join(CLUSTERS)}, or the path of a trace."
        raise BadUse(message)
    text = (
        resources.files("holdfast.trace.twin").joinpath("tables").joinpath(f"{cluster.lower()}.toml").read_text("utf-8")
    )
    return _solved(tomllib.loads(text))


@dataclass(frozen=True, kw_only=True)
class _Margins:
    """The published tables of the GPU jobs of one cluster."""

    types: tuple[str, ...]
    values: Floats
    durations: Floats
    means_s: Floats
    gpu_time_s: float
    tables: dict[str, Any]


def _solved(tables: dict[str, Any]) -> Calibration:
    margins = _margins(tables)
    gpu_cells = _joint(margins, tables["gpu_num"])
    cpu = tables["types"][CPU]
    cpu_bins = padded(cpu["duration"] + cpu["duration_tail"])
    summary = tables["summary"]

    types = (*margins.types, CPU)
    values = np.concatenate([[0.0], margins.values])
    cells = np.zeros((len(types), len(values), BINS))
    cells[:-1, 1:] = gpu_cells
    cells[-1, 0] = cpu_bins
    seconds = np.zeros(cells.shape[:2])
    seconds[:-1, 1:] = _gpu_time(gpu_cells, margins, tables["gpu_num"]) / margins.values
    seconds[-1, 0] = summary["cpu_run_mean_s"] * cpu_bins.sum()
    queue_cells, queue_seconds = _queues(tables, types)
    state_model = published_states(
        cells, seconds, types=types, values=values, published=tables["states"], cluster=tables["cluster"]
    )
    limit_s = np.full(len(types), float(summary["gpu_run_max_s"]))
    limit_s[-1] = 2.0**21
    counts_queue = tables["duration_from"] == "submit"
    start_s, end_s = (_unix_s(text, tables["zone"]) for text in tables["window"])
    # The released Seren file has medians of its own, in its curves; those of its summary are of the larger trace.
    medians = {
        f"{kind}_{ours}": float(summary[f"{kind}_{theirs}_median_s"])
        for kind in ("gpu", "cpu")
        for ours, theirs in (("duration", "run"), ("queue", "queue"))
        if counts_queue
    }
    return Calibration(
        cluster=tables["cluster"],
        zone=tables["zone"],
        start_s=start_s,
        window_s=end_s - start_s,
        snapshot_s=_unix_s(tables["snapshot"], tables["zone"]) if "snapshot" in tables else None,
        counts_queue=counts_queue,
        capacity_gpus=tables["gpus"],
        types=types,
        gpu_nums=values,
        cells=cells,
        seconds=seconds,
        duration_limit_s=limit_s,
        longest=(types.index("Pretrain"), float(summary["gpu_run_max_s"])) if counts_queue else None,
        queue_cells=queue_cells,
        queue_seconds=queue_seconds,
        medians_s=medians,
        states=state_model.states,
        state_shares=state_model.shares,
        state_totals=state_model.totals,
        state_gpu_time=state_model.gpu_time,
        users=habits.published_users(types),
        cpus=habits.published_cpus(types, values, tables["cluster"]),
        hour_of_week=habits.published_hours(),
        dispersion=habits.DISPERSION,
        batch_sizes=habits.published_batches(types),
    )


def _margins(tables: dict[str, Any]) -> _Margins:
    types = tuple(name for name in tables["types"] if name != CPU)
    summary = tables["summary"]
    durations = np.array([padded(tables["types"][name]["duration"]) for name in types])
    limit_s = float(summary["gpu_run_max_s"])
    means = np.tile(bin_means(limit_s), (len(types), 1))
    if "gpu_time_s" in summary:
        total_s = summary["gpu_run_mean_s"] * durations.sum()
        means = _scaled_means(means, durations, total_s, limit_s)
        gpu_time_s = float(summary["gpu_time_s"])
    else:
        # The GPU time of the released file is not published; its shares by GPU count are. A share divided by the GPUs
        # is the jobs' own time, and that sums to the time under the duration curve.
        curve = np.array(tables["gpu_num"]["cumulative_gpu_time_pct"], dtype=float)
        shares = np.diff(curve[:, 1], prepend=0.0) / 100
        gpu_time_s = float((durations * means).sum() / (shares / curve[:, 0]).sum())
    return _Margins(
        types=types,
        values=np.array(tables["gpu_num"]["values"], dtype=float),
        durations=durations,
        means_s=means,
        gpu_time_s=gpu_time_s,
        tables=tables["types"],
    )


def _scaled_means(means: Floats, counts: Floats, total_s: float, limit_s: float) -> Floats:
    """Means by bin, moved within their bins so that all jobs together take `total_s`."""
    lower, upper = bin_edges(limit_s)
    low, high = 0.5, 2.0
    for _ in range(50):
        factor = (low + high) / 2
        moved = np.clip(means * factor, lower + 0.1 * (upper - lower), lower + 0.9 * (upper - lower))
        low, high = (factor, high) if (moved * counts).sum() < total_s else (low, factor)
    return moved


def _joint(margins: _Margins, gpu_num: dict[str, Any]) -> Floats:
    """The (T, G, D) table of GPU jobs that meets everything published."""
    shape = (len(margins.types), len(margins.values), BINS)
    values = margins.values[None, :, None]
    types = np.arange(len(margins.types))[:, None, None]
    gpu_s = values * margins.means_s[:, None, :] / margins.gpu_time_s * 100
    log_s = np.log(margins.means_s[:, None, :]) - 5

    def flat(weights: Any) -> Floats:
        return np.broadcast_to(weights, shape).astype(float).ravel()

    conditions = []
    by_gpus = []
    quartiles = []
    overall = np.zeros(shape[1])
    for low, high, jobs in _steps(gpu_num["cumulative_jobs"]):
        inside = (margins.values > low) & (margins.values <= high)
        if not inside.any():
            continue
        overall[inside] = jobs / inside.sum()
        by_gpus.append((inside, jobs))
        conditions.append(
            Condition(weights=flat(inside[None, :, None]), target=jobs, scale=0.1 + 0.001 * jobs),
        )
    for low, high, percent in _steps(gpu_num["cumulative_gpu_time_pct"]):
        inside = ((margins.values > low) & (margins.values <= high))[None, :, None]
        if inside.any():
            weights, feature = flat(gpu_s * inside), flat(log_s * inside) / 3
            conditions.append(Condition(weights=weights, feature=feature, target=percent, scale=0.01))
    allowed = np.ones(shape[:2])
    for number, name in enumerate(margins.types):
        own = types == number
        for bin_, jobs in enumerate(margins.durations[number]):
            if jobs:
                weights = flat(own & (np.arange(BINS) == bin_)[None, None, :])
                conditions.append(Condition(weights=weights, target=jobs, scale=0.1 + 0.001 * jobs))
        table = margins.tables[name]
        if "box_gpu_num" not in table:
            allowed[number] = margins.values <= 8  # Nothing is published of these few; they are small.
            continue
        # Within a type the durations are given, so what moves its GPU time is how they go with the GPU count.
        feature = flat(log_s * np.log(values) * own) / 10
        percent = table["gpu_time_pct"]
        conditions.append(Condition(weights=flat(gpu_s * own), feature=feature, target=percent, scale=0.02))
        allowed[number] = _within_box(margins.values, table["box_gpu_num"])
        for mask, least, scale in _box_conditions(margins.values, table):
            weights = flat(own & mask[None, :, None])
            conditions.append(Condition(weights=weights, target=least, scale=scale, at_least=True))
            quartiles.append((number, mask, least))
    prior = margins.durations[:, None, :] * (overall * allowed)[:, :, None]
    prior *= (margins.durations.sum(axis=1) / prior.sum(axis=(1, 2)))[:, None, None]
    return raked(tilted(prior, conditions), margins.durations, by_gpus, quartiles)


def _gpu_time(cells: Floats, margins: _Margins, gpu_num: dict[str, Any]) -> Floats:
    """(T, G) GPU time with the published shares by GPU count and by type to the last digit.

    The solved table has them within a few parts in a hundred; the rest is proportional fitting, and the durations
    follow by where they lie within their bins.
    """
    gpu_time: Floats = np.einsum("tgd,td->tg", cells, margins.means_s) * margins.values
    steps = _steps(gpu_num["cumulative_gpu_time_pct"])
    by_gpus = [((margins.values > low) & (margins.values <= high), percent / 100) for low, high, percent in steps]
    by_type = np.array([margins.tables[name].get("gpu_time_pct", 0.0) for name in margins.types])
    own_s = (margins.durations * margins.means_s).sum(axis=1)
    for _ in range(400):
        # What no share is published of (Kalos' 8 SFT jobs) stays as it is.
        known = by_type > 0
        total = margins.gpu_time_s - gpu_time[~known].sum()
        gpu_time[known] *= (by_type[known] / by_type.sum() * total / gpu_time[known].sum(axis=1))[:, None]
        # GPU time over GPUs is the jobs' own time, and that is given too: it moves GPU time between few and many GPUs.
        missing_s = own_s - (gpu_time / margins.values).sum(axis=1)
        slope_s = np.maximum((gpu_time / margins.values**2).sum(axis=1), 1e-9)
        gpu_time *= np.exp(np.clip(0.5 * missing_s / slope_s, -0.2, 0.2)[:, None] / margins.values)
        for inside, share in by_gpus:
            held = gpu_time[:, inside].sum()
            if held > 0:
                gpu_time[:, inside] *= share * margins.gpu_time_s / held
    return gpu_time


def _steps(curve: list[list[float]]) -> list[tuple[float, float, float]]:
    """Each step of a cumulative curve: after which x, up to which, how much."""
    before = [[0.0, 0.0], *curve[:-1]]
    return [(x0, x1, y1 - y0) for (x0, y0), (x1, y1) in zip(before, curve, strict=True)]


def _within_box(values: Floats, box: list[float]) -> Floats:
    """How far a type's box lets it ask for each GPU count: nothing between a whisker and its limit of 1.5 IQR."""
    whisker_low, q1, _, q3, whisker_high = box
    reach = 1.5 * (q3 - q1)
    with np.errstate(divide="ignore"):
        outlier = OUTLIERS * np.minimum((whisker_high / values) ** 1.5, 1.0)
    allowed = np.where(values > whisker_high, outlier, np.where(values < whisker_low, OUTLIERS, 1.0))
    allowed[(values > whisker_high) & (values <= q3 + reach)] = 0.0
    allowed[(values < whisker_low) & (values >= q1 - reach)] = 0.0
    return allowed


def _box_conditions(values: Floats, table: dict[str, Any]) -> list[tuple[Any, float, float]]:
    """(which GPU counts, jobs at least, scale) so that NumPy's linear percentiles are the box's.

    The percentile p of n values is read at the position (n - 1) p: so many must be below or at the quartile, and so
    many at or above; a margin of 0.5% keeps it through the rounding to whole jobs.
    """
    whisker_low, q1, median, q3, whisker_high = table["box_gpu_num"]
    jobs = float(table["jobs"])
    margin, scale = max(1.0, 0.005 * jobs), 1 + 0.001 * jobs
    conditions: list[tuple[Any, float, float]] = []
    for quartile, part in ((q1, 0.25), (median, 0.5), (q3, 0.75)):
        position = (jobs - 1) * part
        conditions.append((values >= quartile, jobs - np.floor(position) + margin, scale))
        conditions.append((values <= quartile, np.ceil(position) + 1 + margin, scale))
    conditions += [(values == whisker, 4.0, 1.0) for whisker in (whisker_low, whisker_high)]
    return conditions


def _queues(tables: dict[str, Any], types: tuple[str, ...]) -> tuple[Floats, Floats]:
    """Queueing times by type: (T, D) counts and (T) totals in s."""
    summary = tables["summary"]
    cells = np.zeros((len(types), BINS))
    for number, name in enumerate(types):
        table = tables["types"][name]
        jobs = float(table["jobs"])
        if "queue" in table:
            known = np.array(table["queue"], dtype=float)
            # The curves end at 32,768 s; the few that waited longer thin out by bins.
            rest = np.round((jobs - known.sum()) * np.array([0.65, 0.9]))
            tail = np.diff([0.0, *rest, jobs - known.sum()])
            cells[number] = padded([*known, *tail])
        else:
            longest = table.get("queue_longest_jobs", 0)
            chosen = np.array(table["queue_chosen"], dtype=float)
            cumulative = np.round(np.cumsum(chosen) / chosen.sum() * (jobs - longest))
            cells[number] = padded(list(np.diff(cumulative, prepend=0.0)))
            cells[number, 21] += longest
    seconds = cells @ bin_means(2.0**21)
    seconds[-1] = summary["cpu_queue_mean_s"] * cells[-1].sum()
    if tables["duration_from"] == "submit":
        gpu_s = summary["gpu_queue_mean_s"] * cells[:-1].sum()
        seconds[:-1] *= gpu_s / seconds[:-1].sum()
    return cells, seconds


def _unix_s(text: str, zone: str) -> float:
    return datetime.fromisoformat(f"{text}{zone}").astimezone(UTC).timestamp()
