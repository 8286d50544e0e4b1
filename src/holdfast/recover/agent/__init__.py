"""The processes of one node: `node` keeps them going, `agent` speaks with the ranks and with the supervisor.

`rendezvous` finds out which nodes a run has and where their agents meet.
"""
