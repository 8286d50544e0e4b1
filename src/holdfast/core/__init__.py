"""What every room stands on; depends on no other room.

| module | one idea |
|---|---|
| `errors` | the one tree of errors, each with its exit code |
| `clock` | time, injected |
| `paths` | where runs, evaluations, logs and the ledger lie |
| `atomic` | files that are whole or absent |
| `processes` | how processes end: their exits said in words, trees killed, children tied to parents |
| `rotating_log` | a log file of bounded size |
| `link` | the seam between a rank's code and whoever supervises it |
| `ledger` | the one memory: runs, attempts, events, incidents, checkpoints, evaluations |
| `telemetry` | the journal of steps, a file beside the ledger |
| `accounting` | what a run's records add up to: lost steps, seconds, ETTR |
| `words` | quantities and untrusted text as a page shows them |
| `templates` | a page's template filled, everything escaped |
| `drawing` | a matplotlib figure as inline SVG that follows a page's colours |
"""
