"""Read the output of Slurm's `sacct --parsable2` and `sacct --json`."""
