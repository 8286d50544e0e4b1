"""Stage 2: round tables to whole jobs, with every margin kept."""

import numpy as np

from holdfast.trace.twin.bins import BINS, bin_means
from holdfast.trace.twin.model import Floats, Ints


def largest_remainder(shares: Floats, total: int) -> Ints:
    """Return integers proportional to `shares` that sum to `total`.

    Shares are rounded down; the largest remainders get one more.
    """
    if shares.sum() <= 0:
        return np.zeros(shares.shape, dtype=np.int64)
    exact = shares / shares.sum() * total
    whole: Ints = np.floor(exact + 1e-9).astype(np.int64)
    order = np.argsort(whole - exact, kind="stable")
    whole[order[: total - whole.sum()]] += 1
    return whole


def cumulative_rounded(parts: Floats, total: int) -> Ints:
    """Return integers with the sum `total`, whose cumulative sums are those of `parts`, rounded.

    The authors published cumulative curves of ordered bins, so rounding must keep these curves.
    """
    if total == 0:
        return np.zeros(len(parts), dtype=np.int64)
    curve = np.floor(np.cumsum(parts) / parts.sum() * total + 0.5 - 1e-7)
    whole: Ints = curve.astype(np.int64)
    whole[1:] -= whole[:-1].copy()
    return whole


def rounded_table(table: Floats, rows: Ints, columns: Ints, rng: np.random.Generator) -> Ints:
    """Return integers near `table` with exactly these row and column sums.

    The method is controlled rounding (Bacharach 1966): the table is raked to the margins and
    rounded down. The missing units go to cells that are drawn by their remainders.
    """
    outer = np.outer(rows, columns) / max(int(rows.sum()), 1)
    raked = np.where(outer > 0, table + 1e-9 * outer, 0.0)
    for _ in range(60):
        for axis, margin in ((1, rows), (0, columns)):
            held = raked.sum(axis=axis)
            factor = np.divide(margin, held, out=np.zeros(len(held)), where=held > 0)
            raked *= factor[:, None] if axis == 1 else factor[None, :]
    whole = np.floor(raked + 1e-9).astype(np.int64)
    # Where raking has not converged a margin may be exceeded by a unit.
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
    """Add one to the sums of a row and of a column, in place.

    If the cell of both must stay empty, two other cells of the row and the column get a unit, and
    the cell at their corner loses one.
    """
    if table[row, column] <= 0:
        # Another row gives a unit in a column where this one may have it, and takes it in the column that lacks it.
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
    """Return whole jobs near `cells`, `total` in all, and the total duration for each GPU count.

    Three margins are exact: jobs by type, the curve of jobs by type and duration, the curve of jobs
    by GPU count. Then jobs of a type swap their GPU counts until the GPU time of each count is as
    near to `seconds` as whole jobs permit.

    Returns:
        (T, G, D) jobs, and (T, G) total durations in seconds.
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
    """Return the (T, G) durations for the rounded jobs.

    The duration of cells that have no job after rounding goes to other cells of the type and of the
    GPU count.
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
    """Swap jobs of a type between GPU counts, in place, while the GPU time gets nearer its target.

    An error has more weight if durations within the bins can hardly correct it: about a fifth of a
    group's GPU time can be corrected.
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
        # A job of `worst` goes from bin b to bin c, one of `other` the other way.
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
