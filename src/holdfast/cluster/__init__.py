"""The cluster room: spreads independent tasks over workers.

In: `Task`s, each a command that writes one result file, whole or not at all. Out: a `Finished` for each, as it ends.
A task whose result exists is not run again, so a run that was cut off goes on where it was.

The modules: `tasks` (what a task is, and when it is done), `choose` (`workers("local" | "slurm" | "ray")`), the three
kinds of workers (`local`; `slurm`, with `slurm_task` as its far end; `ray`) and `leash` (how each of them runs a
command so that nothing of it is left when whoever wanted it is gone).
"""

from holdfast.cluster.choose import WORKER_KINDS, workers
from holdfast.cluster.tasks import Finished, Task, Workers

__all__ = ["WORKER_KINDS", "Finished", "Task", "Workers", "workers"]
