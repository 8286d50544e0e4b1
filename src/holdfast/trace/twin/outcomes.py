"""Assign final states to jobs, depending on type, size and duration.

Only totals are published: each state's share of the jobs and of the GPU time. Cancelled jobs are
few and have most of the GPU time, since people stop long jobs. Failed jobs are many and short,
except for long jobs on hundreds of GPUs (sections 3.2 and 5). The odds of each state in a cell
start from such assumptions. They are then adjusted by a constant and by a factor of the logarithm
of GPU time, such that both totals hold.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from holdfast.trace.twin.bins import BINS
from holdfast.trace.twin.model import CPU, Floats, Ints
from holdfast.trace.twin.rounding import largest_remainder

STATES: Final = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "RUNNING")

_FIRST_TENTH_JOBS: Final = 45_059
"""Number of GPU jobs in the first tenth of Seren's released file, whose states were counted."""
_SEREN_JOBS: Final = 450_590
_RARE: Final = {
    # Shares among GPU jobs. The first tenth of Seren's file has 54 TIMEOUT, 44 NODE_FAIL and 1,010
    # PREEMPTED jobs. The PREEMPTED jobs are taken as the number in the whole trace, because the
    # published shares of the other states leave no room for more.
    "seren": {
        "TIMEOUT": 54 / _FIRST_TENTH_JOBS,
        "NODE_FAIL": 44 / _FIRST_TENTH_JOBS,
        "PREEMPTED": 1_010 / _SEREN_JOBS,
    },
    "kalos": {"RUNNING": 1e-4},
}


@dataclass(frozen=True, kw_only=True)
class StateModel:
    """Hold the probabilities of states by cell, and their totals; shapes as in `Calibration`."""

    states: tuple[str, ...]
    shares: Floats
    totals: Floats
    gpu_time: Floats


def published_states(
    cells: Floats,
    seconds: Floats,
    *,
    types: tuple[str, ...],
    values: Floats,
    published: dict[str, Any],
    cluster: str,
) -> StateModel:
    """Return the probabilities of final states for a published cluster.

    Args:
        cells: the number of jobs, of shape (types, GPU counts, bins).
        seconds: the total durations, of shape (types, GPU counts).
        types: the names of the types.
        values: the GPU counts.
        published: the percentage of each state among jobs and among GPU time.
        cluster: the cluster whose rare states are added.
    """
    three = STATES[:3]
    by_jobs, by_time, by_cpu = (
        np.array([published[table][state] for state in three])
        for table in ("gpu_jobs_pct", "gpu_time_pct", "cpu_jobs_pct")
    )
    by_jobs, by_time, by_cpu = (
        by_jobs / by_jobs.sum(),
        by_time / by_time.sum(),
        by_cpu / by_cpu.sum(),
    )
    middle_s = 0.72 * 2.0 ** np.arange(BINS)
    in_bins = (cells * middle_s).sum(axis=2)
    scale = np.divide(seconds, in_bins, out=np.ones_like(seconds), where=in_bins > 0)
    gpu_time = cells * middle_s * (values[None, :] * scale)[:, :, None]
    is_gpu = values > 0
    with np.errstate(divide="ignore"):
        log_size = np.where(is_gpu, np.log2(np.maximum(values, 1)), 0.0)[None, :, None]
    log_s = np.arange(BINS)[None, None, :] - 8.0
    prior = np.zeros((*cells.shape, 3))
    # Cancelling takes a person who sees the job run, so cancelled jobs are longer and larger. A
    # long run on hundreds of GPUs meets hardware failures (Table 3: infrastructure has 82% of the
    # GPU time of failures).
    prior[..., 1] = 0.06 * log_s + 0.10 * log_size
    # Of Kalos' 641 pretraining jobs, 183 completed (counted in tethys, its converted form). This
    # share is lower than that of the other types.
    prior[types.index("Pretrain"), ..., 0] = -0.8
    prior[..., 2] = (
        -0.12 * log_s + 0.10 * log_size + 0.02 * np.maximum(log_s, 0) * np.maximum(log_size - 5, 0)
    )
    weights = np.where(is_gpu[None, :, None], cells, 0.0)
    tilt = np.broadcast_to((log_s + log_size) / 4.0, cells.shape)
    shares = _tilted_odds(
        prior, tilt, weights / weights.sum(), gpu_time / gpu_time.sum(), by_jobs, by_time
    )
    cpu = types.index(CPU)
    shares[cpu, ~is_gpu] = by_cpu
    return _with_rare(shares, by_jobs, by_time, by_cpu, cluster)


