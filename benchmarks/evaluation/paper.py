"""Run the paper's policy (section 6) on the emulated cluster, as faithfully as possible.

* One precursor job per node reads the whole model from the shared storage into the node's memory.
* Datasets have known run times. Large ones are split and small ones batched into one trial, so that
  no trial is expected to exceed a target. The target is the best of several by the policy's own
  prediction.
* Trials with the longest metrics start first, then the longest trials, each on the first free
  engine.
* A trial starts an engine: process, initialisation, weights from the node's memory. Its outputs are
  dumped, the engine becomes free, and a CPU job computes the metrics in one process, for at most
  the half hour of the study. The figure with jobs of `POOL_PROCESSES` is reported as well.

Choices in its favour: run times are known exactly; dumps and starts of CPU jobs cost nothing; the
imports of its harness's process (`SimCluster.process_start_s`) do not count. The engines are the
same `EmulatedEngine`s, a thread each. A job of metrics would only sleep, so its end is computed
instead.
"""

import hashlib
import heapq
import itertools
import threading
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from common.jobs import DoesNotWork
from evaluation.emulated_engine import EmulatedEngine
from evaluation.miniature import METRIC_JOBS, MODEL_BYTES, THIN, Miniature
from evaluation.ours import engine_spec, entries_of
from evaluation.storage import MIB, make_weights, serving
from holdfast.evaluate.types.harness import SampleRequests
from holdfast.evaluate.types.requests import Answer, Request, encode_answer
from holdfast.simulate.workload import SimCluster, SimTask, Workload
from holdfast.testing.harness import synthetic_samples

TARGETS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4)
"""Lengths of a trial, as a share of the work per engine."""
LONGEST_METRIC_S = 1800.0
"""The longest metrics of a dataset in real time: the study reports up to 30 minutes."""
POOL_PROCESSES = 4
"""`n_workers` of HumanEval's own `evaluate_functional_correctness`."""
_READ_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Some datasets or a part of one, on one engine; `parts` are (task, first, past the last)."""

    parts: tuple[tuple[int, int, int], ...]
    engine_s: float
    metric_s: float


@dataclass
class _Cluster:
    """The state that the threads share."""

    mini: Miniature
    trials: list[Trial]
    deadline_s: float
    loaded: list[threading.Event]
    samples: list[list[SampleRequests]]
    answers: dict[tuple[int, int], Answer] = field(default_factory=dict)
    done: list[tuple[float, float]] = field(default_factory=list)
    """The end of each trial's answers, and the time of its metrics."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next_trial(self) -> Trial | None:
        with self.lock:
            return self.trials.pop(0) if self.trials else None

    def in_time(self) -> None:
        if time.monotonic() > self.deadline_s:
            raise DoesNotWork("the paper's policy did not end in time")


@dataclass(frozen=True, kw_only=True)
class PaperRun:
    """The result of a run."""

    makespan_s: float
    pooled_s: float
    """The makespan if each job of metrics had `POOL_PROCESSES` processes and cores."""
    predicted_s: float
    trials: int
    remote_bytes: int
    scores: dict[str, float]


def run_paper(mini: Miniature, folder: Path, *, timeout_s: float) -> PaperRun:
    """Run the first model of the miniature as the paper would.

    Raises:
        DoesNotWork: it did not end in time.
    """
    cluster, workload = mini.cluster, mini.workload
    make_weights(folder / "remote" / "model", round(workload.models[0].size_bytes))
    trials, predicted_s = plan(mini)
    samples = [synthetic_samples(entry) for entry in entries_of(workload)]
    with serving(folder / "remote", cluster.store_bytes_per_s / MIB) as storage:
        began_s = time.monotonic()
        shared = _Cluster(
            mini=mini,
            trials=list(trials),
            deadline_s=began_s + timeout_s,
            loaded=[threading.Event() for _ in range(cluster.nodes)],
            samples=samples,
        )
        with ThreadPoolExecutor(cluster.nodes + cluster.engines) as threads:
            url = f"{storage.url}/model/model.safetensors"
            running = [threads.submit(_load, shared, node, url) for node in range(cluster.nodes)]
            running += [threads.submit(_work, shared, engine) for engine in range(cluster.engines)]
            for one in running:
                one.result()
        done = sorted((done_s - began_s, metric_s) for done_s, metric_s in shared.done)
        makespan_s = _with_metrics(done, METRIC_JOBS * cluster.nodes)
        jobs = METRIC_JOBS * cluster.nodes // POOL_PROCESSES
        pooled_s = _with_metrics(
            [(done_s, metric_s / POOL_PROCESSES) for done_s, metric_s in done], jobs
        )
        remote_bytes = storage.sent_bytes()
    return PaperRun(
        makespan_s=makespan_s,
        pooled_s=pooled_s,
        predicted_s=predicted_s,
        trials=len(trials),
        remote_bytes=remote_bytes,
        scores=_scores(workload, shared.answers),
    )


# Planning


def plan(mini: Miniature) -> tuple[list[Trial], float]:
    """Return the ordered trials with the best target, and their predicted makespan."""
    workload, cluster = mini.workload, mini.cluster
    total_s = (
        sum(_engine_s(task, range(len(task)), cluster) for task in workload.tasks) / cluster.engines
    )
    plans = [_ordered(_trials(mini, target * total_s)) for target in TARGETS]
    return min(
        ((trials, _predicted_s(trials, cluster)) for trials in plans), key=lambda found: found[1]
    )


