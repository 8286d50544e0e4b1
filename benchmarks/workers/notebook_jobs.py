"""AcmeTrace's own method in pandas: the questions of its notebook on a job trace.

This is not its code, but the same steps on the same questions, for a fair measurement. A CDF is a
filter of all jobs for each point of the x axis; a CDF of GPU time is a filter and a sum. One JSON
object is printed: the seconds of each question.

    python notebook_jobs.py TRACE.csv
"""

import json
import sys
import time

import pandas as pd

DURATION_POINTS = [2**power for power in range(22)]
QUEUE_POINTS = [2**power for power in range(16)]
GPU_POINTS = list(range(1025))
TYPES = ["Other", "Debug", "Pretrain", "Eval", "SFT", "MLLM"]


def share_of_jobs(jobs: pd.DataFrame, points: list[int], column: str) -> list[float]:
    data = jobs[[column]].copy()
    data = data.dropna()
    return [len(data[data[column] <= point]) / len(data) * 100 for point in points]


def share_of_gpu_time(jobs: pd.DataFrame, points: list[int]) -> list[float]:
    data = jobs[["gpu_num", "duration"]].copy()
    data["gpu_time"] = data["gpu_num"] * data["duration"]
    data = data.dropna()
    total = data["gpu_time"].sum()
    return [data[data["gpu_num"] <= point]["gpu_time"].sum() / total * 100 for point in points]


def of_type(jobs: pd.DataFrame, kind: str) -> pd.DataFrame:
    return jobs[(jobs["gpu_num"] > 0) & (jobs["type"] == kind)]


def type_shares(jobs: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    jobs = jobs[jobs["gpu_num"] > 0]
    counts = jobs.groupby("type").size()
    gpu_time = jobs.groupby("type")["gpu_time"].sum()
    return counts / counts.sum() * 100, gpu_time / gpu_time.sum() * 100


def boxes(jobs: pd.DataFrame) -> list[pd.Series]:
    jobs = jobs.sort_values(by="gpu_num", ascending=False)
    return [
        jobs[jobs["type"] == kind]["gpu_num"].describe(percentiles=[0.25, 0.5, 0.75])
        for kind in TYPES
    ]


def final_states(jobs: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    jobs = jobs[jobs["gpu_num"] > 0]
    gpu_time = jobs.groupby("state")["gpu_time"].sum()
    return jobs["state"].value_counts(normalize=True) * 100, gpu_time / gpu_time.sum() * 100


QUESTIONS = {
    "duration": lambda jobs: share_of_jobs(jobs[jobs["gpu_num"] > 0], DURATION_POINTS, "duration"),
    "gpus by jobs": lambda jobs: share_of_jobs(jobs[jobs["gpu_num"] > 0], GPU_POINTS, "gpu_num"),
    "gpus by GPU time": lambda jobs: share_of_gpu_time(jobs[jobs["gpu_num"] > 0], GPU_POINTS),
    "types": type_shares,
    "boxes of GPUs": boxes,
    "duration by type": lambda jobs: [
        share_of_jobs(of_type(jobs, kind), DURATION_POINTS, "duration") for kind in TYPES
    ],
    "queue by type": lambda jobs: [
        share_of_jobs(of_type(jobs, kind), QUEUE_POINTS, "queue") for kind in TYPES
    ],
    "final states": final_states,
}


def main(path: str) -> None:
    began_s = time.perf_counter()
    jobs = pd.read_csv(path)
    seconds = {"read": time.perf_counter() - began_s}
    for name, ask in QUESTIONS.items():
        began_s = time.perf_counter()
        ask(jobs)
        seconds[name] = time.perf_counter() - began_s
    print(json.dumps(seconds))


if __name__ == "__main__":
    main(sys.argv[1])
