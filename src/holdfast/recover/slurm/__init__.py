"""Run in an allocation of Slurm that Holdfast has submitted.

`submission` submits the allocation and records the numbers of its jobs; `following` shows the run
on the terminal that has submitted the run; `requeue` submits the next job when nodes are missing in
the present job.
"""
