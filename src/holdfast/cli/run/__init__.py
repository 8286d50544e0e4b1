"""`holdfast run`: `command` runs a job, `evaluation` evaluates its checkpoints, `slurm` submits and follows it."""
