"""Coordinate an evaluation in one lightweight process, which may be killed at any time.

Every worker connects to the coordinator. Messages (`wire`) come from the command, the nodes'
agents, the harness hosts with their clients, and the engines. The coordinator sends messages back
and writes the journals.

| module | one idea |
|---|---|
| `config` | the configuration that the process reads once, and the paths of its files |
| `server` | the process: from its start, or its restart, to its end |
| `live` | the event loop: receive messages, apply the policy's decisions, send messages |
| `sample_queue` | samples, from the client that submits them to the client that receives them |
| `models`, `tasks` | the models and their tasks, with their outcomes, kept as files |
| `policy_queue` | queues events for the policy, and yields its decisions |
| `open_requests` | samples and requests without an answer; requests that engines hold over a restart |
| `engine_slots`, `engine_pool` | nodes and engines, and which engine serves which model |
| `resting`, `known_keys` | engines are not started while all answers are known; the files that show this |
| `dealing` | assigns weights to nodes, so that a cluster reads them once |
| `certifying` | certifies swapped engines by a fresh load of the same weights |
| `dispatcher` | sends requests to engines, and handles their answers |
| `commits` | writes answers and metrics into the journals |
| `measurements`, `delivery` | metrics in progress; sends finished samples to their clients |
| `timeline_writer`, `counts` | spans for the timeline; progress for the display |
"""
