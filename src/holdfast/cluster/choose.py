"""Which workers, which places: the one module that knows all kinds by name."""

from collections.abc import Sequence

from holdfast.cluster.placement import Places
from holdfast.cluster.tasks import Workers
from holdfast.core.errors import BadUse

WORKER_KINDS = ("local", "slurm", "ray")


def workers(on: str, *, limit: int | None = None, sbatch_options: Sequence[str] = ()) -> Workers:
    """The workers named, ready to run tasks.

    Args:
        on: "local" (processes of this machine), "slurm" (a job array) or "ray" (the cluster at RAY_ADDRESS if that is
            set, else one of this machine, started and stopped for the run).
        limit: the most tasks at a time; by default the number of cores (local, and ray on this machine), or what the
            cluster allows.
        sbatch_options: slurm only; for sbatch, such as "--partition=cpu" or "--time=30".

    Raises:
        BadUse: no such kind, a limit below 1, options without slurm, or the kind's program or package is missing.
    """
    if on not in WORKER_KINDS:
        raise BadUse(f"There are no workers named {on!r}. Choose one of {', '.join(WORKER_KINDS)}.")
    if limit is not None and limit < 1:
        raise BadUse(
            f"A limit of {limit} tasks at a time runs none. Give 1 or more, or leave it out."
        )
    if sbatch_options and on != "slurm":
        raise BadUse(
            f"sbatch options mean nothing to {on} workers. Leave them out, or choose slurm."
        )
    # Each where it is chosen: the room's far ends run as `python -m`, and must not be imported by the room itself.
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
    """The nodes named, ready to have a process placed on each.

    Args:
        on: "local" (so many processes of this machine, each of which sees all of it), "slurm" (one allocation) or
            "ray" (a placement group in the cluster at RAY_ADDRESS, else in a Ray of this machine's own).
        nodes: how many.
        gpus_per_node: what each node must give; 0 for none. Means nothing to local.
        cpus_per_node: likewise; None for what the cluster gives by itself.
        sbatch_options: slurm only; for sbatch, such as "--partition=gpu" or "--exclusive".
        linger_s: what the placed processes have to end by themselves when this one died. Means nothing to slurm, whose
            processes end by themselves in any case.

    Raises:
        BadUse: no such kind, a number that makes no sense, options without slurm, or the kind's program or package is
            missing.
    """
    if on not in WORKER_KINDS:
        raise BadUse(f"There are no nodes named {on!r}. Choose one of {', '.join(WORKER_KINDS)}.")
    if nodes < 1 or gpus_per_node < 0 or (cpus_per_node is not None and cpus_per_node < 1):
        raise BadUse(
            f"{nodes} nodes with {gpus_per_node} GPUs and {cpus_per_node} CPUs each cannot be had. "
            "Ask for at least one node, and one CPU if any number of them."
        )
    if sbatch_options and on != "slurm":
        raise BadUse(f"sbatch options mean nothing to {on} nodes. Leave them out, or choose slurm.")
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
