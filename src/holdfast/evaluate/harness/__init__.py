"""Run unmodified benchmark harnesses on CPU: they build requests and compute metrics.

The input is a suite's entry and the facts of a model. The harness's requests go to engines, and the
harness makes its own results from their answers. One `host` on each node runs all of this, in
processes forked from a parent with all imports done:

| module | one idea |
|---|---|
| `choose` | a harness by its name: `lm_eval/`, `inspect/`, or one of the user's |
| `host` | the node's process: runs each task in a client process, restarted when it is killed |
| `nursery`, `zygote` | forking: the host's side and the parent's side |
| `measuring` | metrics in bounded, warm processes |
| `child` | the work of a forked process |
| `client` | a task's connection to the coordinator, dialled again when it is lost |
| `jobs` | the frames to the forked processes |
| `counting` | the requests of a suite, without sending any |
| `exact_json` | values of metrics as JSON, exactly |
| `failure` | an error of foreign code in one sentence |
"""
