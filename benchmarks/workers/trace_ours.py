"""Holdfast's side of `benchmarks/trace.py`, one measurement a process. Prints one JSON object.

python trace_ours.py questions STORE     seconds of each of the notebook's questions, from cold
python trace_ours.py analyse TRACE.csv   seconds to read, and to answer every question about jobs
python trace_ours.py cdf WIDE.csv        samples, their sum and median
python trace_ours.py stored-cdf STORE    the same of a converted store
python trace_ours.py convert WIDE.csv FOLDER
python trace_ours.py draw TRACE.csv JOBS SEED
python trace_ours.py twins FOLDER        seconds to draw and write Seren and Kalos
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def questions(store: str) -> dict[str, float]:
    from holdfast.trace import load
    from holdfast.trace.analyses import demand, durations, outcomes, queues, workloads

    asked: dict[str, Callable[[Any], object]] = {
        "duration": durations.gpu_job_duration,
        "gpus by jobs": demand.gpu_demand,
        "gpus by GPU time": demand.gpu_demand,
        "types": workloads.workload_shares,
        "boxes of GPUs": demand.gpu_demand_by_type,
        "duration by type": durations.duration_by_type,
        "queue by type": queues.queue_by_type,
        "final states": outcomes.final_states,
    }
    seconds = {}
    for name, ask in asked.items():
        with load(store) as trace:
            began_s = time.perf_counter()
            ask(trace)
            seconds[name] = time.perf_counter() - began_s
    return seconds


def analyse(path: str) -> dict[str, float]:
    from holdfast.trace import characterize, load

    began_s = time.perf_counter()
    with load(path) as trace:
        read_s = time.perf_counter() - began_s
        answer = characterize(trace)
    answered = sum(entry.result is not None for entry in answer.entries)
    return {"read": read_s, "all": time.perf_counter() - began_s, "analyses": answered}


def cdf(path: str) -> dict[str, float]:
    from holdfast.trace.telemetry import value_counts

    found = value_counts(path, "GPU_UTIL")
    # The lower median, as the peers have it.
    median = found.values[(found.weights.cumsum() >= (found.total + 1) // 2).argmax()]
    return {
        "n": found.total,
        "sum": float((found.values * found.weights).sum()),
        "median": float(median),
    }


def convert(path: str, folder: str) -> dict[str, float]:
    from holdfast.trace.telemetry import convert as convert_telemetry

    convert_telemetry(path, folder, metric="GPU_UTIL")
    return {"bytes": sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())}


def twins(folder: str) -> dict[str, float]:
    from holdfast.trace.twin import calibration, draw, write_jobs

    began_s = time.perf_counter()
    jobs = 0
    for name in ("seren", "kalos"):
        drawn = draw(calibration(name))
        write_jobs(drawn, Path(folder) / f"trace_{name}.csv")
        jobs += len(drawn.job_id)
    return {"s": time.perf_counter() - began_s, "jobs": jobs}


def draw_jobs(path: str, jobs: str, seed: str) -> dict[str, float]:
    from holdfast.trace.twin import calibration, draw, write_jobs

    write_jobs(draw(calibration("seren"), int(jobs), seed=int(seed)), path)
    return {"bytes": Path(path).stat().st_size}


MODES: dict[str, Callable[..., dict[str, float]]] = {
    "questions": questions,
    "analyse": analyse,
    "cdf": cdf,
    "stored-cdf": cdf,
    "convert": convert,
    "twins": twins,
    "draw": draw_jobs,
}

if __name__ == "__main__":
    print(json.dumps(MODES[sys.argv[1]](*sys.argv[2:])))
