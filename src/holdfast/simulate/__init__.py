"""WHAT IF: the policies of other rooms under a virtual clock.

`evaluate` predicts an evaluation: the same policy that runs it live, engines (`engine_model`) and wires as arithmetic;
`workload` is what goes in, `arrivals` finds when the checkpoints of a trace came, `ideal` is its lower bound, `plan`
what `holdfast eval plan` shows. The policies of others, run in the same simulator, are in the benchmarks
(`benchmarks/evaluation/peer_policies.py`).

`pretrain` simulates training jobs with the policy of `recover`: what `holdfast simulate pretrain` and `holdfast plan`
show. `cluster` replays the jobs of a trace: `holdfast simulate cluster`.
"""
