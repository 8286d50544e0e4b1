"""Where the GPU time of a cluster goes, as a library: a twin stands in for the trace you have.

python examples/characterize.py [JOBS] [--out FOLDER]
"""

import argparse
from pathlib import Path

from holdfast.trace import load
from holdfast.trace.analyses.demand import gpu_demand
from holdfast.trace.analyses.durations import gpu_job_duration
from holdfast.trace.analyses.workloads import workload_shares
from holdfast.trace.twin import calibration, draw, write_jobs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("jobs", nargs="?", help="job records; by default a twin of Kalos is drawn")
    parser.add_argument("--out", type=Path, default=Path("characterization"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    jobs = options.jobs
    if jobs is None:
        jobs = options.out / "trace_kalos.csv"
        write_jobs(draw(calibration("kalos"), 5000, seed=1), jobs)

    with load(jobs) as trace:
        for note in trace.notes:
            print(f"{note.check}: {note.sentence}")
        for analysis in (gpu_job_duration, gpu_demand, workload_shares):
            result = analysis(trace)
            print(f"{analysis.__name__}: {result.caption}")
            (options.out / f"{analysis.__name__}.csv").write_text(result.table.csv())
            result.figure().savefig(options.out / f"{analysis.__name__}.pdf")
        largest = trace.query(
            "SELECT job_id, gpu_num, duration_s FROM jobs ORDER BY gpu_time_s DESC LIMIT 3"
        )
        for job_id, gpus, duration_s in largest.rows():
            print(f"{job_id}: {gpus:.0f} GPUs for {duration_s / 3600:.1f} h")


if __name__ == "__main__":
    main()
