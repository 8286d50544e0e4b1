"""Simulate other policies: engines, wires and costs are the same, the rules are theirs.

Each policy gets its best case: true sizes where its rule uses sizes, good parameters, no failures,
no polling, immediate answers.

`paper`
    The study's section 6.2. One precursor job per node loads the weights into the node's memory,
    all nodes at once over the shared storage. An engine starts for each trial, and maps the weights
    over PCIe. Run times of datasets are known: small ones are batched into one trial, big ones
    split. Trials with long CPU metrics come first, then the longest. A trial's outputs are dumped
    at its end; its metrics run on its node's CPU slots while the GPU takes the next trial.
`opencompass-size`
    SizePartitioner: a dataset costs samples x 20 if it generates, else samples x choices. Datasets
    are sorted descending, split into slices and packed next-fit into tasks of `max_task_size`. Each
    task is a process with its own imports, engine start and load from storage. Its datasets run one
    after another, and the batch drains between them. Metrics run only after all tasks, one process
    per dataset. `max_task_size` is the best of five fractions of the total.
`opencompass-workers`
    NumWorkerPartitioner: each dataset is cut into one slice per worker (fewer if it has fewer
    samples, and at most 16), dealt round-robin without sorting to one task per engine. The rest is
    as above.
`olmo`
    olmo-eval: the instances of all tasks are shuffled into one queue, from which every engine pulls
    when it has a place. An engine starts once, with weights from storage; metrics run in process
    pools beside it. There is no order and no prior.
`naive`
    One process per dataset with imports, engine start and load, first come first served. Its
    metrics, in its own process pool, hold the GPU.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush

from holdfast.simulate.engine_model import NEVER_S, VirtualEngine
from holdfast.simulate.workload import SimCluster, Workload

SMALL_TRIAL_STARTS = 1.0
"""The shortest trial of the paper's policy, in starts of a trial, if all engines have work."""
_SIZE_FRACTIONS = (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True, slots=True)
class _Slice:
    """Some samples of one dataset of one model."""

    model: int
    task: int
    places: tuple[int, ...]


_Trial = tuple[_Slice, ...]


def simulate_peer(policy: str, workload: Workload, cluster: SimCluster, *, seed: int = 0) -> float:
    """Return the makespan of another policy, in seconds.

    Raises:
        ValueError: there is no such policy.
    """
    if policy not in PEERS:
        raise ValueError(f"There is no policy {policy!r}; there are {', '.join(PEERS)}.")
    return PEERS[policy](workload, cluster, seed)


def _paper(workload: Workload, cluster: SimCluster, seed: int) -> float:
    del seed
    end_s = 0.0
    for number, model in enumerate(workload.models):
        loaded_s = model.release_s + model.size_bytes / min(
            cluster.store_bytes_per_s / cluster.nodes, cluster.node_bytes_per_s
        )
        start_s = cluster.engine_start_s + model.size_bytes / cluster.device_bytes_per_s
        begin_s = max(cluster.node_start_s + loaded_s, end_s)
        best_s = math.inf
        for starts in (0.5, SMALL_TRIAL_STARTS, 2.0, 4.0):
            trials = _paper_trials(workload, cluster, number, starts * start_s)
            best_s = min(
                best_s,
                _run_trials(workload, cluster, trials, begin_s, start_s, barrier=False, hold=False),
            )
        end_s = best_s
    return end_s


def _paper_trials(
    workload: Workload, cluster: SimCluster, model: int, least_s: float
) -> list[_Trial]:
    """Split datasets longer than an engine's share, and join those too short for a start."""
    costs = [_dataset_s(workload, cluster, task) for task in range(len(workload.tasks))]
    share_s = max(sum(costs) / cluster.engines, least_s)
    pieces: list[tuple[float, float, _Slice]] = []
    for task, cost_s in enumerate(costs):
        count = min(max(1, math.ceil(cost_s / share_s)), len(workload.tasks[task]))
        for part in range(count):
            places = tuple(range(part, len(workload.tasks[task]), count))
            metric_s = (
                sum(workload.tasks[task].metric_s[place] for place in places) / cluster.metric_slots
            )
            pieces.append((metric_s, cost_s / count, _Slice(model, task, places)))
    pieces.sort(
        key=lambda piece: (-piece[0], -piece[1]) if piece[0] > least_s else (0.0, -piece[1])
    )
    trials: list[_Trial] = []
    small: list[_Slice] = []
    small_s = 0.0
    for metric_s, cost_s, piece in pieces:
        if cost_s >= share_s / 2 or metric_s > least_s:
            trials.append((piece,))
            continue
        small.append(piece)
        small_s += cost_s
        if small_s >= share_s:
            trials.append(tuple(small))
            small, small_s = [], 0.0
    if small:
        trials.append(tuple(small))
    return trials


