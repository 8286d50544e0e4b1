"""Run in a Slurm job that Holdfast has submitted.

`submission` submits a run as a job, and records the ids of the run's jobs. `following` shows the
run on the terminal from which it was submitted. `requeue` submits the next job if nodes are missing
in the present job.
"""
