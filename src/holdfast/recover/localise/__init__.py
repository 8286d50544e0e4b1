"""Find the faulty node among several: test the nodes, and judge them by the results.

1. `solo`: checks of a single node; `group`: an allgather among two or three nodes. `worker` and
   `tester` run both in processes that are killed at a time limit.
2. `pairing`: chooses the nodes to test together next, and judges each node by the results; a pure
   module
3. `session`: solo checks, and then rounds of group tests, until all nodes are judged or the time is
   over
4. `verdicts`: records the results of a session in the ledger, and reads them for the next session
5. `in_run`: runs a session before a launch of a run; `across`: runs a session for `holdfast nodes
   check`
"""