def _dataset_s(workload: Workload, cluster: SimCluster, task: int) -> float:
    one = workload.tasks[task]
    saturated_s = cluster.curve.saturated_s
    return (
        sum(saturated_s(*cost) for cost in zip(one.prompt_tokens, one.new_tokens, strict=True))
        * one.choices
    )


def _opencompass_size(workload: Workload, cluster: SimCluster, seed: int) -> float:
    del seed
    sizes = [len(task) * (20 if task.max_new_tokens else task.choices) for task in workload.tasks]
    best_s = math.inf
    for fraction in _SIZE_FRACTIONS:
        most = max(1, round(sum(sizes) / cluster.engines * fraction))
        best_s = min(best_s, _processes(workload, cluster, partial(_size_trials, workload, most)))
    return best_s


def _size_trials(workload: Workload, most: int, model: int) -> list[_Trial]:
    pieces: list[tuple[int, _Slice]] = []
    for number, task in enumerate(workload.tasks):
        factor = 20 if task.max_new_tokens else task.choices
        step = max(1, most // factor)
        for first in range(0, len(task), step):
            places = tuple(range(first, min(first + step, len(task))))
            pieces.append((len(places) * factor, _Slice(model, number, places)))
    pieces.sort(key=lambda piece: -piece[0])
    trials: list[_Trial] = []
    current: list[_Slice] = []
    size = 0
    for cost, piece in pieces:
        if current and size + cost > most:
            trials.append(tuple(current))
            current, size = [], 0
        current.append(piece)
        size += cost
    return [*trials, tuple(current)]


def _opencompass_workers(workload: Workload, cluster: SimCluster, seed: int) -> float:
    del seed

    def trials(model: int) -> list[_Trial]:
        workers: list[list[_Slice]] = [[] for _ in range(cluster.engines)]
        turn = 0
        for number, task in enumerate(workload.tasks):
            count = min(max(1, len(task) // 16), cluster.engines)
            for part in range(count):
                workers[turn % cluster.engines].append(
                    _Slice(model, number, tuple(range(part, len(task), count)))
                )
                turn += 1
        return [tuple(worker) for worker in workers if worker]

    return _processes(workload, cluster, trials)


def _naive(workload: Workload, cluster: SimCluster, seed: int) -> float:
    del seed

    def trials(model: int) -> list[_Trial]:
        return [
            (_Slice(model, task, tuple(range(len(one)))),)
            for task, one in enumerate(workload.tasks)
        ]

    return _processes(workload, cluster, trials, hold=True)


def _processes(
    workload: Workload,
    cluster: SimCluster,
    trials: Callable[[int], list[_Trial]],
    *,
    hold: bool = False,
) -> float:
    """Run each trial as a process: imports, engine start, and load at the shared storage rate."""
    end_s = 0.0
    for number, model in enumerate(workload.models):
        mine = trials(number)
        together = min(cluster.engines, len(mine))
        rate = min(
            cluster.store_bytes_per_s / together,
            cluster.node_bytes_per_s
            / min(cluster.engines_per_node, math.ceil(together / cluster.nodes)),
        )
        start_s = cluster.process_start_s + cluster.engine_start_s + model.size_bytes / rate
        begin_s = max(end_s, model.release_s) + cluster.node_start_s
        end_s = _run_trials(workload, cluster, mine, begin_s, start_s, barrier=not hold, hold=hold)
    return end_s


def _run_trials(
    workload: Workload,
    cluster: SimCluster,
    trials: Iterable[_Trial],
    begin_s: float,
    start_s: float,
    *,
    barrier: bool,
    hold: bool,
) -> float:
    """Run trials in order on the engines; metrics follow each trial on its node.

    Args:
        workload: the tasks.
        cluster: the simulated cluster.
        trials: the trials.
        begin_s: the time at which the engines may begin.
        start_s: the time that each trial's start takes.
        barrier: metrics run only after the last trial.
        hold: a trial's metrics keep its engine busy.
    """
    engines = [(begin_s, engine) for engine in range(cluster.engines)]
    heapify(engines)
    slots = [[begin_s] * cluster.metric_slots for _ in range(cluster.nodes)]
    late: dict[int, list[float]] = {}
    end_s = begin_s
    for trial in trials:
        free_s, engine = heappop(engines)
        now_s = free_s + start_s
        node = engine // cluster.engines_per_node
        metrics: list[float] = []
        for piece in trial:
            now_s += _slice_s(workload, cluster, piece)
            measured = [workload.tasks[piece.task].metric_s[place] for place in piece.places]
            if any(measured):
                metrics += measured
                late.setdefault(piece.task, []).extend(measured)
        end_s = max(end_s, now_s)
        if not barrier and metrics:
            done_s = _measure(slots[node], now_s, metrics)
            end_s = max(end_s, done_s)
            if hold:
                now_s = done_s
        heappush(engines, (now_s, engine))
    if barrier and late:
        # One process a dataset: it computes its metrics in its own pool, datasets one to a node at
        # a time.
        nodes = [end_s] * cluster.nodes
        for metrics in sorted(late.values(), key=sum, reverse=True):
            from_s = heappop(nodes) + cluster.process_start_s
            heappush(nodes, _measure([from_s] * cluster.metric_slots, from_s, metrics))
        end_s = max(nodes)
    return end_s


def _measure(slots: list[float], now_s: float, metrics: list[float]) -> float:
    """Schedule metrics, longest first, on slots (a heap that is changed); return the last end."""
    end_s = now_s
    for metric_s in sorted(metrics, reverse=True):
        done_s = max(heappop(slots), now_s) + metric_s
        heappush(slots, done_s)
        end_s = max(end_s, done_s)
    return end_s


def _slice_s(workload: Workload, cluster: SimCluster, piece: _Slice) -> float:
    """Return the time of a dataset's slice alone on an engine, longest prompts first."""
    task = workload.tasks[piece.task]
    engine = VirtualEngine(cluster.curve)
    places = sorted(piece.places, key=lambda place: -task.prompt_tokens[place])
    engine.submit(
        0.0,
        [(number, task.prompt_tokens[place], task.new_tokens[place])
         for number, place in enumerate(place for place in places for _ in range(task.choices))],
    )  # fmt: skip
    now_s = 0.0
    while engine.next_s < NEVER_S:
        now_s = engine.next_s
        engine.advance()
    return now_s


def _olmo(workload: Workload, cluster: SimCluster, seed: int) -> float:
    rng = random.Random(seed)
    end_s = 0.0
    for model in workload.models:
        rate = min(
            cluster.store_bytes_per_s / cluster.engines,
            cluster.node_bytes_per_s / cluster.engines_per_node,
        )
        start_s = cluster.process_start_s + cluster.engine_start_s + model.size_bytes / rate
        begin_s = max(end_s, model.release_s) + cluster.node_start_s + start_s
        end_s = _pull(workload, cluster, rng, begin_s)
    return end_s


def _pull(workload: Workload, cluster: SimCluster, rng: random.Random, begin_s: float) -> float:
    """Return the makespan of one shuffled queue with engines that pull, and metrics per node."""
    instances = [
        (task, place)
        for task, one in enumerate(workload.tasks)
        for place in range(len(one))
        for _ in range(one.choices)
    ]
    rng.shuffle(instances)
    queue = deque(range(len(instances)))
    engines = [VirtualEngine(cluster.curve) for _ in range(cluster.engines)]
    events: list[tuple[float, int]] = []
    slots = [[begin_s] * cluster.metric_slots for _ in range(cluster.nodes)]
    end_s = begin_s

    def refill(number: int, now_s: float) -> None:
        engine = engines[number]
        taken: list[tuple[int, int, int]] = []
        while queue and engine.held + len(taken) < cluster.curve.max_batch:
            request = queue.popleft()
            task, place = instances[request]
            one = workload.tasks[task]
            taken.append((request, one.prompt_tokens[place], one.new_tokens[place]))
        if taken:
            engine.submit(now_s, taken)
        if engine.next_s < NEVER_S:
            heappush(events, (engine.next_s, number))

    # Places are taken in turn, so that few instances do not all lie with the first engine.
    share = math.ceil(len(instances) / cluster.engines)
    for number, engine in enumerate(engines):
        first = [queue.popleft() for _ in range(min(share, cluster.curve.max_batch, len(queue)))]
        engine.submit(
            begin_s,
            [(request, workload.tasks[instances[request][0]].prompt_tokens[instances[request][1]],
              workload.tasks[instances[request][0]].new_tokens[instances[request][1]]) for request in first],
        )  # fmt: skip
        if engine.next_s < NEVER_S:
            heappush(events, (engine.next_s, number))
    while events:
        now_s, number = heappop(events)
        if engines[number].next_s != now_s:
            continue
        for request, _ in engines[number].advance():
            task, place = instances[request]
            metric_s = workload.tasks[task].metric_s[place]
            end_s = max(end_s, now_s)
            if metric_s:
                end_s = max(
                    end_s, _measure(slots[number // cluster.engines_per_node], now_s, [metric_s])
                )
        refill(number, now_s)
    return end_s


PEERS: dict[str, Callable[[Workload, SimCluster, int], float]] = {
    "paper": _paper,
    "opencompass-size": _opencompass_size,
    "opencompass-workers": _opencompass_workers,
    "olmo": _olmo,
    "naive": _naive,
}
