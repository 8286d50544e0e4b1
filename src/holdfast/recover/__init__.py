"""Keep a run going. The input is a command (`RunSpec`), the output an `Outcome` and the run's history in the ledger.

In order, a module each:

1. `spec`: what to run and how to supervise it; `runs`: begin, resume, stop, remove a run
2. `launch`: the job's processes: `guard` → torchrun → `shim`, one a rank → the user's command, once an attempt
3. `attach`: what the user's script tells, over `channel`
4. `attempt`: what is known of an attempt; `detectors`: what is wrong with it (`stacks`: where its
   ranks stand); `gate`: which checkpoints are healthy; `stop_vote`: where it can stop
5. `policy`: what to do next, a pure function
6. `supervisor`: carries it out and writes it down
"""

from typing import TYPE_CHECKING, Any

from holdfast.recover.attach import Run, attach

if TYPE_CHECKING:
    from holdfast.recover.detectors.hang import HangLimits
    from holdfast.recover.outcome import Outcome
    from holdfast.recover.runs import (
        begin_run,
        change_options,
        detach,
        remove_run,
        state_of,
        stop_run,
        supervise,
    )
    from holdfast.recover.spec import RunSpec
    from holdfast.recover.supervisor import Supervisor

__all__ = [
    "HangLimits",
    "Outcome",
    "Run",
    "RunSpec",
    "Supervisor",
    "attach",
    "begin_run",
    "change_options",
    "detach",
    "remove_run",
    "state_of",
    "stop_run",
    "supervise",
]

_HOMES = {
    "HangLimits": "detectors.hang",
    "Outcome": "outcome",
    "RunSpec": "spec",
    "Supervisor": "supervisor",
    "begin_run": "runs",
    "change_options": "runs",
    "detach": "runs",
    "remove_run": "runs",
    "state_of": "runs",
    "stop_run": "runs",
    "supervise": "runs",
}


def __getattr__(name: str) -> Any:
    # Lazy: a rank that attaches needs neither the ledger nor the diagnosis.
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast.recover' has no attribute {name!r}")
    return getattr(import_module(f"holdfast.recover.{_HOMES[name]}"), name)
