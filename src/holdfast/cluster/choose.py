"""Create the workers or places of a kind: "local", "slurm" or "ray"."""

from collections.abc import Sequence

from holdfast.cluster.placement import Places
from holdfast.cluster.tasks import Workers
from holdfast.core.errors import BadUse

WORKER_KINDS = ("local", "slurm", "ray")


def workers(on: str, *, limit: int | None = None, sbatch_options: Sequence[str] = ()) -> Workers:
    """Create workers of a kind, ready to run tasks.

    Args:
        on: "local" (processes of this machine), "slurm" (a job array) or "ray" (the cluster at
            RAY_ADDRESS; if RAY_ADDRESS is not set, a Ray that is started on this machine for the
            run).
        limit: the most tasks that run at the same time; None: the number of cores (local, and Ray
            on this machine) or the cluster's own limit.
        sbatch_options: options for sbatch, for slurm only, such as "--partition=cpu" or
            "--time=30".

    Raises:
        BadUse: there is no such kind, the limit is below 1, options are given without slurm, or the
            kind's program or package is missing.
    """
    if on not in WORKER_KINDS:
        raise BadUse(f"There are no workers named {on!r}. Choose one of {', '.join(WORKER_KINDS)}.")
    if limit is not None and limit < 1:
        raise BadUse(
            f"A limit of {limit} tasks at a time runs no task. Give 1 or more, or leave it out."
        )
    if sbatch_options and on != "slurm":
        raise BadUse(
            f"sbatch options have no effect on {on} workers. Leave them out, or choose slurm."
        )
    # Import each kind only when chosen: the modules that run as `python -m` must not be loaded
    # already.
    if on == "local":
        from holdfast.cluster.local import LocalWorkers, core_count

        return LocalWorkers(limit=limit or core_count())
    if on == "slurm":
        from holdfast.cluster.slurm import SlurmWorkers

        return SlurmWorkers(limit=limit, sbatch_options=tuple(sbatch_options))
    from holdfast.cluster.ray import RayWorkers

    return RayWorkers(limit=limit)


def places(
    on: str,
    *,
    nodes: int,
    gpus_per_node: int = 0,
    cpus_per_node: int | None = None,
    sbatch_options: Sequence[str] = (),
    linger_s: float = 0.0,
) -> Places:
    """Create places of a kind: nodes, on each of which one process can be placed.

    Args:
        on: "local" (processes of this machine, each of which sees the whole machine), "slurm" (one
            allocation) or "ray" (a placement group in the cluster at RAY_ADDRESS; if RAY_ADDRESS is
            not set, in a Ray that is started on this machine).
        nodes: the number of nodes.
        gpus_per_node: the GPUs to reserve on each node; ignored for local.
        cpus_per_node: the CPUs to reserve on each node, None for the cluster's default; ignored for
            local.
        sbatch_options: options for sbatch, for slurm only, such as "--partition=gpu" or
            "--exclusive".
        linger_s: the seconds that placed processes have to end by themselves after the death of
            this process; ignored for slurm, whose processes always end by themselves.

    Raises:
        BadUse: there is no such kind, a number is impossible, options are given without slurm, or
            the kind's program or package is missing.
    """
    if on not in WORKER_KINDS:
        raise BadUse(f"There are no nodes named {on!r}. Choose one of {', '.join(WORKER_KINDS)}.")
    if nodes < 1 or gpus_per_node < 0 or (cpus_per_node is not None and cpus_per_node < 1):
        raise BadUse(
            f"{nodes} nodes with {gpus_per_node} GPUs and {cpus_per_node} CPUs each are not possible. "
            "Request at least one node, and at least one CPU if any."
        )
    if sbatch_options and on != "slurm":
        raise BadUse(
            f"sbatch options have no effect on {on} nodes. Leave them out, or choose slurm."
        )
    if on == "local":
        from holdfast.cluster.places_local import LocalPlaces

        return LocalPlaces(nodes=nodes, linger_s=linger_s)
    if on == "slurm":
        from holdfast.cluster.places_slurm import SlurmPlaces

        return SlurmPlaces(
            nodes=nodes,
            gpus_per_node=gpus_per_node,
            cpus_per_node=cpus_per_node,
            sbatch_options=tuple(sbatch_options),
        )
    from holdfast.cluster.places_ray import RayPlaces

    return RayPlaces(
        nodes=nodes, gpus_per_node=gpus_per_node, cpus_per_node=cpus_per_node, linger_s=linger_s
    )
