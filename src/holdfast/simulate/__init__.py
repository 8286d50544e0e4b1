"""Simulate evaluations, training jobs and clusters: the live policies under a virtual clock.

| module | one idea |
|---|---|
| `evaluate` | predicts an evaluation with the policy that runs it live |
| `engine_model` | computes the times of an engine from its rates, without an engine |
| `workload` | defines the simulated tasks, models and nodes |
| `arrivals` | finds the times at which the checkpoints of a trace arrived |
| `ideal` | computes the lower bound for the time of a simulated evaluation |
| `plan` | makes the prediction for `holdfast eval plan` |
| `pretrain` | simulates training under the policy of `recover` (`holdfast simulate pretrain`) |
| `cluster` | replays the jobs of a trace (`holdfast simulate cluster`) |

Policies of other systems run in the same simulator in `benchmarks/evaluation/peer_policies.py`.
"""
