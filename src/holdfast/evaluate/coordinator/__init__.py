"""Coordinate an evaluation in one light process, which can be killed at any time.

Every worker connects to the coordinator. Messages (`wire`) come from the command, the nodes'
agents, the harness hosts with their clients, and the engines. The coordinator sends messages back
and writes the journals.

| module | one idea |
|---|---|
| `config` | the configuration that the process reads once, and the paths of its files |
| `server` | the process: from its start, or its restart, to its end |
| `live` | an evaluation in progress: messages in, the policy's decisions, messages out |
| `sample_queue` | samples, from the client that submits them to the client that receives them |
| `models`, `tasks` | the models and their tasks, with their outcomes: kept as files |
| `policy_queue` | events on their way to the policy, and its decisions |
| `open_requests` | samples and requests without an answer; requests held over a restart |
| `engine_slots`, `engine_pool` | nodes and engines, and which engine serves which model |
| `resting`, `known_keys` | engines that rest while all answers are known, and what tells so |
| `dealing` | weights to nodes, once per cluster |
| `certifying` | fresh loads that certify swapped engines |
| `dispatcher` | requests to engines, and their answers |
| `commits` | answers and metrics into the journals |
| `measurements`, `delivery` | metrics in progress; finished samples to their clients |
| `timeline_writer`, `counts` | spans for the timeline; progress for the display |
"""
