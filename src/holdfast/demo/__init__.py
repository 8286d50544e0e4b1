"""Show Holdfast at work: a small GPT trains while real faults strike, and no person intervenes.

The input is a seed and a folder; the output is a page and a verdict. `corpus`, `model` and `train`
are the job; `faults` plans and injects the faults; `nodes` starts the nodes; `proof` compares the
final weights with the weights of a run without faults; `outcome` pairs each fault with the action;
`demonstration` starts the runs and writes the page.
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
