"""Stage 4: queueing times, coupled with the batch that a job came in and, where durations count it, below them.

Jobs that arrive together wait together: each batch has a latent congestion, later jobs of a batch wait longer. The
times of a type are dealt out in the order of these scores, so their counts stay exact.
"""

import numpy as np

from holdfast.trace.twin.model import Ints


def dealt_queues(
    queues: Ints,
    types: Ints,
    batches: Ints,
    places: Ints,
    ceiling: Ints | None,
    rng: np.random.Generator,
) -> Ints:
    """The queueing time of each job.

    Args:
        queues: the times to deal, aligned with `types` (any order within a type).
        types: of each job.
        batches: number of the batch of each job.
        places: place of each job in its batch, 0 first.
        ceiling: durations that no queueing time may exceed (Kalos counts from submission).
        rng: the draw.
    """
    count = int(batches.max()) + 1 if len(batches) else 0
    congestion = rng.normal(size=count)
    longest = np.bincount(batches, minlength=count)
    score = (
        0.9 * congestion[batches]
        + 0.4 * rng.normal(size=len(types))
        + 0.5 * places / longest[batches]
    )
    dealt = np.empty_like(queues)
    # By type and score the jobs, by type and length the times.
    dealt[np.lexsort((score, types))] = queues[np.lexsort((queues, types))]
    return dealt if ceiling is None else _below(dealt, types, ceiling, rng)


def _below(queues: Ints, types: Ints, ceiling: Ints, rng: np.random.Generator) -> Ints:
    """Queueing times swapped within types until none exceeds its job's ceiling.

    Random partners for most; for the rest of a type, if any is left, the shortest ceilings choose first among what
    fits. That succeeds whenever any assignment does.
    """
    for type_ in np.unique(types):
        members = np.flatnonzero(types == type_)
        for _ in range(60):
            wrong = members[queues[members] > ceiling[members]]
            if not len(wrong):
                break
            partner = rng.choice(members, size=len(wrong))
            fits = (queues[wrong] <= ceiling[partner]) & (queues[partner] <= ceiling[wrong])
            # A partner serves one job only.
            _, first = np.unique(partner, return_index=True)
            alone = np.zeros(len(wrong), dtype=bool)
            alone[first] = True
            alone &= fits & ~np.isin(partner, wrong)
            queues[wrong[alone]], queues[partner[alone]] = (
                queues[partner[alone]],
                queues[wrong[alone]],
            )
        if (queues[members] > ceiling[members]).any():
            _exact(queues, members, ceiling, rng)
    return queues


def _exact(queues: Ints, members: Ints, ceiling: Ints, rng: np.random.Generator) -> None:
    waiting = np.sort(queues[members])
    pool: list[int] = []
    taken = 0
    for job in members[np.argsort(ceiling[members], kind="stable")]:
        while taken < len(waiting) and waiting[taken] <= ceiling[job]:
            pool.append(int(waiting[taken]))
            taken += 1
        if not pool:  # No assignment exists: the job waits as long as it lasts.
            pool.append(int(ceiling[job]))
            taken += 1
        pick = int(rng.integers(len(pool)))
        pool[pick], pool[-1] = pool[-1], pool[pick]
        queues[job] = pool.pop()
