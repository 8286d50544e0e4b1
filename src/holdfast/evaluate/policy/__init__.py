"""What to run where and when: a pure function, the same live, emulated and simulated.

What enters is an event, what leaves are actions; `priors` learns on the way, and returns what it learned at the end.

| module | one idea |
|---|---|
| `events` | the events that enter and the actions that leave |
| `decide` | the function |
| `state` | its state |
| `feed` | dealing requests out: which, to which engine, how many ahead |
| `longest_first` | the queue |
| `target` | when all could be done, and how large batches may be for it |
| `tail` | when nothing is left to deal out: stealing, doubling, the next model |
| `priors` | what a sample will cost |
| `bound` | what no schedule can go below |
| `account` | where each engine-second went |
| `outlook` | what is left and what is predicted, for a display |
"""
