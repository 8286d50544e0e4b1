"""Make calibrations of the two published clusters, from the counts that their authors published."""

from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final

import numpy as np

from holdfast.core.errors import BadUse
from holdfast.trace.twin.bins import BINS, bin_means, padded
from holdfast.trace.twin.joint import (
    JointMargins,
    carried,
    conditions_of,
    margins_of,
    read_tables,
    steps,
)
from holdfast.trace.twin.model import CPU, Calibration, Floats
from holdfast.trace.twin.outcomes import published_states
from holdfast.trace.twin.reasons import published_reasons
from holdfast.trace.twin.rhythm import published_rhythm

CLUSTERS: Final = ("seren", "kalos")


@lru_cache(maxsize=2)
def calibration(cluster: str) -> Calibration:
    """Return the calibration of a published cluster, `seren` or `kalos`; results are cached.

    Raises:
        BadUse: there is no such cluster.
    """
    if cluster.lower() not in CLUSTERS:
        message = (
            f"There is no published cluster {cluster!r}. "
            f"Give one of {', '.join(CLUSTERS)}, or the path of a trace."
        )
        raise BadUse(message)
    return _made(read_tables(cluster.lower()))


def _made(tables: dict[str, Any]) -> Calibration:
    margins = margins_of(tables)
    gpu_cells = carried(margins, conditions_of(margins, tables["gpu_num"]), tables["cluster"])
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
        cells,
        seconds,
        types=types,
        values=values,
        published=tables["states"],
        cluster=tables["cluster"],
    )
    limit_s = np.full(len(types), float(summary["gpu_run_max_s"]))
    limit_s[-1] = 2.0**21
    counts_queue = tables["duration_from"] == "submit"
    start_s, end_s = (_unix_s(text, tables["zone"]) for text in tables["window"])
    # The released Seren file has separate medians, in its curves. The medians in its summary belong
    # to the larger trace.
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
        longest=(types.index("Pretrain"), float(summary["gpu_run_max_s"]))
        if counts_queue
        else None,
        queue_cells=queue_cells,
        queue_seconds=queue_seconds,
        medians_s=medians,
        states=state_model.states,
        state_shares=state_model.shares,
        state_totals=state_model.totals,
        state_gpu_time=state_model.gpu_time,
        users=published_users(types),
        cpus=published_cpus(types, values, tables["cluster"]),
        hour_of_week=published_hours(),
        dispersion=DISPERSION,
        batch_sizes=published_batches(types),
        rhythm=published_rhythm(types, tables["cluster"]),
        reasons=published_reasons(tables["cluster"]),
    )


def _gpu_time(cells: Floats, margins: JointMargins, gpu_num: dict[str, Any]) -> Floats:
    """Return the GPU time by type and GPU count, with exactly the published shares of both.

    In the stored joint table, these shares are correct to within a few per cent, and proportional
    fitting corrects the rest. The durations are later moved within their bins to match. The shape
    is (types, GPU counts).
    """
    gpu_time: Floats = np.einsum("tgd,td->tg", cells, margins.means_s) * margins.values
    shares = steps(gpu_num["cumulative_gpu_time_pct"])
    by_gpus = [
        ((margins.values > low) & (margins.values <= high), percent / 100)
        for low, high, percent in shares
    ]
    by_type = np.array([margins.tables[name].get("gpu_time_pct", 0.0) for name in margins.types])
    own_s = (margins.durations * margins.means_s).sum(axis=1)
    for _ in range(400):
        # Types without a published share (Kalos' 8 SFT jobs) keep their GPU time.
        known = by_type > 0
        total = margins.gpu_time_s - gpu_time[~known].sum()
        gpu_time[known] *= (by_type[known] / by_type.sum() * total / gpu_time[known].sum(axis=1))[
            :, None
        ]
        # GPU time divided by the GPU count is the jobs' own time, which is also given. To match the
        # own time, move GPU time between few and many GPUs.
        missing_s = own_s - (gpu_time / margins.values).sum(axis=1)
        slope_s = np.maximum((gpu_time / margins.values**2).sum(axis=1), 1e-9)
        gpu_time *= np.exp(np.clip(0.5 * missing_s / slope_s, -0.2, 0.2)[:, None] / margins.values)
        for inside, share in by_gpus:
            held = gpu_time[:, inside].sum()
            if held > 0:
                gpu_time[:, inside] *= share * margins.gpu_time_s / held
    return gpu_time


