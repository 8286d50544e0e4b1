"""One light process that everything dials into: it asks the policy, commits answers, and can be killed at any time.

What enters are messages (`wire`) of the command, the nodes' agents, the harness hosts and their clients, and the
engines; what leaves are messages to them, and the journals.

| module | one idea |
|---|---|
| `config` | what it is told once, as a file, and where its own files are |
| `server` | the process: from its start, or its start anew, to its end |
| `live` | messages in, the policy asked, messages out |
| `sample_queue` | samples, from the client that asks for them to the client that gets them |
| `models`, `tasks` | what is evaluated, and what it came to: kept as files |
| `open_requests` | samples and requests in hand: who waits for what |
| `engine_slots`, `engine_pool` | who is there: nodes and engines, and which engine serves which model |
| `dealing`, `orders` | what nodes are told: weights, once per cluster; engines' processes |
| `canaries`, `certifying` | whether a swapped engine may answer; which fresh load says so, and where |
| `dispatcher`, `resumed_requests` | what engines are asked and say; what they hold from before a restart |
| `commits` | the way of an answer into the journal |
| `measurements`, `delivery` | metrics in progress; samples on their way to who asked for them |
| `timeline_writer`, `counts` | what happened when, for the timeline; how far it is, for whoever watches |
"""
