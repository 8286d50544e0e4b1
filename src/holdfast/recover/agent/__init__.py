"""Run one node's part of a run.

`node` keeps the processes of the node going. `agent` passes messages between ranks and supervisor.
`rendezvous` finds out how many nodes a run has, and where their agents meet.
"""
