"""Read Slurm's accounting: `sacct --parsable2` and `sacct --json`."""
