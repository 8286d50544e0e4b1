"""A failure laboratory: small programs that really fail, and the labelled logs they leave.

In: `programs/`, each program a script, how it is launched and what is known of its failure. Out: recorded logs with
their known cause, and variants of them, for the tests and the learning of `holdfast.diagnose`. It needs torch
and the other packages of `holdfast[dev]`; nothing of Holdfast imports it.

Run from the repository's root: `PYTHONPATH=benchmarks python -m failure_lab ls | record | variants`.

| stage | module | from → to |
|---|---|---|
| 1 | `programs` | what fails → `PROGRAMS` |
| 2 | `run` (with `place`) | a program → what it printed, all together and rank by rank |
| 3 | `record` | programs → `clean/*.log`, `ranks/*/rank-N.log`, `labels.jsonl` |
| 4 | `variants` (with `noise`, `routines`) | recorded logs → permuted, copied, cut and noisy ones, labels kept right |

Only a GPU, a network card, a kernel or a scheduler could print some of the lines; there the failing rank prints what
these are documented to print and dies as it would, and its peers really fail.
"""

from failure_lab.program import Program

__all__ = ["Program"]