def _queues(tables: dict[str, Any], types: tuple[str, ...]) -> tuple[Floats, Floats]:
    """Return the distribution of queueing times by type.

    Returns:
        Job counts of shape (types, bins), and the total seconds of each type.
    """
    summary = tables["summary"]
    cells = np.zeros((len(types), BINS))
    for number, name in enumerate(types):
        table = tables["types"][name]
        jobs = float(table["jobs"])
        if "queue" in table:
            known = np.array(table["queue"], dtype=float)
            # The curves end at 32,768 s. The few longer waits are spread over three more bins.
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


DISPERSION: Final = 0.45
"""Standard deviation of the logarithm of the daily rate of arrivals, without the weekly pattern."""

_BATCHES: Final = {
    "Evaluation": 60.0,
    "SFT": 3.0,
    "MLLM": 2.0,
    "Debug": 1.5,
    "Other": 6.0,
    "Pretrain": 1.0,
    CPU: 40.0,
}
_USERS: Final = {
    "Evaluation": 60,
    "SFT": 70,
    "MLLM": 30,
    "Debug": 50,
    "Other": 120,
    "Pretrain": 14,
    CPU: 110,
}
_ZIPF: Final = 1.15
"""Zipf exponent of the users' submissions by rank, so that a few users submit most jobs."""


def published_batches(types: tuple[str, ...]) -> Floats:
    """Return the mean number of jobs that are submitted together, for each type."""
    return np.array([_BATCHES[name] for name in types])


def published_users(types: tuple[str, ...]) -> Floats:
    """Return each user's share of the jobs, of shape (types, users).

    Each type has its own busiest users, and most users work on two or three types.
    """
    everyone = 160
    shares = np.zeros((len(types), everyone))
    rng = np.random.default_rng(2403)
    for number, name in enumerate(types):
        ranks = 1.0 / np.arange(1, _USERS[name] + 1) ** _ZIPF
        # Each type ranks the users from another start, so that the busiest evaluator is no
        # pretrainer.
        who = (7 * number + rng.permutation(everyone)[: _USERS[name]]) % everyone
        shares[number, who] = ranks / ranks.sum()
    return shares


def published_cpus(types: tuple[str, ...], values: Floats, cluster: str) -> Floats:
    """Return the number of CPU cores as in the released rows, of shape (types, GPU counts).

    | cluster | jobs | CPU cores |
    |---|---|---|
    | Seren | on one node | 16 per GPU |
    | Seren | on several nodes | 10 per GPU |
    | Seren | evaluations | 2 per GPU |
    | Kalos | evaluations | 6 per GPU |
    | Kalos | others | 120 per node |
    """
    cpus = np.zeros((len(types), len(values)))
    for number, name in enumerate(types):
        if name == CPU:
            cpus[number] = 2.0 if cluster == "seren" else 4.0
        elif cluster == "seren":
            per_gpu = np.where(values > 8, 10.0, 2.0 if name == "Evaluation" else 16.0)
            cpus[number] = values * per_gpu
        else:
            cpus[number] = values * 6.0 if name == "Evaluation" else 120.0 * np.ceil(values / 8)
    return cpus


def published_hours() -> Floats:
    """Return the share of submissions in each of the 168 local hours of the week.

    The rate is low before dawn, has two peaks on a working day, and is halved on weekends.
    """
    hour = np.arange(24)
    day = 0.35 + np.exp(-(((hour - 11) / 2.6) ** 2)) + 1.05 * np.exp(-(((hour - 16) / 3.0) ** 2))
    day += 0.75 * np.exp(-(((hour - 21.5) / 2.4) ** 2))
    week = np.concatenate([day * (1.0 if weekday < 5 else 0.55) for weekday in range(7)])
    return np.asarray(week / week.sum())