def _tilted_odds(
    prior: Floats, tilt: Floats, jobs: Floats, gpu_time: Floats, by_jobs: Floats, by_time: Floats
) -> Floats:
    """Return the probabilities of the states: the softmax of prior + a_s + b_s x tilt.

    The softmax is over the states s. Newton's method finds a and b such that each state has its
    share of jobs and of GPU time.
    """

    def shares_of(unknown: Floats) -> Floats:
        logits = prior.copy()
        for state in (1, 2):
            logits[..., state] += unknown[state - 1] + unknown[state + 1] * tilt
        odds = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return np.asarray(odds / odds.sum(axis=-1, keepdims=True))

    def error_of(unknown: Floats) -> Floats:
        shares = shares_of(unknown)
        by_job = np.einsum("tgds,tgd->s", shares, jobs)[1:] - by_jobs[1:]
        by_second = np.einsum("tgds,tgd->s", shares, gpu_time)[1:] - by_time[1:]
        return np.concatenate([by_job, by_second])

    unknown = np.zeros(4)
    error = error_of(unknown)
    for _ in range(60):
        if np.abs(error).max() < 1e-9:
            break
        jacobian = np.array(
            [(error_of(unknown + 1e-5 * axis) - error) / 1e-5 for axis in np.eye(4)]
        ).T
        step = np.linalg.lstsq(jacobian, -error, rcond=None)[0]
        step *= min(1.0, 2.0 / max(float(np.abs(step).max()), 1e-12))
        for _ in range(20):
            moved = error_of(unknown + step)
            if moved @ moved < error @ error:
                break
            step = step / 2
        unknown, error = unknown + step, moved
    return shares_of(unknown)


def _with_rare(
    shares: Floats, by_jobs: Floats, by_time: Floats, by_cpu: Floats, cluster: str
) -> StateModel:
    """Add the rare states to the three frequent ones.

    RUNNING jobs are taken from the completed jobs, and PREEMPTED jobs from all three states. The
    published numbers count TIMEOUT and NODE_FAIL jobs as failed, so these are taken from the failed
    jobs and get the same odds.
    """
    model = np.zeros((*shares.shape[:-1], len(STATES)))
    model[..., :3] = shares
    totals = np.zeros((2, len(STATES)))
    totals[0, :3], totals[1, :3] = by_cpu, by_jobs
    gpu_time = np.zeros(len(STATES))
    gpu_time[:3] = by_time
    for state, share in _RARE[cluster].items():
        number = STATES.index(state)
        totals[1, number] += share
        if state == "PREEMPTED":
            totals[1, :3] -= share * by_jobs
        else:
            totals[1, 0 if state == "RUNNING" else 2] -= share
        if state in ("TIMEOUT", "NODE_FAIL"):
            model[..., number] = shares[..., 2] * share
    return StateModel(states=STATES, shares=model, totals=totals, gpu_time=gpu_time)


def dealt_states(
    types: Ints, places: Ints, bins: Ints, weights: Floats, model: StateModel, is_gpu: npt.NDArray[np.bool_],
    rng: np.random.Generator,
) -> Ints:  # fmt: skip
    """Draw a final state for each job, and return its number.

    The number of jobs with each state agrees with `model.totals`, and their GPU time with
    `model.gpu_time`.

    Args:
        types: the type of each job.
        places: the index of each job's GPU count in the model's tables.
        bins: the bin of each job's duration.
        weights: the GPU time of each job.
        model: the probabilities.
        is_gpu: True for each GPU job.
        rng: the random generator.
    """
    states = np.zeros(len(types), dtype=np.int64)
    cut_short = np.array([name in ("RUNNING", "PREEMPTED") for name in model.states])
    for row in (0, 1):
        members = np.flatnonzero(is_gpu == bool(row))
        if not len(members):
            continue
        counts = largest_remainder(model.totals[row], len(members))
        # Order the jobs by size and duration, so that every region of the table gets its share.
        members = members[
            np.lexsort((rng.random(len(members)), types[members], bins[members], places[members]))
        ]
        odds = model.shares[types[members], places[members], bins[members]]
        states[members] = _dealt(odds, counts, weights[members], cut_short, rng)
        if row == 1:
            failed = model.states.index("FAILED") if "FAILED" in model.states else None
            _swap_to_gpu_time(states, members, weights, model.gpu_time, failed)
    return states


