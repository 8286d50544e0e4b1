"""Estimate the joint table of type, GPU count and duration from its published margins.

The authors published the durations by type, the jobs and the GPU time by GPU count, the GPU time by
type, and the quartiles of the GPU count by type. The estimate starts from a prior that uses only
the box plots of Fig 5: most jobs of a type have a GPU count between the whiskers.

Solving takes some seconds and very many multiplications, whose last digits depend on the machine's
linear algebra library. The solution is therefore stored in `tables/*_joint.csv`, with four digits.
When it is read, it only has to be adjusted to its margins, so the same seed gives the same rows on
every machine. `write_solutions` computes the stored solution again.
"""

import csv
import io
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from holdfast.core.atomic import write_atomic
from holdfast.trace.twin.bins import BINS, bin_edges, bin_means, padded
from holdfast.trace.twin.model import CPU, Floats


@dataclass(frozen=True, kw_only=True)
class Condition:
    """Require that a weighted sum over the table equals a target, or is at least the target.

    Attributes:
        weights: a weight for each cell of the flattened table.
        target: the required value of the weighted sum.
        scale: the error that counts as 1; a smaller scale makes the condition stricter.
        feature: the values that the condition's multiplier scales; by default the weights.
        at_least: True if the sum may exceed the target.
    """

    weights: Floats
    target: float
    scale: float
    feature: Floats | None = None
    at_least: bool = False


def tilted(
    prior: Floats, conditions: list[Condition], *, rounds: int = 300, tolerance: float = 1e-3
) -> Floats:
    """Change the prior as little as possible so that all conditions hold.

    A condition holds if its error is at most `tolerance` times its scale. The prior is multiplied
    by exponential factors (exponential tilting), whose multipliers are found by the method of
    Levenberg and Marquardt. Conditions that contradict each other are met in the least-squares
    sense.

    Args:
        prior: an array of any shape with values >= 0; a cell of 0 stays 0.
        conditions: the conditions.
        rounds: the maximum number of iterations.
        tolerance: the largest error that may remain, in units of each condition's scale.
    """
    flat = prior.ravel()
    possible = flat > 0
    cells = np.log(flat[possible])
    scale = np.array([condition.scale for condition in conditions])
    weights = np.array([condition.weights[possible] for condition in conditions]) / scale[:, None]
    features = np.array(
        [(c.weights if c.feature is None else c.feature)[possible] for c in conditions],
    )
    target = np.array([condition.target for condition in conditions]) / scale
    one_sided = np.array([condition.at_least for condition in conditions])

    def errors(table: Floats) -> Floats:
        error: Floats = weights @ table - target
        return np.where(one_sided, np.minimum(error, 0.0), error)

    table = np.exp(cells)
    error = errors(table)
    damping = 1e-2
    for _ in range(rounds):
        if np.abs(error).max() < tolerance:
            break
        active = ~one_sided | (error < 0)
        jacobian = (weights[active] * table) @ features[active].T
        normal = jacobian.T @ jacobian
        slope = jacobian.T @ error[active]
        while damping < 1e12:
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -slope)
            moved = cells + np.clip(step @ features[active], -3.0, 3.0)
            next_table = np.exp(np.minimum(moved, 40.0))
            next_error = errors(next_table)
            if next_error @ next_error < error @ error:
                cells, table, error = moved, next_table, next_error
                damping = max(damping / 5.0, 1e-12)
                break
            damping *= 4.0
        else:
            break
    answer = np.zeros_like(flat)
    answer[possible] = table
    return answer.reshape(prior.shape)


def raked(
    table: Floats,
    durations: Floats,
    by_gpus: list[tuple[npt.NDArray[np.bool_], float]],
    quartiles: list[tuple[int, npt.NDArray[np.bool_], float]],
) -> Floats:
    """Adjust a table by proportional fitting, so that its margins of jobs are met exactly.

    Args:
        table: jobs of shape (types, GPU counts, bins), which nearly meets the margins.
        durations: the number of jobs, of shape (types, bins).
        by_gpus: sets of GPU counts, each with the number of jobs in it.
        quartiles: types, each with a set of GPU counts and the fewest jobs of the type in it.
    """
    raked_: Floats = table * (durations.sum(axis=1) / table.sum(axis=(1, 2)))[:, None, None]
    for _ in range(400):
        off = 0.0
        for type_, inside, least in quartiles:
            held = raked_[type_, inside].sum()
            if 0 < held < least:
                rest = raked_[type_].sum() - held
                raked_[type_, inside] *= least / held
                raked_[type_, ~inside] *= max(rest - (least - held), 0.0) / rest
                off = max(off, least - held - 0.5)
        for inside, jobs in by_gpus:
            held = raked_[:, inside].sum()
            if held > 0:
                raked_[:, inside] *= jobs / held
        held_by_type = raked_.sum(axis=1)
        raked_ *= np.divide(
            durations, held_by_type, out=np.ones_like(durations), where=held_by_type > 0
        )[:, None, :]
        off = max([off, *(abs(raked_[:, inside].sum() - jobs) for inside, jobs in by_gpus)])
        if off < 1e-7:
            break
    return raked_


