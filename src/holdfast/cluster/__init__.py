"""The cluster room: spreads independent tasks over workers, and places long-lived processes on nodes.

In: `Task`s, each a command that writes one result file, whole or not at all. Out: a `Finished` for each, as it ends.
A task whose result exists is not run again, so a run that was cut off goes on where it was. Or in: one command, and
out: a `Placement` that says how its processes, one a node, are. Or in: a faulty node, and out: a mark on the node in
the scheduler. Out besides: what Kubernetes reports of a node and a pod, and the end of a pod, which Jobs act on.

The modules: `tasks` (what a task is, and when it is done), `placement` (what a place is), `choose` (`workers` and
`places`, each of "local", "slurm" or "ray"), the three kinds of workers (`local`; `slurm`, with `slurm_task` as its far
end; `ray`), the three kinds of places (`places_local`; `places_slurm`, with `slurm_place` as its far end;
`places_ray`), `slurm_jobs` and `slurm_nodes` (single jobs of Slurm, and the states of its nodes), `leash` (how each of
them runs a command so that nothing of it is left when whoever wanted it is gone), and `cordons` (what a mark in the
scheduler is, and which scheduler is here; `slurm_cordons`, `kubernetes_cordons`). Of Kubernetes, `kubernetes_api`
(requests), `kubernetes_nodes` (conditions and taints) and `kubernetes_pod` (exit codes).
"""

from typing import TYPE_CHECKING, Any

from holdfast.cluster.choose import WORKER_KINDS, places, workers
from holdfast.cluster.cordons import Cordons, NotMarked, cordons_of_operator, mark, unmark
from holdfast.cluster.placement import ENV_PLACE, Place, Placement, Places
from holdfast.cluster.tasks import Finished, Task, Workers

if TYPE_CHECKING:
    from holdfast.cluster.kubernetes_nodes import Look, read_facts
    from holdfast.cluster.kubernetes_pod import end_of_pod, ends_pod, is_in_pod
    from holdfast.cluster.leash import release, start_on_leash
    from holdfast.cluster.local import core_count
    from holdfast.cluster.slurm_jobs import EXPEDITE, JobState, SlurmJobs
    from holdfast.cluster.slurm_nodes import SlurmNode, read_slurm_nodes

__all__ = [
    "ENV_PLACE",
    "EXPEDITE",
    "WORKER_KINDS",
    "Cordons",
    "Finished",
    "JobState",
    "Look",
    "NotMarked",
    "Place",
    "Placement",
    "Places",
    "SlurmJobs",
    "SlurmNode",
    "Task",
    "Workers",
    "cordons_of_operator",
    "core_count",
    "end_of_pod",
    "ends_pod",
    "is_in_pod",
    "mark",
    "places",
    "read_facts",
    "read_slurm_nodes",
    "release",
    "start_on_leash",
    "unmark",
    "workers",
]

_HOMES = {
    "EXPEDITE": "slurm_jobs",
    "JobState": "slurm_jobs",
    "Look": "kubernetes_nodes",
    "SlurmJobs": "slurm_jobs",
    "SlurmNode": "slurm_nodes",
    "core_count": "local",
    "end_of_pod": "kubernetes_pod",
    "ends_pod": "kubernetes_pod",
    "is_in_pod": "kubernetes_pod",
    "read_facts": "kubernetes_nodes",
    "read_slurm_nodes": "slurm_nodes",
    "release": "leash",
    "start_on_leash": "leash",
}


def __getattr__(name: str) -> Any:
    # Lazy: `python -m holdfast.cluster.leash` must find its module unloaded.
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast.cluster' has no attribute {name!r}")
    return getattr(import_module(f"holdfast.cluster.{_HOMES[name]}"), name)
