"""Replay a million jobs, beside a plain simulator: CPU time and memory.

Holdfast's replay runs in a separate process.
"""

import heapq
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from common.table import Must, Row
from holdfast.simulate.cluster import Jobs, Policy, Replayed, answer, usual_reserve
from holdfast.trace.twin import calibration, draw

JOBS, PEER_JOBS = 1_000_000, 19_905
MAX_S, MAX_MB = 60.0, 2000.0
RUNNING = 1_000
"""Jobs that run at the same time, at most a few hundred on this cluster."""
NODES, PER = 302, 8
_TYPES = {"Eval": "Evaluation"}


def repeated(number: int) -> Replayed:
    """Return the GPU jobs of the Kalos twin, repeated until there are so many."""
    twin = draw(calibration("kalos"), seed=0)
    kept = twin.gpu_num > 0
    submit_s, start_s, end_s = twin.submit_s[kept], twin.start_s[kept], twin.end_s[kept]
    once = Jobs.of(
        {
            "submit_s": submit_s,
            "run_s": end_s - start_s,
            "queue_s": start_s - submit_s,
            "gpus": twin.gpu_num[kept],
            "user": twin.user[kept],
            "type": [_TYPES.get(str(one), str(one)) for one in twin.type[kept]],
        }
    )
    span_s = float(once.submit_s[-1]) + 1.0
    places = np.arange(number)
    jobs = once.take(places % len(once))
    jobs = replace(jobs, submit_s=jobs.submit_s + places // len(once) * span_s).predicted()
    return Replayed(jobs=jobs, cluster="Kalos", nodes=NODES, gpus_per_node=PER, left_out={})


def policy_of(replayed: Replayed) -> Policy:
    """Return the policy of the command line."""
    nodes = usual_reserve(replayed.jobs, "Pretrain", nodes=NODES, gpus_per_node=PER)
    return Policy(reserved_nodes={"Pretrain": nodes})


def measured(number: int) -> dict[str, float]:
    """Replay so many jobs; return CPU times and the peak memory."""
    given = repeated(number)
    began_s = time.process_time()
    found = answer(replace(given, jobs=given.jobs.predicted()), policy_of(given))
    took_s = time.process_time() - began_s
    return {
        "jobs": found.variants[0].jobs,
        "cpu_s": took_s,
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def plain(jobs: Jobs, gpus: int) -> tuple[float, float]:
    """Replay with EASY as usually written.

    There is one object per job and one count of GPUs, and all waiting jobs are tried each time.

    Returns:
        The CPU time and the GPU-seconds that were held.
    """
    columns = zip(
        jobs.submit_s.tolist(),
        jobs.run_s.tolist(),
        jobs.gpus.tolist(),
        jobs.predicted_s.tolist(),
        strict=True,
    )
    waiting_to_come = [
        {"submit": submit, "run": run, "gpus": size, "predicted": predicted}
        for submit, run, size, predicted in columns
    ]
    began_s = time.process_time()
    free, held, now = gpus, 0.0, 0.0
    events = [(one["submit"], number, True) for number, one in enumerate(waiting_to_come)]
    heapq.heapify(events)
    waiting: list[int] = []
    running: dict[int, float] = {}
    while events:
        now, number, comes = heapq.heappop(events)
        if comes:
            waiting.append(number)
        else:
            free += int(waiting_to_come[number]["gpus"])
            del running[number]

        def start(which: int, at_s: float) -> None:
            one = waiting_to_come[which]
            running[which] = at_s + one["predicted"]
            heapq.heappush(events, (at_s + one["run"], which, False))

        while waiting and waiting_to_come[waiting[0]]["gpus"] <= free:
            first = waiting.pop(0)
            free -= int(waiting_to_come[first]["gpus"])
            held += waiting_to_come[first]["gpus"] * waiting_to_come[first]["run"]
            start(first, now)
        if not waiting:
            continue
        room, shadow_s = free, now
        for which, end_s in sorted(running.items(), key=lambda item: item[1]):
            if room >= waiting_to_come[waiting[0]]["gpus"]:
                break
            room, shadow_s = room + int(waiting_to_come[which]["gpus"]), max(end_s, now)
        spare = room - waiting_to_come[waiting[0]]["gpus"]
        for which in waiting[1:]:
            one = waiting_to_come[which]
            in_time = now + one["predicted"] <= shadow_s
            if one["gpus"] <= free and (in_time or one["gpus"] <= spare):
                spare -= 0 if in_time else one["gpus"]
                free -= int(one["gpus"])
                held += one["gpus"] * one["run"]
                waiting.remove(which)
                start(which, now)
    return time.process_time() - began_s, held


def heap_s(number: int) -> float:
    """Return the CPU seconds of a heap alone for the end of each job, with RUNNING jobs in it."""
    run_s = np.random.Generator(np.random.Philox(0)).random(number).tolist()
    began_s = time.process_time()
    heap = [(one_s, place) for place, one_s in enumerate(run_s[:RUNNING])]
    heapq.heapify(heap)
    for place, one_s in enumerate(run_s):
        ended_s, _ = heapq.heappop(heap)
        heapq.heappush(heap, (ended_s + one_s, place))
    return time.process_time() - began_s


def million(*, quick: bool) -> Iterator[Row]:
    """Return the CPU time and the memory of a million jobs."""
    number = 40_000 if quick else JOBS
    child = subprocess.run(
        [sys.executable, "-c", f"from simulating import cluster; cluster.main({number})"],
        cwd=Path(__file__).parents[1],
        check=True,
        capture_output=True,
        text=True,
    )
    found = json.loads(child.stdout)
    floor_s = heap_s(number)
    yield Row(
        measure=f"{number:,} jobs, predictions and replay",
        ours=found["cpu_s"],
        limit=floor_s,
        unit="CPU s",
        must=Must("<=", MAX_S),
    )
    yield Row(
        measure=f"{number:,} jobs, peak memory",
        ours=found["memory_mb"],
        unit="MB",
        must=Must("<=", MAX_MB),
    )


def rows(*, quick: bool, seed: int) -> Iterator[Row]:
    """Yield the figures of the Kalos twin beside a plain simulator's."""
    given = repeated(2000 if quick else PEER_JOBS)
    began_s = time.process_time()
    answer(given, policy_of(given))
    ours_s = time.process_time() - began_s
    peer_s, held = plain(given.jobs, NODES * PER)
    if abs(held - float((given.jobs.gpus * given.jobs.run_s).sum())) > 1e-6 * held:
        raise RuntimeError("The plain simulator lost jobs.")
    number = len(given.jobs)
    yield Row(
        measure=f"{number:,} jobs, beside a plain simulator",
        ours=1e6 * ours_s / number,
        peer=1e6 * peer_s / number,
        unit="CPU µs a job",
    )
    found_answer = answer(given, policy_of(given), decoupled=True, seed=seed)
    first = found_answer.variants[0]
    for one in first.types:
        if one.distance is None:
            continue
        yield Row(
            measure=f"Kalos twin, wait, mean [{one.type}]",
            ours=one.simulated.mean_s,
            peer=one.trace.mean_s,
            unit="s",
        )
        yield Row(
            measure=f"Kalos twin, wait, median [{one.type}]",
            ours=one.simulated.median_s,
            peer=one.trace.median_s,
            unit="s",
        )
        yield Row(measure=f"Kalos twin, KS distance [{one.type}]", ours=one.distance.ks, unit="")
        yield Row(
            measure=f"Kalos twin, Wasserstein distance [{one.type}]",
            ours=one.distance.wasserstein_s,
            unit="s",
        )
    for name, of in (
        ("GPU-hours of checkpoints' evaluations", "gpu_hours"),
        ("to a checkpoint's last score, mean", "mean_s"),
        ("to a checkpoint's last score, median", "median_s"),
    ):
        before, after = (getattr(one.evaluations, of) for one in found_answer.variants)
        yield Row(
            measure=f"Kalos twin, {name}; peer: as submitted", ours=after, peer=before, unit=""
        )


def main(number: int) -> None:
    """Print the cost of a replay of so many jobs."""
    print(json.dumps(measured(number)))
