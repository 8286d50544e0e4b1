"""Stage 8: assign causes of failures from the study's Table 3 to the failed jobs of a twin.

Table 3 lists the failures with a recorded cause, in the study's larger trace. The released trace
has no causes, and most failed jobs of a twin (a synthetic trace) have none either. At full size,
the twins of both clusters together have

- exactly the numbers of failures in the table;
- its shares of GPU time, to within one percentage point (a quarter of a point with the default
  seed);
- its mean GPUs to within a tenth and its mean times to failure to within a third, for reasons with
  at least ten jobs and the default seed.

Two differences remain, since the released failed jobs do not permit a better match. First, failures
of Kalos on hundreds of GPUs (NCCL, the dataloader) take only a quarter to two thirds of their time
in the table, and no job of Kalos has the 1152 GPUs of `NCCLRemoteError`. Second, the table's
numbers times its means exceed the GPU time of the released failed jobs several times. In a twin,
the largest of these jobs therefore fail early, and the longest have fewer GPUs. Restarts are not
modelled.
"""

import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, Final

import numpy as np

from holdfast.trace.causes import cause_of
from holdfast.trace.twin.model import Column, Floats, Ints, Reasons, TwinJobs
from holdfast.trace.twin.rounding import largest_remainder
from holdfast.trace.twin.writing import write_rows

FAILED: Final = ("FAILED", "NODE_FAIL")
"""States of the jobs that may get a reason; TIMEOUT needs none."""

_NODE_FAILURE: Final = "NodeFailure"

_SHARE: Final = 0.002
_GPUS: Final = 0.25
_TIME: Final = 0.6
"""Errors that count as equal: of the share of GPU time, log mean GPUs, and log mean time."""
_GOOD: Final = 2e-3
"""A reason is not improved further if the sum of its squared errors is below this."""
_SWEEPS: Final = 8
_NEW_DEALS: Final = 100
_TRIED: Final = 32
"""The most jobs of a reason that one pass replaces."""
_OFFERED: Final = 6000
"""The approximate number of candidates for a swap, which limits the time of a large draw."""

_SMALL_GPUS: Final = 32
_SMALL_GPU_TIME_S: Final = 8 * 3600.0
"""Jobs below both limits are plentiful, so only a sample of them is considered."""
_SAMPLE: Final = 1000


def published_reasons(cluster: str) -> Reasons:
    """Return the part of Table 3 that belongs to a published cluster.

    If both clusters have a reason, the table's `kalos_share` divides its number and its GPU time.

    Args:
        cluster: `seren` or `kalos`.
    """
    path = resources.files("holdfast.trace.twin").joinpath("tables").joinpath("reasons.toml")
    table: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
    rows = []
    for name, clusters, number, gpu_num, minutes, percent in table["reasons"]:
        of_kalos = {"K": number, "S": 0}.get(clusters, max(round(table["kalos_share"] * number), 1))
        own = of_kalos if cluster == "kalos" else number - of_kalos
        if own:
            gpu_time_s = 3600.0 * table["gpu_hours"] * percent / 100 * own / number
            rows.append((name, own, gpu_num, 60.0 * minutes, gpu_time_s))
    names, *numbers = zip(*rows, strict=True)
    counts, gpu_nums, runs_s, gpu_times_s = (np.array(column, dtype=float) for column in numbers)
    return Reasons(
        names=names, types=frozenset(table["types"]), jobs=counts, gpu_num=gpu_nums, run_s=runs_s,
        gpu_time_s=gpu_times_s,
    )  # fmt: skip


