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
    """A scheduling policy. Each name in it is a type of jobs, or a pool of the trace.

    Raises:
        BadUse: a value is not allowed.
    """

    reserved_nodes: Mapping[str, int] = field(default_factory=dict)
    """The number of whole nodes that only jobs of the name may use, unless they are best-effort
    jobs.

    These jobs may also use the shared nodes, and are started before the other jobs there.
    """
    limit_gpus: Mapping[str, int] = field(default_factory=dict)
    """The number of GPUs that jobs of the name may hold and queue for together. Further jobs wait
    outside the queue.
    """
    best_effort: tuple[str, ...] = (EVALUATION,)
    """The names whose jobs are best-effort jobs."""
    mode: BestEffort = "preemptible"
    """The mode of best-effort jobs.

    * `preemptible`: the jobs run on any idle GPU, also on reserved nodes. If another job needs the
      GPU, they are preempted, and later run again from the start.
    * `idle`: the jobs use only shared nodes, start after all other jobs, and are never preempted.
    """

    def __post_init__(self) -> None:
        for name, number in {**self.reserved_nodes, **self.limit_gpus}.items():
            if number < 1:
                raise BadUse(f"{name} is given {number}. Give 1 or more, or leave it out.")
        if self.mode not in ("preemptible", "idle"):
            raise BadUse(f"mode is {self.mode!r}. Allowed: preemptible, idle.")


@dataclass(frozen=True, kw_only=True, eq=False)
class Classes:
    """The result of applying the policy to each job. Shape: N jobs."""

    partition: Ints
    """(N) The index in `sizes` of the job's partition; 0 is the shared nodes."""
    best_effort: Flags
    """(N) True for best-effort jobs."""
    limit: Ints
    """(N) The index in `limits` of the job's limit; -1 for no limit."""
    sizes: tuple[int, ...]
    """The number of nodes of each partition; the shared partition comes first."""
    limits: tuple[int, ...]
    """The numbers of GPUs that limits allow."""


def classes(jobs: Jobs, policy: Policy, *, nodes: int, gpus_per_node: int) -> Classes:
    """Assign each job to a partition and a limit, and find the best-effort jobs.

    Raises:
        BadUse: a name is neither a type nor a pool, or jobs cannot fit their nodes or their limit.
    """
    best_effort = np.zeros(len(jobs), dtype=bool)
    for name in policy.best_effort:
        if name in jobs.types or name in jobs.pools:
            best_effort |= _named(jobs, name)
    partition = np.zeros(len(jobs), dtype=np.int64)
    for number, name in enumerate(policy.reserved_nodes, start=1):
        own = _named(jobs, name) & ~best_effort  # a pool may also contain evaluations
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
    """Return the number of nodes to reserve for a type: its peak use if no job had to wait.

    At least as many nodes as the largest job of another type needs stay unreserved. The result is 0
    if the type has no jobs, or if the cluster is too small for both. This number is an assumption,
    since no trace states its reservations.
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
        f"There is no type or pool {name!r}. Choose one of: {', '.join((*jobs.types, *jobs.pools))}."
    )