_CARRIED_BINS: Final = 22
"""Number of stored bins, because the published curves of GPU jobs end at 2^21 s."""

OUTLIERS: Final = 0.05
"""Prior weight of a GPU count just outside a type's whiskers, relative to the weight inside."""


@dataclass(frozen=True, kw_only=True)
class JointMargins:
    """Hold the published tables of the GPU jobs of one cluster."""

    types: tuple[str, ...]
    values: Floats
    durations: Floats
    means_s: Floats
    gpu_time_s: float
    tables: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Hold the conditions that the joint table must meet, and the prior from which to start."""

    prior: Floats
    tilts: list[Condition]
    by_gpus: list[tuple[Any, float]]
    quartiles: list[tuple[int, Any, float]]


def read_tables(cluster: str) -> dict[str, Any]:
    """Read the published tables of a cluster."""
    return tomllib.loads(_folder().joinpath(f"{cluster}.toml").read_text("utf-8"))


def carried(margins: JointMargins, conditions: Conditions, cluster: str) -> Floats:
    """Read the stored joint table of GPU jobs, and adjust it to meet all margins of jobs exactly.

    Its shape is (types, GPU counts, bins).
    """
    table = np.zeros(conditions.prior.shape)
    for row in csv.reader(
        io.StringIO(_folder().joinpath(f"{cluster}_joint.csv").read_text("utf-8"))
    ):
        if row[0] != "type":
            place = int(np.searchsorted(margins.values, float(row[1])))
            table[margins.types.index(row[0]), place] = padded([float(cell) for cell in row[2:]])
    return raked(table, margins.durations, conditions.by_gpus, conditions.quartiles)


def solved(conditions: Conditions) -> Floats:
    """Compute the joint table that is nearest to the prior and meets all published numbers.

    Its shape is (types, GPU counts, bins).
    """
    return tilted(conditions.prior, conditions.tilts)


def _folder() -> Any:
    return resources.files("holdfast.trace.twin").joinpath("tables")


def margins_of(tables: dict[str, Any]) -> JointMargins:
    """Return the published margins of the GPU jobs, and two results that follow from them.

    These are the mean duration in each bin, and the GPU time of all jobs.
    """
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
        # The GPU time of the released file is not published, but its shares by GPU count are. The
        # share of a GPU count, divided by that count, is proportional to the jobs' own time, and
        # the sum of the jobs' own times is known from the duration curve.
        curve = np.array(tables["gpu_num"]["cumulative_gpu_time_pct"], dtype=float)
        shares = np.diff(curve[:, 1], prepend=0.0) / 100
        gpu_time_s = float((durations * means).sum() / (shares / curve[:, 0]).sum())
    return JointMargins(
        types=types,
        values=np.array(tables["gpu_num"]["values"], dtype=float),
        durations=durations,
        means_s=means,
        gpu_time_s=gpu_time_s,
        tables=tables["types"],
    )


def _scaled_means(means: Floats, counts: Floats, total_s: float, limit_s: float) -> Floats:
    """Move each bin's mean within the bin, so that the durations of all jobs sum to `total_s`."""
    lower, upper = bin_edges(limit_s)
    low, high = 0.5, 2.0
    for _ in range(50):
        factor = (low + high) / 2
        moved = np.clip(
            means * factor, lower + 0.1 * (upper - lower), lower + 0.9 * (upper - lower)
        )
        low, high = (factor, high) if (moved * counts).sum() < total_s else (low, factor)
    return moved


