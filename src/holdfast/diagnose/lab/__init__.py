"""A failure laboratory: small programs that really fail, and the labelled logs they leave.

In: `programs/`, each program a script, how it is launched and what is known of its failure. Out: recorded logs with
their known cause, and variants of them, for the tests and the learning of `holdfast.diagnose`. A development tool: it
needs torch and what else `holdfast[dev]` brings, and nothing of Holdfast imports it.

| stage | module | from → to |
|---|---|---|
| 1 | `programs` | what fails → `PROGRAMS` |
| 2 | `run` (with `place`) | a program → what it printed, all together and rank by rank |
| 3 | `record` | programs → `clean/*.log`, `ranks/*/rank-N.log`, `labels.jsonl` |
| 4 | `variants` (with `noise`, `routines`) | recorded logs → permuted, copied, cut and noisy ones, labels kept right |

Only a GPU, a network card, a kernel or a scheduler could print some of the lines; there the failing rank prints what
these are documented to print and dies as it would, and its peers really fail.
"""

from holdfast.diagnose.lab.program import Program

__all__ = ["Program"]
