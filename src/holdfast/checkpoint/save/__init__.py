"""Run one rank's saves, from the call of `save` until each is durable.

`engine` receives the call. `staging_thread` agrees with the other ranks, copies, and sends the
request to write to the writing process. `results` records the outcome of each save.
"""
