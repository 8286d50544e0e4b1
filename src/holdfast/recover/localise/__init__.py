"""Find the faulty node among several: test the nodes, and judge the nodes by the results.

1. `solo`: checks of one node by itself; `group`: an allgather of two or three nodes; `worker` and
   `tester` run both in processes that are killed at a limit
2. `pairing`: the nodes to test together next, and the judgement of each node by the results; pure
3. `session`: solo checks, then rounds of group tests, until the nodes are judged or time is over
4. `verdicts`: the records of sessions in the ledger, for the next session
5. `in_run`: a session before a launch of a run; `across`: a session of `holdfast nodes check`
"""
