"""The benchmarks are another's: an unmodified harness builds the requests and computes the metrics, on CPU.

What enters is a suite's entry and the facts of a model; what leaves are requests for engines and, from their answers,
the harness's own results. One `host` a node runs it all, in processes that are forked from a parent in which
everything is imported:

| module | one idea |
|---|---|
| `harness` | the seam |
| `choose` | a harness by its name: `lm_eval/`, `inspect`, or anybody's |
| `host` | hears the coordinator, keeps processes |
| `nursery`, `zygote` | the host's side and the other side of forking |
| `runs` | a client process a task, started again when it is killed |
| `measuring` | metrics in bounded, warm processes |
| `child` | what a forked process does |
| `client` | how it asks: the coordinator over TCP, dialled again whenever that is lost |
| `jobs` | the frames to the children |
| `local` | a client whose engine is in the same process |
| `exact_json` | values of metrics as JSON, exactly |
| `failure` | an error of somebody else's code in one sentence |
"""
