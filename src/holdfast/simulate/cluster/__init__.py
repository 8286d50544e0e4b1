"""Replay a cluster's jobs under a scheduling policy, to predict waits and GPU utilisation.

The input is a trace in any form that `holdfast.trace` reads. The output is what `holdfast simulate
cluster` prints: for each type of job, the simulated waits beside the waits in the trace; the
utilisation of the GPUs; and the fragmentation, which is the number of free GPUs that lie scattered
on partly used nodes. Optionally, a second replay shows the effect of decoupled evaluation.

| module | one idea |
|---|---|
| `jobs` | the jobs as columns, and predicted run times |
| `policy` | reserved quota, limits, best-effort evaluation |
| `nodes` | nodes sorted into buckets by their number of free GPUs |
| `engine` | the replay, event by event, with backfill |
| `decoupled` | one coordinator job in place of all evaluation jobs of a checkpoint |
| `answers` | waits, distances from the trace, fragmentation |
| `page` | the answers as an HTML page |
| `formulas` | closed forms of queueing theory (Erlang C), with which the replay must agree |
"""

from holdfast.simulate.cluster.answers import ClusterAnswer, answer, assumptions
from holdfast.simulate.cluster.engine import ReplayOutcome, replay
from holdfast.simulate.cluster.jobs import Jobs, Replayed, jobs_of
from holdfast.simulate.cluster.page import compared_rows, policy_facts, wait_rows, write_cluster
from holdfast.simulate.cluster.policy import Policy, classes, usual_reserve

__all__ = [
    "ClusterAnswer",
    "Jobs",
    "Policy",
    "ReplayOutcome",
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