def _trials(mini: Miniature, target_s: float) -> list[Trial]:
    workload, cluster = mini.workload, mini.cluster
    trials: list[Trial] = []
    small: list[Trial] = []
    for number, task in enumerate(workload.tasks):
        engine_s = _engine_s(task, range(len(task)), cluster)
        pieces = min(len(task), max(1, -int(-engine_s // target_s)))
        cuts = [len(task) * piece // pieces for piece in range(pieces + 1)]
        for first, last in itertools.pairwise(cuts):
            trial = Trial(
                parts=((number, first, last),),
                engine_s=_engine_s(task, range(first, last), cluster),
                metric_s=_metric_s(task, first, last, mini.pace),
            )
            (small if pieces == 1 and not task.has_metric else trials).append(trial)
    # First fit, decreasing.
    bins: list[list[Trial]] = []
    for trial in sorted(small, key=lambda one: -one.engine_s):
        room = next(
            (b for b in bins if sum(one.engine_s for one in b) + trial.engine_s <= target_s), None
        )
        if room is None:
            bins.append([trial])
        else:
            room.append(trial)
    return trials + [
        Trial(
            parts=tuple(p for one in b for p in one.parts),
            engine_s=sum(one.engine_s for one in b),
            metric_s=0.0,
        )
        for b in bins
    ]


def _metric_s(task: SimTask, first: int, last: int, pace: float) -> float:
    """Return the time of one process for a part's metrics; each sample stands for `THIN`."""
    whole_s = THIN * sum(task.metric_s)
    least = min(1.0, LONGEST_METRIC_S * pace / whole_s) if whole_s else 0.0
    return least * THIN * sum(task.metric_s[first:last])


def _ordered(trials: list[Trial]) -> list[Trial]:
    return sorted(trials, key=lambda trial: (-trial.metric_s, -trial.engine_s))


def _engine_s(task: SimTask, places: range, cluster: SimCluster) -> float:
    """Return an engine's time for samples: the work, or the longest sample in a full batch."""
    curve = cluster.curve
    full_step_s = curve.step_base_s + curve.max_batch * curve.step_sequence_s
    work_s = sum(
        curve.saturated_s(task.prompt_tokens[place], task.new_tokens[place]) for place in places
    )
    batch = min(curve.max_batch, len(places))
    step_s = (
        full_step_s
        if batch == curve.max_batch
        else curve.step_base_s + batch * curve.step_sequence_s
    )
    return max(work_s, max((task.new_tokens[place] for place in places), default=0) * step_s)


def _predicted_s(trials: Sequence[Trial], cluster: SimCluster) -> float:
    load_s = max(
        MODEL_BYTES * cluster.nodes / cluster.store_bytes_per_s,
        MODEL_BYTES / cluster.node_bytes_per_s,
    )
    engines = [load_s] * cluster.engines
    done: list[tuple[float, float]] = []
    for trial in trials:
        done_s = heapq.heappop(engines) + cluster.engine_start_s + _copy_s(cluster) + trial.engine_s
        heapq.heappush(engines, done_s)
        done.append((done_s, trial.metric_s))
    return _with_metrics(sorted(done), METRIC_JOBS * cluster.nodes)


def _with_metrics(done: Sequence[tuple[float, float]], jobs: int) -> float:
    """Return the end of the last CPU job with `jobs` at a time, or of the last trial if later."""
    free = [0.0] * jobs
    end_s = 0.0
    for done_s, metric_s in done:
        end_s = max(end_s, done_s)
        if metric_s:
            measured_s = max(done_s, heapq.heappop(free)) + metric_s
            heapq.heappush(free, measured_s)
            end_s = max(end_s, measured_s)
    return end_s


def _copy_s(cluster: SimCluster) -> float:
    return MODEL_BYTES / cluster.device_bytes_per_s


# Running


def _load(shared: _Cluster, node: int, url: str) -> None:
    """Run the precursor job: read the whole model at most at the node's own rate."""
    rate = shared.mini.cluster.node_bytes_per_s
    began_s, read_bytes = time.monotonic(), 0
    with urllib.request.urlopen(url, timeout=120) as response:
        while part := response.read(_READ_BYTES):
            shared.in_time()
            read_bytes += len(part)
            time.sleep(max(0.0, began_s + read_bytes / rate - time.monotonic()))
    shared.loaded[node].set()


def _work(shared: _Cluster, number: int) -> None:
    """Run one engine, trial after trial."""
    cluster = shared.mini.cluster
    shared.loaded[number // cluster.engines_per_node].wait(
        max(0.0, shared.deadline_s - time.monotonic())
    )
    while (trial := shared.next_trial()) is not None:
        time.sleep(cluster.engine_start_s + _copy_s(cluster))
        engine = EmulatedEngine(engine_spec(cluster, MODEL_BYTES))
        places = [
            (task, place) for task, first, last in trial.parts for place in range(first, last)
        ]
        requests: list[tuple[int, Request]] = [
            (id_, shared.samples[task][place].requests[0])
            for id_, (task, place) in enumerate(places)
        ]
        engine.submit(requests)
        left = len(requests)
        while left:
            shared.in_time()
            for finished in engine.step():
                assert finished.answer is not None
                shared.answers[places[finished.id]] = finished.answer
                left -= 1
        shared.done.append((time.monotonic(), trial.metric_s))


def _scores(workload: Workload, answers: dict[tuple[int, int], Answer]) -> dict[str, float]:
    """Compute the scores as `SyntheticHarness` does."""
    scores = {}
    for number, task in enumerate(workload.tasks):
        digest = hashlib.blake2b(digest_size=16)
        for place in range(len(task)):
            digest.update(encode_answer(answers[number, place]))
        scores[task.name] = int.from_bytes(digest.digest()[:6], "big") / 2**48
    return scores
