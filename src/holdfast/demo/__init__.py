"""Shows Holdfast at work: a small GPT trains while real faults strike, and nobody intervenes.

Enters a seed and a folder, leaves a page and a verdict. `corpus`, `model` and `train` are the job; `faults` plans
and injects what befalls it; `proof` compares the final weights with those of a run without faults;
`demonstration` runs the three runs and writes the page.
"""

from holdfast.demo.demonstration import Demonstration, Verdict

__all__ = ["Demonstration", "Verdict"]
