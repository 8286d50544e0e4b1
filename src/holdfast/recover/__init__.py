"""Keeps a run going: enters a command (`RunSpec`), leaves an `Outcome`, with its history in the ledger.

In order, a module each:

1. `spec`: what to run and how to supervise it; `runs`: begin, resume, stop, remove a run
2. `launch`: one attempt's processes: `guard` → torchrun → `rank_shim` → the user's command
3. `attach`: what the user's script tells, over `channel`
4. `attempt`: what is known of an attempt; `hang`: whether it stands still (`stacks`: where its
   ranks stand); `stop_vote`: where it can stop
5. `policy`: what to do next, a pure function
6. `supervisor`: carries it out and writes it down
"""

from typing import TYPE_CHECKING, Any

from holdfast.recover.attach import Run, attach

if TYPE_CHECKING:
    from holdfast.recover.supervisor import Outcome, Supervisor

__all__ = ["Outcome", "Run", "Supervisor", "attach"]


def __getattr__(name: str) -> Any:
    # Lazy: a rank that attaches needs neither the ledger nor the diagnosis.
    if name in ("Outcome", "Supervisor"):
        from holdfast.recover import supervisor

        return getattr(supervisor, name)
    raise AttributeError(f"module 'holdfast.recover' has no attribute {name!r}")