def conditions_of(margins: JointMargins, gpu_num: dict[str, Any]) -> Conditions:
    """Express all published numbers as conditions on the joint table of GPU jobs."""
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
    for low, high, jobs in steps(gpu_num["cumulative_jobs"]):
        inside = (margins.values > low) & (margins.values <= high)
        if not inside.any():
            continue
        overall[inside] = jobs / inside.sum()
        by_gpus.append((inside, jobs))
        conditions.append(
            Condition(weights=flat(inside[None, :, None]), target=jobs, scale=0.1 + 0.001 * jobs),
        )
    for low, high, percent in steps(gpu_num["cumulative_gpu_time_pct"]):
        inside = ((margins.values > low) & (margins.values <= high))[None, :, None]
        if inside.any():
            weights, feature = flat(gpu_s * inside), flat(log_s * inside) / 3
            conditions.append(
                Condition(weights=weights, feature=feature, target=percent, scale=0.01)
            )
    allowed = np.ones(shape[:2])
    for number, name in enumerate(margins.types):
        own = types == number
        for bin_, jobs in enumerate(margins.durations[number]):
            if jobs:
                weights = flat(own & (np.arange(BINS) == bin_)[None, None, :])
                conditions.append(Condition(weights=weights, target=jobs, scale=0.1 + 0.001 * jobs))
        table = margins.tables[name]
        if "box_gpu_num" not in table:
            # No GPU counts are published for the few jobs of this type; they are small.
            allowed[number] = margins.values <= 8
            continue
        # The durations of a type are given. Its GPU time therefore depends only on how the
        # durations vary with the GPU count.
        feature = flat(log_s * np.log(values) * own) / 10
        percent = table["gpu_time_pct"]
        conditions.append(
            Condition(weights=flat(gpu_s * own), feature=feature, target=percent, scale=0.02)
        )
        allowed[number] = _within_box(margins.values, table["box_gpu_num"])
        for mask, least, scale in _box_conditions(margins.values, table):
            weights = flat(own & mask[None, :, None])
            conditions.append(Condition(weights=weights, target=least, scale=scale, at_least=True))
            quartiles.append((number, mask, least))
    prior = margins.durations[:, None, :] * (overall * allowed)[:, :, None]
    prior *= (margins.durations.sum(axis=1) / prior.sum(axis=(1, 2)))[:, None, None]
    return Conditions(prior=prior, tilts=conditions, by_gpus=by_gpus, quartiles=quartiles)


def steps(curve: list[list[float]]) -> list[tuple[float, float, float]]:
    """Return the steps of a cumulative curve: lower x (exclusive), upper x, and height of each."""
    before = [[0.0, 0.0], *curve[:-1]]
    return [(x0, x1, y1 - y0) for (x0, y0), (x1, y1) in zip(before, curve, strict=True)]


def _within_box(values: Floats, box: list[float]) -> Floats:
    """Return the prior weight of each GPU count, given the box plot of a type.

    The weight is 0 between a whisker and the limit of 1.5 IQR from the box, because by definition
    no value lies between them.
    """
    whisker_low, q1, _, q3, whisker_high = box
    reach = 1.5 * (q3 - q1)
    with np.errstate(divide="ignore"):
        outlier = OUTLIERS * np.minimum((whisker_high / values) ** 1.5, 1.0)
    allowed = np.where(
        values > whisker_high, outlier, np.where(values < whisker_low, OUTLIERS, 1.0)
    )
    allowed[(values > whisker_high) & (values <= q3 + reach)] = 0.0
    allowed[(values < whisker_low) & (values >= q1 - reach)] = 0.0
    return allowed


def _box_conditions(values: Floats, table: dict[str, Any]) -> list[tuple[Any, float, float]]:
    """Return conditions under which NumPy's percentiles equal the quartiles of a box plot.

    NumPy (with linear interpolation) reads the percentile p of n values at position (n - 1) p.
    Enough jobs must therefore lie at or below each quartile, and enough at or above it. A margin of
    0.5% ensures that the quartile survives the rounding to whole jobs.

    Returns:
        For each condition, a set of GPU counts, the fewest jobs in it, and the condition's scale.
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


def write_solutions(folder: Path) -> None:
    """Solve the joint tables of both clusters again, and write `*_joint.csv` into a folder."""
    for cluster in ("seren", "kalos"):
        tables = read_tables(cluster)
        margins = margins_of(tables)
        table = solved(conditions_of(margins, tables["gpu_num"]))
        lines = ["type,gpu_num," + ",".join(f"bin_{number}" for number in range(_CARRIED_BINS))]
        for name, of_type in zip(margins.types, table, strict=True):
            for gpus, cells in zip(margins.values, of_type, strict=True):
                # Fewer than one job in ten thousand draws counts as 0.
                kept = [f"{cell:.4g}" if cell >= 1e-4 else "0" for cell in cells[:_CARRIED_BINS]]
                if any(cell != "0" for cell in kept):
                    lines.append(f"{name},{gpus:g},{','.join(kept)}")
        write_atomic(folder / f"{cluster}_joint.csv", ("\n".join(lines) + "\n").encode())