def dealt_reasons(
    reasons: Reasons,
    factor: float,
    types: Column,
    gpus: Ints,
    runs_s: Ints,
    states: Column,
    rng: np.random.Generator,
) -> tuple[Column, Column]:
    """Assign reasons to failed jobs.

    The number of NODE_FAIL jobs does not change. The state NODE_FAIL is given first to jobs with
    the reason `NodeFailure`, and then to jobs with other infrastructure reasons, in the order of
    `reasons`.

    Args:
        reasons: the targets, at full size.
        factor: the ratio of the draw's size to full size.
        types: the type of each job.
        gpus: the number of GPUs of each job.
        runs_s: the seconds from each job's start to its end.
        states: the state of each job.
        rng: the random generator.

    Returns:
        The reason of each job, '' if none was recorded, and the new state of each job.
    """
    failed = np.isin(states, FAILED) & (gpus > 0) & (runs_s > 0)
    able = np.flatnonzero(failed & np.isin(types, sorted(reasons.types)))
    counts = largest_remainder(
        reasons.jobs, min(round(float(reasons.jobs.sum()) * factor), len(able))
    )
    pool = _pool(able, gpus, runs_s, 2 * int(counts.sum()) + _SAMPLE, rng)
    dealing = _Dealing(
        reasons, counts, factor, gpus[pool].astype(float), runs_s[pool].astype(float)
    )
    of = np.full(len(states), -1)
    of[pool] = dealing.dealt(rng)

    names = np.array([*reasons.names, ""])
    category = np.array([cause_of(None, name, None).category for name in reasons.names])
    rank = np.where(np.array(reasons.names) == _NODE_FAILURE, -1, np.arange(len(counts)))
    was = np.flatnonzero(failed & (states == "NODE_FAIL"))
    infrastructure = np.flatnonzero(np.isin(of, np.flatnonzero(category == "Infrastructure")))
    infrastructure = infrastructure[np.argsort(rank[of[infrastructure]], kind="stable")]
    states = states.copy()
    states[was] = "FAILED"
    states[np.concatenate([infrastructure, was[of[was] < 0]])[: len(was)]] = "NODE_FAIL"
    return names[of], states


def _pool(able: Ints, gpus: Ints, runs_s: Ints, small: int, rng: np.random.Generator) -> Ints:
    """Return the jobs to choose from: all large jobs, and a sample of the small ones."""
    is_small = (gpus[able] < _SMALL_GPUS) & (gpus[able] * runs_s[able] < _SMALL_GPU_TIME_S)
    kept = rng.permutation(able[is_small])[:small]
    return np.sort(np.concatenate([able[~is_small], kept]))


