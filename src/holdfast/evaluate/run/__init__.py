"""Run one evaluation, or a stream of them, from the side of the command.

`evaluate` and `watch` are the entries; `plan` fixes what is evaluated; `session` starts the processes; `node_agent` is
the process of a node; `ledger` and `folder` keep the records; `summary` and `actual_cost` compute the result.
"""