def _dealt(
    odds: Floats,
    counts: Ints,
    weights: Floats,
    cut_short: npt.NDArray[np.bool_],
    rng: np.random.Generator,
) -> Ints:
    """Assign each state to `counts` of the jobs, by systematic sampling along their order."""
    states = np.full(len(odds), -1, dtype=np.int64)
    named = odds.sum(axis=0) > 0
    for state in np.flatnonzero(~named & (counts > 0)):
        # A state that has no probabilities is rare. It is assigned at random among the longest
        # hundredth of the jobs. RUNNING and PREEMPTED jobs were cut short, so they are chosen among
        # somewhat shorter jobs.
        free = np.flatnonzero(states < 0)
        order = free[np.argsort(weights[free], kind="stable")]
        part = (0.6, 0.9) if cut_short[state] else (0.99, 1.0)
        tail = order[int(part[0] * len(order)) : int(part[1] * len(order))]
        tail = tail if len(tail) >= counts[state] else order
        states[rng.choice(tail, size=counts[state], replace=False)] = state
    rest = odds.copy()
    for number in sorted(np.flatnonzero(named).tolist(), key=counts.tolist().__getitem__)[:-1]:
        free = np.flatnonzero(states < 0)
        chance = np.divide(
            rest[free, number],
            rest[free].sum(axis=1),
            out=np.zeros(len(free)),
            where=rest[free].sum(axis=1) > 0,
        )
        rest[:, number] = 0.0
        states[free[_systematic(chance, int(counts[number]), rng)]] = number
    states[states < 0] = int(np.argmax(np.where(named, counts, -1)))
    return states


def _systematic(chance: Floats, count: int, rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Choose `count` items, spread evenly along their order.

    The probability of each item is proportional to `chance`, and at most 1.
    """
    if count <= 0:
        return np.zeros(len(chance), dtype=bool)
    scaled = chance + 1e-12
    for _ in range(30):
        scaled = np.minimum(scaled * (count / scaled.sum()), 1.0)
    steps = np.floor(np.cumsum(scaled) * (count / scaled.sum()) + rng.random())
    picked = np.asarray(np.diff(steps, prepend=0.0) > 0)
    excess = int(picked.sum()) - count
    where = np.flatnonzero(picked if excess > 0 else ~picked)
    if excess:
        picked[rng.choice(where, size=abs(excess), replace=False)] = excess < 0
    return np.asarray(picked, dtype=bool)


def _swap_to_gpu_time(
    states: Ints,
    members: Ints,
    weights: Floats,
    shares: Floats,
    failed: int | None,
    moves: int = 200,
) -> None:
    """Swap the states of pairs of jobs, in place, until each state has its share of GPU time.

    Rare states without a published share (NODE_FAIL, TIMEOUT) count as failed, as in the published
    numbers.
    """
    total = weights[members].sum()
    if failed is not None:
        rare = np.isin(states[members], np.flatnonzero(shares <= 0))
        shares = shares.copy()
        shares[failed] = max(shares[failed] - weights[members][rare].sum() / max(total, 1.0), 0.0)
    by_state = {
        state: members[states[members] == state] for state in np.flatnonzero(shares > 0).tolist()
    }
    for _ in range(moves):
        error = {
            state: weights[own].sum() - shares[state] * total for state, own in by_state.items()
        }
        most, least = max(error, key=error.__getitem__), min(error, key=error.__getitem__)
        wanted = min(error[most], -error[least])
        if wanted < 2e-4 * total:
            return
        givers, takers = by_state[most], by_state[least]
        if not len(givers) or not len(takers):
            return
        takers = takers[np.argsort(weights[takers], kind="stable")]
        big = givers[np.argsort(-weights[givers], kind="stable")[:2000]]
        match = np.clip(np.searchsorted(weights[takers], weights[big] - wanted), 0, len(takers) - 1)
        moved = weights[big] - weights[takers[match]]
        best = int(np.argmin(np.abs(moved - wanted)))
        if not 0 < moved[best] < 1.9 * wanted:
            return
        giver, taker = big[best], takers[match[best]]
        states[giver], states[taker] = least, most
        by_state[most] = np.append(givers[givers != giver], taker)
        by_state[least] = np.append(takers[takers != taker], giver)
