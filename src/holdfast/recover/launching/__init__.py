"""Start the processes of a job.

`launches` runs in the supervisor and chooses the nodes of an attempt. `launch` starts the processes
of the job on one node. The processes start each other in this order:

guard → torchrun, which may be a `warm_launcher` → one shim per rank
"""
