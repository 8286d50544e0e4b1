"""Find the least-cost explanation of the events of a job, and answer with a `Diagnosis`."""
