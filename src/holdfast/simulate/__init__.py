"""Simulate evaluations, training jobs and clusters: the live policies under a virtual clock.

| module | one idea |
|---|---|
| `evaluate` | predicts an evaluation with the policy that runs it live |
| `engine_model` | an engine as arithmetic |
| `workload` | the simulated tasks, models and nodes |
| `arrivals` | the times at which the checkpoints of a trace arrived |
| `ideal` | the lower bound of a simulated evaluation |
| `plan` | the prediction for `holdfast eval plan` |
| `pretrain` | training jobs with the policy of `recover`: `holdfast simulate pretrain`, `holdfast plan` |
| `cluster` | the jobs of a trace: `holdfast simulate cluster` |

Policies of other systems run in the same simulator in `benchmarks/evaluation/peer_policies.py`.
"""
