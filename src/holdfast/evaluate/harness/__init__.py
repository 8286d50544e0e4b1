"""The benchmarks are another's: an unmodified harness builds the requests and computes the metrics, on CPU.

`harness` is the seam, `lm_eval` and `inspect` its kinds, `host` the process that runs them (one a node; one client
process a task, forked from a parent that has imported everything), `client` how a client reaches the coordinator.
"""
