"""What `benchmarks/evaluate.py` is made of, a part a file.

`suite60` makes tasks and models, `stock` runs lm-eval alone on them and `real` Holdfast, beside it. `miniature` is the
cluster that is emulated, by processes that sleep instead of computing, and `storage` what they share; `ours` runs
Holdfast there, `paper` the paper's policy, `emulation` compares both with the bound and with the simulator. `stream`,
`remote_bytes`, `peers`, `sandbox`, `scale` and `brute_force` measure what their names say.

`peers` runs `peer_policies`, the policies of others, on the workloads of `suites`; `policy_load` measures how many
answers a second our policy takes; `sandbox` runs `hostile_programs` by `hostile_trials`. `fault_injected_evaluation`
starts an evaluation whose processes are killed, for `benchmarks/evaluate_faults.py` and for tests.
"""
