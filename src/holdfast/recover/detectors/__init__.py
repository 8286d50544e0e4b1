"""Find the faults of a running job; each detector is pure and receives events with their times.

`hang`: a job that stands still. `anomaly`: a loss that is not a number, or far above its usual
values. `node`: nodes with faulty hardware. `external`: nodes that are about to be taken away.
`liveness`: detectors and sources that cannot look.
"""
