"""A failure laboratory: small programs that really fail, and their labelled logs.

The input is `programs/`: each program has a script, its launch and the facts of its failure. The
output is recorded logs with known causes, and variants of the logs, for the tests and the learning
of `holdfast.diagnose`. The laboratory needs torch and the other packages of `holdfast[dev]`; no
module of Holdfast imports it.

Run from the repository's root: `PYTHONPATH=benchmarks python -m failure_lab ls | record |
variants`.

| stage | module | from → to |
|---|---|---|
| 1 | `programs` | failing programs → `PROGRAMS` |
| 2 | `run` (with `place`) | a program → its output, together and rank by rank |
| 3 | `record` | programs → `clean/*.log`, `ranks/*/rank-N.log`, `labels.jsonl` |
| 4 | `variants` (with `noise`, `routines`) | logs → permuted, copied, cut and noisy logs, labelled |

Only a GPU, a network card, a kernel or a scheduler could print some of the lines. There the failing
rank prints the documented lines and dies as documented, and its peers really fail.
"""

from failure_lab.program import Program

__all__ = ["Program"]