class _Dealing:
    """Search for a good assignment of reasons to jobs.

    The search starts with a random assignment, and improves it by swaps between two jobs. The two
    jobs have different reasons, or one of them has none.
    """

    def __init__(
        self, reasons: Reasons, counts: Ints, factor: float, gpus: Floats, runs_s: Floats
    ) -> None:
        self.counts = counts
        self.gpus = gpus
        self.values = np.stack([gpus, runs_s, gpus * runs_s])
        """GPUs, run time in s, and GPU time in s of each job, of shape (3, jobs)."""
        share = np.divide(counts, reasons.jobs * factor)
        self.wanted = np.stack(
            [counts * reasons.gpu_num, counts * reasons.run_s, share * reasons.gpu_time_s * factor]
        )
        self.unit_s = _SHARE * max(float(reasons.gpu_time_s.sum()) * factor, 1.0)
        self.of = np.full(len(gpus), -1)
        self.sums = np.zeros((3, len(counts)))

    def dealt(self, rng: np.random.Generator) -> Ints:
        """Return the index of each job's reason; -1 for no reason."""
        # Deal reasons of large jobs first, because large jobs are scarce.
        mean_gpus = np.nan_to_num(
            np.divide(self.wanted[0], self.counts, where=self.counts > 0, out=self.wanted[0] * 0)
        )
        order = np.argsort(-mean_gpus, kind="stable")
        for reason in order[self.counts[order] > 0].tolist():
            free = np.flatnonzero(self.of < 0)
            # If the mean is small or unknown, choose mostly small jobs, as most failed jobs are
            # small.
            chance = np.where(self.gpus[free] < _SMALL_GPUS, 1.0, 0.01)
            if mean_gpus[reason] >= _SMALL_GPUS:
                chance = np.exp2(-np.abs(np.log2(self.gpus[free] / mean_gpus[reason])))
            picked = rng.choice(
                free, size=self.counts[reason], replace=False, p=chance / chance.sum()
            )
            self.of[picked] = reason
            self.sums[:, reason] = self.values[:, picked].sum(axis=1)
        part = min(_OFFERED / max(len(self.of), 1), 1.0)
        for _ in range(_SWEEPS):
            if not sum([self._improved(reason, part, rng) for reason in order.tolist()]):
                break
        # Where single swaps bring no improvement, drawing some jobs of one reason again may.
        for _ in range(_NEW_DEALS):
            before, sums, costs = self.of.copy(), self.sums.copy(), self._costs()
            if costs.sum() < _GOOD * len(costs):
                break
            reason = int(rng.choice(len(costs), p=costs / costs.sum()))
            self._draw_again(reason, rng)
            self._improved(reason, part / 2, rng)
            if self._costs().sum() >= costs.sum():
                self.of, self.sums = before, sums
        return self.of

    def _draw_again(self, reason: int, rng: np.random.Generator) -> None:
        """Replace some jobs of a reason by random jobs that have no reason."""
        own, free = np.flatnonzero(self.of == reason), np.flatnonzero(self.of < 0)
        count = min(int(rng.integers(1, len(own) + 1)), len(free), _TRIED)
        for jobs, sign, owner in (
            (rng.choice(own, count, False), -1, -1),
            (rng.choice(free, count, False), 1, reason),
        ):
            self.of[jobs] = owner
            self.sums[:, reason] += sign * self.values[:, jobs].sum(axis=1)

    def _costs(self) -> Floats:
        known = np.flatnonzero(self.counts > 0)
        costs = np.zeros(len(self.counts))
        costs[known] = self._cost(known, self.sums[:, known])
        return costs

    def _improved(self, reason: int, part: float, rng: np.random.Generator) -> int:
        """Replace jobs of a reason by better candidates, as long as this reduces the error.

        Returns:
            The number of swaps.
        """
        offered = np.flatnonzero(rng.random(len(self.of)) < part)
        moves = 0
        own = np.flatnonzero(self.of == reason)
        # Try large and long jobs first, in part by chance, because they contribute most to the
        # sums.
        part_of_sums = (self.values[:2, own] / self.sums[:2, reason, None]).sum(axis=0)
        for job in own[np.argsort(-part_of_sums * rng.random(len(own)))][:_TRIED].tolist():
            now = self._cost(reason, self.sums[:, reason])
            if now < _GOOD:
                break
            change = self.values[:, offered] - self.values[:, job, None]
            gain = self._cost(reason, self.sums[:, reason, None] + change) - now
            owner = self.of[offered]
            taken = np.flatnonzero((owner >= 0) & (owner != reason))
            other = owner[taken]
            was = self._cost(other, self.sums[:, other])
            gain[taken] += self._cost(other, self.sums[:, other] - change[:, taken]) - was
            gain[owner == reason] = 0.0
            best = int(np.argmin(gain))
            if gain[best] > -_GOOD / 10:
                continue
            self.sums[:, reason] += change[:, best]
            if owner[best] >= 0:
                self.sums[:, owner[best]] -= change[:, best]
            self.of[job], self.of[offered[best]] = owner[best], reason
            moves += 1
        return moves

    def _cost(self, reason: Any, sums: Floats) -> Any:
        """Return the sum of squared errors for given sums of GPUs, run time and GPU time.

        A target that is unknown adds nothing.
        """
        wanted = self.wanted[:, reason]
        wanted = wanted.reshape(3, *[1] * (sums.ndim - wanted.ndim), *wanted.shape[1:])
        ratio = np.nan_to_num(np.log(np.maximum(sums[:2], 1.0) / wanted[:2]))
        return (
            (ratio[0] / _GPUS) ** 2
            + (ratio[1] / _TIME) ** 2
            + ((sums[2] - wanted[2]) / self.unit_s) ** 2
        )


def write_reasons(jobs: TwinJobs, path: Path | str) -> None:
    """Write the reasons as CSV: `job_id,reason,category` of each job that has a reason.

    The rows are in the order of the trace. The reasons are in a separate file, because the
    published form of the trace has no column for them.

    Raises:
        OSError: the file cannot be written; no partial file is left.
    """
    known = jobs.reason != ""
    category = {
        name: cause_of(None, name, None).category for name in np.unique(jobs.reason[known]).tolist()
    }
    categories = np.array([category[name] for name in jobs.reason[known].tolist()], dtype="U")
    write_rows(
        Path(path), "job_id,reason,category", [jobs.job_id[known], jobs.reason[known], categories]
    )
