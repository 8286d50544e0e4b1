"""Make a twin: a synthetic trace that has the counts of a real trace and none of its rows.

The input is a calibration, which consists of tables of counts. For Seren and Kalos, these are the
counts that AcmeTrace's authors published (`calibration`). For any other normalised trace, they are
counted (`fit`). The output is a trace of any size (`draw`). It is written in AcmeTrace's own form
(`write_jobs`, `write_telemetry`) or in the form of common simulators (`export`). Equal seeds give
equal bytes.

The stages, with one module or a few for each:

1. `published`, `joint`, `outcomes`: estimate the joint table of type, GPUs, duration and state from
   the published margins. For any other trace, `fitting` counts the table, and merges cells of fewer
   than five jobs.
2. `rounding`: round the table to whole jobs; every margin is kept.
3. `values`: draw seconds within the bins, such that the given totals and medians are met.
4. `drawing`: assign queueing times, the longest where the load is highest; run all stages.
5. `sessions`: group jobs into batches, campaigns and retries, with the parameters in `rhythm`.
6. `arrivals`: draw the times of arrival, and compute the resulting load.
7. `placing`: choose a start for each batch such that the cluster has enough GPUs.
8. `reasons`: assign the recorded causes of failures to failed jobs.
9. `writing`, `telemetry`: write files.

A twin of full size has exactly the published counts. At another size, every count is scaled. The
counts do not depend on the seed. The seed determines the user, the times and the outcome of each
job, and its duration within the bin.

The authors did not publish everything. The following values are chosen by us, and marked as such
where they are defined: batches, users, hours and CPU cores in `published`; the order of jobs in
`rhythm`; the queueing times of CPU jobs in the tables; the odds of states in `outcomes`; the
division of Table 3 between the clusters in `tables/reasons.toml`; memory traffic and the phases of
the telemetry in `telemetry`.

`model` defines the data that the stages exchange, and `bins` the bins of powers of two.
`tables/*.toml` contain the published counts, compiled from figures of AcmeTrace (InternLM,
CC-BY-4.0) and of Hu et al., "Characterization of Large Language Model Development in the
Datacenter", NSDI 2024. They contain no row of any trace.
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
