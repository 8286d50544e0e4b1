"""Provide the code that all rooms share; this room imports no other room.

| module | one idea |
|---|---|
| `errors` | the tree of errors, each with its exit code |
| `arguments` | checks of the arguments that users pass |
| `clock` | time, injected |
| `paths` | the paths of runs, evaluations, logs and the ledger |
| `atomic` | files that are whole or absent |
| `processes` | starting modules in new processes; process trees; exit codes and signals |
| `child_process` | a child's life: ready, restarted within a limit, released, ended |
| `channel` | bounded frames over sockets, and the token that comes before the first frame |
| `sockets` | readable file descriptors, free ports, plain addresses |
| `rate_limit` | a limit on bytes per second, for threads and for tasks of an event loop |
| `rotating_log` | a log file of bounded size |
| `link` | the seam between a rank's code and the rank's supervisor |
| `phases` | the seam between the code that runs a rank's phases and the rank's profile |
| `left_out` | the batches of the data that a training leaves out |
| `ledger` | the database: runs, attempts, events, incidents, checkpoints, evaluations |
| `telemetry` | the journal of steps, a file beside the ledger |
| `accounting` | the figures of a run: lost steps, seconds by cause, ETTR |
| `explanation` | a run's incidents and decisions in plain words |
| `words` | quantities and untrusted text, formatted for a page |
| `page` | the shared parts of HTML pages |
"""
