"""Show Holdfast at work: a small GPT trains while real faults strike, and no person intervenes.

The input is a seed and a folder, and the output is an HTML page and a verdict. The modules:

| module | one idea |
|---|---|
| `corpus`, `model`, `train` | the training job |
| `faults` | the plan of the faults, and their injection |
| `nodes` | the processes of the nodes |
| `proof` | the final weights compared with the weights of a run without faults |
| `outcome` | each fault with its detection and the action |
| `demonstration` | the runs and the page |
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.demo.demonstration import Demonstration, Verdict

__all__ = ["Demonstration", "Verdict"]


def __getattr__(name: str) -> Any:
    # Lazy: the ranks of the job import `train` from here and need no supervisor.
    if name in __all__:
        from holdfast.demo import demonstration

        return getattr(demonstration, name)
    raise AttributeError(f"module 'holdfast.demo' has no attribute {name!r}")
