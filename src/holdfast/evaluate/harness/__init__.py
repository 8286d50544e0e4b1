"""Run unmodified benchmark harnesses on CPU: they build requests and compute metrics.

The input is a suite's entry and the facts of a model. The harness sends its requests to engines
instead of a model of its own, and makes its own results object from the answers. One `host` on each
node does this, in processes forked from a parent that has imported the harnesses:

| module | one idea |
|---|---|
| `choose` | finds a harness by its name: `lm_eval/`, `inspect/`, or one of the user's |
| `host` | the node's process: runs each task in a client process, and restarts a client that died |
| `nursery`, `zygote` | fork processes: the host's side, and the side of the parent that is forked |
| `measuring` | computes metrics in a bounded number of warm processes |
| `child` | the work of a forked process |
| `client` | a task's connection to the coordinator, which reconnects after a loss |
| `jobs` | the frames exchanged with the forked processes |
| `counting` | collects the requests of a suite without sending any |
| `exact_json` | values of metrics as JSON, exactly |
| `failure` | describes an exception of foreign code in one sentence |
"""
