"""Which workers: the one place that knows all kinds by name."""

from collections.abc import Sequence

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
        raise BadUse(f"A limit of {limit} tasks at a time runs none. Give 1 or more, or leave it out.")
    if sbatch_options and on != "slurm":
        raise BadUse(f"sbatch options mean nothing to {on} workers. Leave them out, or choose slurm.")
    # Each where it is chosen: the room's far ends run as `python -m`, and must not be imported by the room itself.
    if on == "local":
        from holdfast.cluster.local import LocalWorkers, core_count

        return LocalWorkers(limit=limit or core_count())
    if on == "slurm":
        from holdfast.cluster.slurm import SlurmWorkers

        return SlurmWorkers(limit=limit, sbatch_options=tuple(sbatch_options))
    from holdfast.cluster.ray import RayWorkers

    return RayWorkers(limit=limit)
