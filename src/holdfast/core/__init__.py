"""Provide what all rooms share; this room imports no other room.

| module | one idea |
|---|---|
| `errors` | the tree of errors, each with its exit code |
| `clock` | time, injected |
| `paths` | the paths of runs, evaluations, logs and the ledger |
| `atomic` | files that are whole or absent |
| `processes` | ends of processes: exit codes, process trees, parents |
| `child_process` | a child that is ready, restarted with a limit, released, ended |
| `channel` | bounded frames over sockets, and the token that comes before the first frame |
| `rate_limit` | bytes per second at most, for threads and for tasks of an event loop |
| `rotating_log` | a log file of bounded size |
| `link` | the seam between a rank's code and the rank's supervisor |
| `ledger` | the database: runs, attempts, events, incidents, checkpoints, evaluations |
| `telemetry` | the journal of steps, a file beside the ledger |
| `accounting` | the sums of a run's records: lost steps, seconds, ETTR |
| `words` | quantities and untrusted text as a page shows them |
| `templates` | a page's template filled, everything escaped |
| `drawing` | a matplotlib figure as inline SVG that follows a page's colours |
"""
