"""The processes of one node: `node` keeps them going, `agent` passes messages between ranks and supervisor.

`rendezvous` finds out which nodes a run has and where their agents meet.
"""
