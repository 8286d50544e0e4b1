"""Define which jobs may use which nodes: reserved quota, limits, best-effort evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from holdfast.core.errors import BadUse
from holdfast.simulate.cluster.jobs import EVALUATION, Ints, Jobs, places

Flags = npt.NDArray[np.bool_]
BestEffort = Literal["preemptible", "idle"]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The scheduling policy. Names are types of jobs, or pools of the trace.

    Raises:
        BadUse: a value is not allowed.
    """

    reserved_nodes: Mapping[str, int] = field(default_factory=dict)
    """Whole nodes for jobs of the name alone, best-effort jobs excluded.

    These jobs also come first on the other nodes.
    """
    limit_gpus: Mapping[str, int] = field(default_factory=dict)
    """GPUs that jobs of the name may hold or queue for; further jobs wait before the queue."""
    best_effort: tuple[str, ...] = (EVALUATION,)
    """Names of best-effort jobs."""
    mode: BestEffort = "preemptible"
    """The mode of best-effort jobs.

    `preemptible`: they run on any idle GPU, also on reserved nodes. They end when another job needs
    the GPU, and run again from their beginning. `idle`: they stay off reserved nodes, come last,
    and are never ended.
    """

    def __post_init__(self) -> None:
        for name, number in {**self.reserved_nodes, **self.limit_gpus}.items():
            if number < 1:
                raise BadUse(f"{name} is given {number}. Give 1 or more, or leave it out.")
        if self.mode not in ("preemptible", "idle"):
            raise BadUse(f"mode is {self.mode!r}. Allowed: preemptible, idle.")


@dataclass(frozen=True, kw_only=True, eq=False)
class Classes:
    """The policy applied to each job. N jobs."""

    partition: Ints
    """(N) 0: the shared nodes; 1 and up: the reserved ones, in order of `sizes`."""
    best_effort: Flags
    """(N)"""
    limit: Ints
    """(N) place in `limits`, or -1."""
    sizes: tuple[int, ...]
    """Nodes of each partition, the shared one first."""
    limits: tuple[int, ...]
    """GPUs."""


def classes(jobs: Jobs, policy: Policy, *, nodes: int, gpus_per_node: int) -> Classes:
    """Give each job its partition, its limit and its rank.

    Raises:
        BadUse: a name is neither a type nor a pool, or jobs cannot fit their nodes or their limit.
    """
    best_effort = np.zeros(len(jobs), dtype=bool)
    for name in policy.best_effort:
        if name in jobs.types or name in jobs.pools:
            best_effort |= _named(jobs, name)
    partition = np.zeros(len(jobs), dtype=np.int64)
    for number, name in enumerate(policy.reserved_nodes, start=1):
        own = _named(jobs, name) & ~best_effort  # a pool may hold evaluations as well
        if not own.any():
            raise BadUse(
                f"All {name} jobs are best effort and can have no reserved nodes. Reserve nodes for another name."
            )
        partition[own] = number
    limit = np.full(len(jobs), -1, dtype=np.int64)
    for number, name in enumerate(policy.limit_gpus):
        limit[_named(jobs, name)] = number
    shared = nodes - sum(policy.reserved_nodes.values())
    sizes = (shared, *policy.reserved_nodes.values())
    if shared < 0:
        raise BadUse(
            f"{nodes - shared:,} nodes are reserved of {nodes:,}. Reserve fewer, or give a larger --capacity."
        )
    room = np.array(sizes)[partition] * gpus_per_node
    if policy.mode == "preemptible":
        room[best_effort] = nodes * gpus_per_node
    for name, number in zip(policy.limit_gpus, policy.limit_gpus.values(), strict=True):
        room = np.where(_named(jobs, name), np.minimum(room, number), room)
    if (large := jobs.gpus > room).any():
        job = int(large.argmax())
        raise BadUse(
            f"A job of type {jobs.types[jobs.type[job]]} wants {jobs.gpus[job]:,} GPUs, but may use {room[job]:,}. "
            "Change the reserved nodes or the limit."
        )
    return Classes(
        partition=partition,
        best_effort=best_effort,
        limit=limit,
        sizes=sizes,
        limits=tuple(policy.limit_gpus.values()),
    )


def usual_reserve(jobs: Jobs, name: str, *, nodes: int, gpus_per_node: int) -> int:
    """Return the nodes that the jobs of a type would hold at their peak, if each started at once.

    The result leaves out as many nodes as the largest other job needs. The result is 0 if the type
    has no job, or if there is no room for both. This is an assumption: no trace states its
    reservations.
    """
    of_type = places(jobs.types, name)
    own = jobs.type == of_type if of_type is not None else np.zeros(len(jobs), dtype=bool)
    if not own.any():
        return 0
    start_s, gpus = jobs.submit_s[own], jobs.gpus[own]
    at_s = np.concatenate([start_s + jobs.run_s[own], start_s])
    order = np.argsort(at_s, kind="stable")
    peak = int(np.cumsum(np.concatenate([-gpus, gpus])[order]).max())
    largest, largest_other = int(gpus.max()), int(jobs.gpus[~own].max(initial=0))
    most = nodes + -largest_other // gpus_per_node
    least = -(-largest // gpus_per_node)
    return max(least, min(-(-peak // gpus_per_node), most)) if least <= most else 0


def _named(jobs: Jobs, name: str) -> Flags:
    of_type, of_pool = places(jobs.types, name), places(jobs.pools, name)
    if of_type is not None:
        return np.asarray(jobs.type == of_type)
    if of_pool is not None:
        return np.asarray(jobs.pool == of_pool)
    raise BadUse(
        f"There is no type and no pool {name!r}. Choose of: {', '.join((*jobs.types, *jobs.pools))}."
    )
