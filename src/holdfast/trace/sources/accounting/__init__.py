"""Read the accounting of schedulers other than Slurm: SWF, PBS and LSF."""
