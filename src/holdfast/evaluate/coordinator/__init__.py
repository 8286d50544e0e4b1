"""One light process that everything dials into: it asks the policy, commits answers, and can be killed at any time.

What enters are messages (`wire`) of the command, the nodes' agents, the harness hosts and their clients, and the
engines; what leaves are messages to them, and the journals.

| module | one idea |
|---|---|
| `config` | what it is told once, as a file, and where its own files are |
| `server` | the process: from its start, or its start anew, to its end |
| `connections`, `dial` | the two ends of a line, which outlives restarts |
| `live` | messages in, the policy asked, messages out |
| `intake` | samples, from the client that asks for them to the client that gets them |
| `models`, `tasks` | what is evaluated, and what it came to: kept as files |
| `book` | samples and requests in hand: who waits for what |
| `seats`, `fleet` | who is there: nodes and engines, and which engine serves which model |
| `dealing`, `orders` | what nodes are told: weights, once per cluster; engines' processes |
| `canaries`, `certifying` | whether a swapped engine may answer; which fresh load says so, and where |
| `asking`, `awaited` | what engines are asked and say; what they hold from before a restart |
| `journal`, `commits` | what was finished, kept by content; and its way there |
| `measurements`, `delivery` | metrics in progress; samples on their way to who asked for them |
| `chronicle`, `counts` | what happened when, for the timeline; how far it is, for whoever watches |
"""
