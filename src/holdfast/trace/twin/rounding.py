"""Stage 2: round tables to whole jobs, such that every margin is kept."""

import numpy as np

from holdfast.trace.twin.bins import BINS, bin_means
from holdfast.trace.twin.model import Floats, Ints


def largest_remainder(shares: Floats, total: int) -> Ints:
    """Return integers that are proportional to `shares` and sum to `total`.

    All values are rounded down, and then those with the largest remainders are increased by one.
    """
    if shares.sum() <= 0:
        return np.zeros(shares.shape, dtype=np.int64)
    exact = shares / shares.sum() * total
    whole: Ints = np.floor(exact + 1e-9).astype(np.int64)
    order = np.argsort(whole - exact, kind="stable")
    whole[order[: total - whole.sum()]] += 1
    return whole


def cumulative_rounded(parts: Floats, total: int) -> Ints:
    """Round `parts` to integers that sum to `total`, such that their cumulative curve is kept.

    Each cumulative sum is the rounded cumulative sum of `parts`, scaled to `total`. The authors
    published cumulative curves over ordered bins, so rounding must preserve these.
    """
    if total == 0:
        return np.zeros(len(parts), dtype=np.int64)
    curve = np.floor(np.cumsum(parts) / parts.sum() * total + 0.5 - 1e-7)
    whole: Ints = curve.astype(np.int64)
    whole[1:] -= whole[:-1].copy()
    return whole


def rounded_table(table: Floats, rows: Ints, columns: Ints, rng: np.random.Generator) -> Ints:
    """Round a table to integers that have exactly the given row and column sums.

    The method is controlled rounding (Bacharach 1966). The table is adjusted to the margins by
    proportional fitting, and rounded down. The units that are missing are added to cells drawn at
    random, with probabilities by their remainders.
    """
    outer = np.outer(rows, columns) / max(int(rows.sum()), 1)
    raked = np.where(outer > 0, table + 1e-9 * outer, 0.0)
    for _ in range(60):
        for axis, margin in ((1, rows), (0, columns)):
            held = raked.sum(axis=axis)
            factor = np.divide(margin, held, out=np.zeros(len(held)), where=held > 0)
            raked *= factor[:, None] if axis == 1 else factor[None, :]
    whole = np.floor(raked + 1e-9).astype(np.int64)
    # If raking has not converged, a row or column may exceed its margin by a unit.
    for axis, margin in ((1, rows), (0, columns)):
        for line in np.flatnonzero(whole.sum(axis=axis) > margin):
            cells = whole[line] if axis == 1 else whole[:, line]
            while cells.sum() > margin[line]:
                cells[np.argmax(cells)] -= 1
    row_needs, column_needs = rows - whole.sum(axis=1), columns - whole.sum(axis=0)
    remainder = np.maximum(raked - whole, 1e-12)
    order = np.argsort(-(np.log(remainder) + rng.gumbel(size=remainder.shape)), axis=None)
    for cell in order.tolist():
        row, column = divmod(cell, table.shape[1])
        if table[row, column] <= 0:
            continue
        if row_needs[row] > 0 and column_needs[column] > 0:
            whole[row, column] += 1
            row_needs[row] -= 1
            column_needs[column] -= 1
    while row_needs.any():
        row, column = int(np.argmax(row_needs)), int(np.argmax(column_needs))
        _add_unit(whole, table, row, column)
        row_needs[row] -= 1
        column_needs[column] -= 1
    return whole


def _add_unit(whole: Ints, table: Floats, row: int, column: int) -> None:
    """Increase the sums of one row and one column by 1, in place.

    If the cell in this row and column must stay 0, one cell in the row and one in the column are
    increased instead, and the cell in the other row and column of these two is decreased.
    """
    if table[row, column] <= 0:
        # Another row gives up a unit in a column that this row may use, and gets a unit in the
        # column that lacks one.
        corner = (table[row] > 0)[None, :] & (table[:, column] > 0)[:, None] & (whole > 0)
        corner[row] = False
        if corner.any():
            giver, through = np.unravel_index(
                int(np.argmax(np.where(corner, table, -1.0))), table.shape
            )
            whole[giver, through] -= 1
            whole[row, through] += 1
            row = int(giver)
    whole[row, column] += 1


