"""Find the faulty node among several: test them, and judge by what the tests show.

1. `solo`: checks of one node by itself; `group`: an allgather of two or three nodes; `worker` and `tester` run both in
   processes that are killed at a limit
2. `pairing`: which nodes are tested together next, and what the results say of each node; pure
3. `session`: solo checks, then rounds of group tests, until the nodes are judged or the time is over
4. `verdicts`: what the ledger keeps of sessions, for the next one
5. `in_run`: a session before a launch of a run; `across`: a session of `holdfast nodes check`
"""
