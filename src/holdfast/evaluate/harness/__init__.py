"""The benchmarks are another's: an unmodified harness builds the requests and computes the metrics, on CPU.

What enters is a suite's entry and the facts of a model; what leaves are requests for engines and, from their answers,
the harness's own results. One `host` a node runs it all, in processes that are forked from a parent in which
everything is imported:

| module | one idea |
|---|---|
| `choose` | a harness by its name: `lm_eval/`, `inspect/`, or one of the user's |
| `host` | the node's process: runs each task in a client process, restarted when it is killed |
| `nursery`, `zygote` | forking: the host's side and the parent's side |
| `measuring` | metrics in bounded, warm processes |
| `child` | what a forked process does |
| `client` | a task's connection to the coordinator, dialled again whenever it is lost |
| `jobs` | the frames to the forked processes |
| `counting` | the requests of a suite, without sending any |
| `exact_json` | values of metrics as JSON, exactly |
| `failure` | an error of foreign code in one sentence |
"""
