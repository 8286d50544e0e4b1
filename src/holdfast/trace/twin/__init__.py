"""The twin: a synthetic trace that has a trace's counts and none of its rows.

In goes a calibration, tables of counts: of Seren or Kalos as AcmeTrace's authors published them (`calibration`), or of
any normalised trace (`fit`). Out comes a trace of any size (`draw`), written in AcmeTrace's own form (`write_jobs`,
`write_telemetry`) or that of the common simulators (`export`). The same seed draws the same bytes.

The stages, a module each:

1. `published`, `joint`, `outcomes`: the joint table of type, GPUs, duration and state that nobody published,
   from the margins that were. `fitting` counts it in a trace instead, and merges what fewer than five jobs share.
2. `rounding`: whole jobs, with every margin kept.
3. `values`: seconds within the bins, with the totals and medians given.
4. `drawing`: queueing times, the longest where the load is highest, and the whole draw.
5. `sessions`: batches of like jobs, campaigns, retries; `rhythm` has their parameters.
6. `arrivals`: when jobs come, and the load that follows.
7. `placing`: a moment for each batch such that the cluster's GPUs suffice.
8. `reasons`: why the failed jobs failed, as far as anybody recorded it.
9. `writing`, `telemetry`: files.

What is published holds at full size as counted; at another size every count is scaled. Counts do not depend on the
seed; who submits what, when, for how long within a bin, and how it ends does. What nobody published is chosen, and
said where it is: batches, users, hours and CPU cores in `published`, the order of jobs in `rhythm`, the queues of CPU
jobs in the tables, the odds of states in `outcomes`, what each cluster has of Table 3 in `tables/reasons.toml`, memory
traffic and the phases of the telemetry in `telemetry`.

`model` has what passes between them, `bins` the bins of powers of two. `tables/*.toml` are the counts that are carried.
They are compiled from figures of AcmeTrace (InternLM, CC-BY-4.0) and of Hu et al., "Characterization of Large Language
Model Development in the Datacenter", NSDI 2024; no row of any trace is among them.
"""

from holdfast.trace.twin.drawing import draw
from holdfast.trace.twin.fitting import fit, jobs_of
from holdfast.trace.twin.model import Calibration, TwinJobs
from holdfast.trace.twin.published import calibration
from holdfast.trace.twin.reasons import write_reasons
from holdfast.trace.twin.telemetry import write_telemetry
from holdfast.trace.twin.writing import export, write_jobs, write_mark

__all__ = [
    "Calibration",
    "TwinJobs",
    "calibration",
    "draw",
    "export",
    "fit",
    "jobs_of",
    "write_jobs",
    "write_mark",
    "write_reasons",
    "write_telemetry",
]
