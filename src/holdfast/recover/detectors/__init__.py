"""Find faults of a running job. Each detector is pure: it receives events with their times.

`hang` finds a job that makes no progress. `anomaly` finds a loss that is not a number, or far above
its usual values. `node` finds nodes with faulty hardware. `external` finds nodes that are about to
be taken away. `liveness` finds detectors and sources that have no data.
"""
