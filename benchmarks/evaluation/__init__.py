"""Parts of `benchmarks/evaluate.py`.

| module | one idea |
|---|---|
| `suite60` | makes tasks and models |
| `stock`, `real` | run lm-eval alone, and Holdfast beside it, on `suite60` |
| `miniature` | the emulated cluster: processes that sleep instead of computing |
| `storage` | the storage that its nodes share |
| `ours`, `paper` | run Holdfast, and the paper's policy, on the miniature |
| `emulation` | compares both with the bound and with the simulator |
| `stream`, `remote_bytes`, `scale`, `brute_force` | measure their names |
| `peers`, `peer_policies`, `suites` | other policies, on the workloads of `suites` |
| `policy_load` | the answers per second that Holdfast's policy processes |
| `sandbox`, `hostile_programs`, `hostile_trials` | hostile programs in the sandbox |
| `fault_injected_evaluation` | an evaluation with killed processes, also for tests |
"""
