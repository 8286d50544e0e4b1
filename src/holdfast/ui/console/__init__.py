"""The console: live pages over the ledger, for people who are on call.

The input is the ledger and the functions that act (`Backend`); the output is a web server. The
stages, in order:

| module | one idea |
|---|---|
| `backend` | the functions that the command line passes in |
| `queries` | the read models, one a page, each bounded |
| `journal`, `logs` | a run's loss as a bounded series; a bounded part of a rank's log |
| `usage` | the profile curves of runs, read again after a rest |
| `drawing` | the charts of a browser without scripts |
| `now_page` | the page Now as plain values |
| `cluster_page` | the trace report of the ledger, made again after a change |
| `run_page` | a run and an incident as plain values |
| `static_files` | styles and scripts under names with a hash of their content |
| `pages` | the routes that read: HTML from a template, or JSON |
| `metrics` | the page Now as metrics for Prometheus |
| `otlp` | new events, sent to an OpenTelemetry collector |
| `stream` | the changes of the ledger, sent to the browsers |
| `sessions`, `gate` | who is signed in; which requests go no further |
| `scraper_token` | the token that opens the metrics without a session |
| `acting` | the routes that act, each once and recorded |
| `serving` | the application and its server |
"""
