"""Start the processes of a job.

`launches` chooses the nodes of an attempt, in the supervisor. `launch` starts the job on one node.

guard → torchrun, which may be a `warm_launcher` → a shim a rank
"""
