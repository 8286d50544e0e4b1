"""Stage 1: the joint table that nobody published, from margins that were.

A prior table p is tilted, cell by cell, by exp(sum of multiplier x feature) until it meets linear conditions: the
generalised form of iterative proportional fitting (Deming & Stephan 1940; Deville & Särndal 1992 call it calibration).
Where feature and condition are the same the answer is the one of least relative entropy. GPU time is the exception: its
feature is the logarithm of the duration, because tilting by the duration itself (up to 1.2e6 s) would give a GPU count
either the very longest jobs or none.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One thing that the table must fulfil: weights . table = target, or >= target.

    Attributes:
        weights: of the flattened table's cells.
        target: what the weighted sum must be.
        scale: the error that counts as one; smaller is stricter.
        feature: what the multiplier tilts by; the weights themselves unless given.
        at_least: an inequality: more than the target is as good.
    """

    weights: Floats
    target: float
    scale: float
    feature: Floats | None = None
    at_least: bool = False


def tilted(
    prior: Floats, conditions: list[Condition], *, rounds: int = 300, tolerance: float = 1e-3
) -> Floats:
    """The prior tilted until it meets the conditions, each within `tolerance` of its scale.

    Levenberg-Marquardt on the multipliers; conditions that contradict each other are met in the least-squares sense.

    Args:
        prior: any shape, >= 0; a cell of 0 stays 0.
        conditions: what to meet.
        rounds: iterations at most.
        tolerance: of the largest error, in scales.
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
    """The (T, G, D) table with both margins of jobs met to the last digit, by proportional fitting.

    Args:
        table: near them.
        durations: (T, D) jobs.
        by_gpus: which GPU counts, and their jobs.
        quartiles: of which type, which GPU counts, and how many jobs they have at least.
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
