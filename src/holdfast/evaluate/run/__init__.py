"""Run one evaluation, or a stream of evaluations, in the process of the command.

`evaluate` and `watch` are the entry points. `plan` records the suite, model and options; `session`
starts the processes; `node_agent` is the process on each node; `ledger` and `folder` keep the
records; `summary` and `actual_cost` compute the result.
"""
