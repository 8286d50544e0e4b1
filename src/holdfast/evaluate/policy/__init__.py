"""What to run where and when: a pure function, the same live, emulated and simulated.

What enters is an event, what leaves are actions; `priors` learns on the way, and tells what it learned at the end.

| module | one idea |
|---|---|
| `events` | what the policy hears and says |
| `decide` | the function |
| `state` | what it knows |
| `feed` | dealing requests out: which, to which engine, how many ahead |
| `longest_first` | the queue |
| `target` | when all could be done, and how large batches may be for it |
| `tail` | when nothing is left to deal out: stealing, doubling, the next model |
| `priors` | what a sample will cost |
| `bound` | what no schedule can go below |
| `account` | where each engine-second went |
| `outlook` | how far it is, for a display |
"""