def rounded_cells(
    cells: Floats,
    seconds: Floats,
    limit_s: Floats,
    gpu_nums: Floats,
    total: int,
    rng: np.random.Generator,
) -> tuple[Ints, Floats]:
    """Round the cells of a calibration to whole jobs, `total` in all.

    Three margins are exact: jobs by type, the curve of jobs by type and duration, and the curve of
    jobs by GPU count. Jobs of the same type then swap their GPU counts, until the GPU time of each
    count is as close to `seconds` as whole jobs permit.

    Returns:
        The jobs, of shape (types, GPU counts, bins), and their total durations in seconds, of shape
        (types, GPU counts).
    """
    factor = total / cells.sum()
    is_gpu = gpu_nums > 0
    of_type = largest_remainder(cells.sum(axis=(1, 2)), total)
    durations = np.array(
        [
            cumulative_rounded(own.sum(axis=0), count)
            for own, count in zip(cells, of_type, strict=True)
        ]
    )
    whole = np.zeros(cells.shape, dtype=np.int64)
    wanted = seconds * factor
    for part in (is_gpu, ~is_gpu):
        types = np.flatnonzero(cells[:, part].sum(axis=(1, 2)) > 0)
        if not len(types):
            continue
        jobs = int(of_type[types].sum())
        by_gpus = cumulative_rounded(cells[np.ix_(types, part)].sum(axis=(0, 2)), jobs)
        split = rounded_table(
            cells[np.ix_(types, part)].sum(axis=2) * factor, of_type[types], by_gpus, rng
        )
        for row, counts in zip(types.tolist(), split, strict=True):
            whole[row, part] = rounded_table(cells[row, part] * factor, counts, durations[row], rng)
    wanted = _reweighted(
        wanted, cells.sum(axis=2) * factor, whole.sum(axis=2), np.maximum(gpu_nums, 1)
    )
    if is_gpu.sum() > 1:
        for row in range(len(cells)):
            _swap_to_time(whole[row], wanted[row], bin_means(limit_s[row]), gpu_nums)
    return whole, wanted


def _reweighted(seconds: Floats, expected: Floats, jobs: Ints, gpu_nums: Floats) -> Floats:
    """Return total durations that fit the rounded jobs, of shape (types, GPU counts).

    If a cell has no job after rounding, its duration is distributed over other cells of the same
    type and of the same GPU count.
    """
    by_type, by_gpus = (seconds * gpu_nums).sum(axis=1), (seconds * gpu_nums).sum(axis=0)
    gpu_time = (
        np.divide(seconds * gpu_nums, expected, out=np.zeros_like(seconds), where=expected > 0)
        * jobs
    )
    for _ in range(200):
        for axis, margin in ((1, by_type), (0, by_gpus)):
            held = gpu_time.sum(axis=axis)
            factor = np.divide(margin, held, out=np.zeros_like(margin), where=held > 0)
            gpu_time *= factor[:, None] if axis == 1 else factor[None, :]
    return gpu_time / gpu_nums


def _swap_to_time(
    jobs: Ints, seconds: Floats, means_s: Floats, gpu_nums: Floats, moves: int = 600
) -> None:
    """Swap jobs of a type between GPU counts, in place, to bring the GPU time to its target.

    An error in a group has more weight if it cannot be corrected later. About a fifth of a group's
    GPU time can be corrected by moving durations within their bins.
    """
    ease = 0.15 * gpu_nums * seconds + 5e-5 * float((gpu_nums * seconds).sum()) + 1e-9
    unit = gpu_nums / ease
    error = unit * (jobs @ means_s - seconds)
    open_ = np.flatnonzero((jobs.sum(axis=1) > 0) & (gpu_nums > 0))
    sweeps = 3
    first_bin = 8  # shorter jobs hold too little time to matter
    bins = np.arange(first_bin, BINS)
    gain_s = means_s[bins][None, :] - means_s[bins][:, None]  # [from, to]
    everyone = open_
    for _ in range(moves):
        if not len(open_):
            sweeps -= 1
            if not sweeps:
                break
            open_ = everyone
        worst = open_[np.argmax(np.abs(error[open_]))] if len(open_) else 0
        if not len(open_) or abs(error[worst]) < 0.3:
            break
        # A job of `worst` moves from bin b to bin c, and a job of `other` from c to b.
        mine = error[worst] + unit[worst] * gain_s
        theirs = error[:, None, None] - unit[:, None, None] * gain_s[None]
        cost = mine[None] ** 2 - error[worst] ** 2 + theirs**2 - (error**2)[:, None, None]
        possible = (jobs[worst, bins] > 0)[None, :, None] & (jobs[:, None, bins] > 0)
        possible[worst] = False
        cost = np.where(possible, cost, np.inf)
        best = int(np.argmin(cost))
        if cost.ravel()[best] >= -1e-3 * error[worst] ** 2:
            open_ = open_[open_ != worst]
            continue
        other, from_, to = np.unravel_index(best, cost.shape)
        error[worst], error[other] = mine[from_, to], theirs[other, from_, to]
        jobs[worst, bins[from_]] -= 1
        jobs[worst, bins[to]] += 1
        jobs[other, bins[to]] -= 1
        jobs[other, bins[from_]] += 1
