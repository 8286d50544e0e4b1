"""Replay a cluster's jobs under a scheduling policy: waits, use, and the effect of evaluation.

The input is a trace in any form that `holdfast.trace` reads. The output is that of `holdfast
simulate cluster`: waits by type beside the trace's own, the use of the GPUs, and how scattered the
free GPUs are.

| module | one idea |
|---|---|
| `jobs` | the jobs as columns, and predicted run times |
| `policy` | reserved quota, limits, evaluation at best effort |
| `nodes` | nodes in buckets by their free GPUs |
| `engine` | the replay, event by event, with backfill |
| `decoupled` | the evaluation coordinator in the place of a checkpoint's trials |
| `answers` | waits, distances from the trace, fragmentation |
| `page` | the same as a page |
| `formulas` | Erlang C, with which the replay must agree |
"""

from holdfast.simulate.cluster.answers import Answer, answer, assumptions
from holdfast.simulate.cluster.engine import Outcome, replay
from holdfast.simulate.cluster.jobs import Jobs, Replayed, jobs_of
from holdfast.simulate.cluster.page import compared_rows, policy_facts, wait_rows, write_cluster
from holdfast.simulate.cluster.policy import Policy, classes, usual_reserve

__all__ = [
    "Answer",
    "Jobs",
    "Outcome",
    "Policy",
    "Replayed",
    "answer",
    "assumptions",
    "classes",
    "compared_rows",
    "jobs_of",
    "policy_facts",
    "replay",
    "usual_reserve",
    "wait_rows",
    "write_cluster",
]
