"""Write snapshots to durable files and commit them, in a process that outlives the trainer.

`client` runs in the trainer, and `process` is the writing process. For each save, `persist` writes
and attests one rank's files, and `commit` makes one checkpoint of all ranks' files.
"""
