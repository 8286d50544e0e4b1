"""What every room stands on; depends on no other room.

| module | one idea |
|---|---|
| `errors` | the one tree of errors, each with its exit code |
| `clock` | time, injected |
| `paths` | where runs, evaluations, logs and the ledger lie |
| `atomic` | files that are whole or absent |
| `processes` | how processes end: their exits said in words, trees killed, children tied to parents |
| `child_process` | a child that is ready, restarted with a limit, released, ended |
| `channel` | bounded frames over sockets, and the token that is demanded before the first of them |
| `rate_limit` | bytes per second at most, for threads and for tasks of an event loop |
| `rotating_log` | a log file of bounded size |
| `link` | the seam between a rank's code and whoever supervises it |
| `ledger` | the one memory: runs, attempts, events, incidents, checkpoints, evaluations |
| `telemetry` | the journal of steps, a file beside the ledger |
| `accounting` | what a run's records add up to: lost steps, seconds, ETTR |
| `words` | quantities and untrusted text as a page shows them |
| `templates` | a page's template filled, everything escaped |
| `drawing` | a matplotlib figure as inline SVG that follows a page's colours |
"""
