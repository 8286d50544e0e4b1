"""Find what is wrong with a running job; each detector is pure and receives what happened and when.

`hang`: a job that stands still. `anomaly`: a loss that is not a number, or far above its usual values.
`node`: nodes with faulty hardware. `external`: nodes that are about to be taken away.
"""
