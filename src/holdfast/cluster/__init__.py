"""Spread independent tasks over workers, place long-lived processes on nodes, mark faulty nodes.

- Tasks: each `Task` is a command that writes one result file, whole or not at all. Each task
  yields a `Finished` when the task ends. A task whose result exists is not run again, so the next
  run continues where an interrupted run stopped.
- Places: one command becomes a `Placement`, which reports the state of its processes, one per node.
- Cordons: a faulty node is marked in the scheduler.
- Kubernetes: conditions of a node and a pod are read; a pod ends with exit codes that Jobs act on.

The modules:

- `tasks` (a task and its end), `placement` (the interface of places), `choose` (`workers` and
  `places`, each of "local", "slurm" or "ray");
- the workers: `local`; `slurm`, which starts `slurm_task` on the nodes; `ray`;
- the places: `places_local`; `places_slurm`, which starts `slurm_place` on the nodes; `places_ray`;
- `leash`: runs a command whose processes all end when their owner ends;
- `slurm_jobs` (single jobs of Slurm) and `slurm_nodes` (the states of Slurm's nodes);
- `cordons` (marks in the scheduler, and the choice of the scheduler), `slurm_cordons` and
  `kubernetes_cordons`;
- `kubernetes_api` (requests), `kubernetes_nodes` (conditions and taints) and `kubernetes_pod`
  (exit codes).
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
    from holdfast.cluster.slurm_cordons import slurm_is_here
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
    "slurm_is_here",
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
    "slurm_is_here": "slurm_cordons",
    "start_on_leash": "leash",
}


def __getattr__(name: str) -> Any:
    # Lazy: `python -m holdfast.cluster.leash` warns if its module is already loaded.
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast.cluster' has no attribute {name!r}")
    return getattr(import_module(f"holdfast.cluster.{_HOMES[name]}"), name)
