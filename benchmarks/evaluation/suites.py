"""Make suites to simulate, from fixed seeds. Written before any tuning; do not change.

`paper_like(seed)`: the 60 datasets on which one checkpoint of a 7B model is evaluated, of the kinds
in the study's suite: 34 of multiple choice (4 log-probabilities a sample), 18 of short generation,
4 of long reasoning, 4 of generated code whose metric runs tests.

- Sizes are log-normal about 900 samples (sigma 1.1, 100 to 14,000), as public suites are.
- Prompts are log-normal about a dataset's own mean (few-shot prompts share most of it).
- Generation lengths are log-normal within a dataset: sigma 0.6 about 40 to 400 tokens for short
  ones, 0.8 about 600 to 1,500 for reasoning; the limits are 256 to 1,024, and 4,096.
- A code sample's tests take log-normally about 2 s (sigma 1.0), from 0.1 to 60 s. A dataset of 164
  such samples is the study's half hour of CPU metrics on a few cores.
- The cluster is the default of `SimCluster` unless stated: nodes of 8 engines.

`random_suite(seed)`, seeds 0 to 199: everything drawn.

| what | how |
|---|---|
| nodes | 1, 2, 4, 8, 16 or 32 |
| engines a node | 1, 2, 4 or 8 |
| slots for metrics a node | 4, 8, 16 or 32 |
| datasets | 5 to 80 |
| samples of a dataset | Pareto, alpha 1.1, from 20, at most 3,000; scaled down to 12,000 in all |
| kind | 45% choice (2 to 5 log-probabilities), 40% short generation, 10% long, 5% code |
| prompt tokens | a dataset's mean log-uniform from 60 to 3,000; a sample log-normal about it, sigma 0.3 |
| new tokens | a dataset's median log-uniform from 8 to 300 or (long) 300 to 3,000; sigma uniform 0.2 to 1.0 |
| limit | the dataset's median x 2, 4 or 8, at least 16; samples are cut at it |
| metric | code, and 15% of short: median log-uniform from 0.05 to 5 s, sigma 0.8, at most 120 s |
| step | base log-uniform from 8 to 40 ms, a sequence 0.1 to 1% of it, batch 16, 32, 64, 128 or 256 |
| prefill | log-uniform from 10,000 to 100,000 tokens/s; a request 0.2 to 2 ms |
| weights | log-uniform from 2 to 140 GB; storage 2 to 20 GB/s, a node 1.5 to 12 GB/s, fabric 5 to 50 GB/s |
| starts | an engine log-uniform from 10 to 60 s, a harness process 8 to 20 s |
"""

import math
import random

from holdfast.evaluate.types.engine import Curve
from holdfast.simulate.workload import SimCluster, SimModel, SimTask, Workload

RANDOM_SUITES = 200
_MAX_SAMPLES = 12_000


def paper_like(seed: int = 0) -> Workload:
    """Return the 60 datasets of the module's docstring."""
    rng = random.Random(f"paper-like {seed}")
    tasks = []
    for number in range(60):
        kind = (
            "choice"
            if number < 34
            else "short"
            if number < 52
            else "long"
            if number < 56
            else "code"
        )
        size = round(min(max(rng.lognormvariate(math.log(900), 1.1), 100), 14_000))
        prompt = {
            "choice": rng.uniform(150, 1_200), "short": rng.uniform(300, 1_800),
            "long": rng.uniform(200, 1_000), "code": rng.uniform(150, 500),
        }[kind]  # fmt: skip
        median, sigma, limit = {
            "choice": (0.0, 0.0, 0),
            "short": (rng.uniform(40, 400), 0.6, rng.choice((256, 512, 1_024))),
            "long": (rng.uniform(600, 1_500), 0.8, 4_096),
            "code": (rng.uniform(100, 300), 0.6, 1_024),
        }[kind]
        metric = (2.0, 1.0, 60.0) if kind == "code" else (0.0, 0.0, 0.0)
        tasks.append(
            _task(
                f"{kind}-{number}",
                rng,
                size=min(size, 1_000) if kind == "code" else size,
                prompt=prompt,
                tokens=(median, sigma, limit),
                metric=metric,
                choices=4 if kind == "choice" else 1,
            )
        )
    return Workload(tasks=tuple(tasks))


def random_suite(seed: int) -> tuple[Workload, SimCluster]:
    """Return one of the 200 suites of the module's docstring, with its cluster."""
    rng = random.Random(f"random suite {seed}")
    nodes = rng.choice((1, 2, 4, 8, 16, 32))
    step_base_s = _log_uniform(rng, 0.008, 0.040)
    cluster = SimCluster(
        nodes=nodes,
        engines_per_node=rng.choice((1, 2, 4, 8)),
        metric_slots=rng.choice((4, 8, 16, 32)),
        curve=Curve(
            prefill_tokens_per_s=_log_uniform(rng, 10_000, 100_000),
            request_s=_log_uniform(rng, 0.0002, 0.002),
            step_base_s=step_base_s,
            step_sequence_s=step_base_s * rng.uniform(0.001, 0.01),
            max_batch=rng.choice((16, 32, 64, 128, 256)),
        ),
        store_bytes_per_s=_log_uniform(rng, 2e9, 20e9),
        node_bytes_per_s=_log_uniform(rng, 1.5e9, 12e9),
        fabric_bytes_per_s=_log_uniform(rng, 5e9, 50e9),
        engine_start_s=_log_uniform(rng, 10, 60),
        process_start_s=rng.uniform(8, 20),
    )
    count = rng.randint(5, 80)
    sizes = [min(20 * rng.paretovariate(1.1), 3_000) for _ in range(count)]
    shrink = min(1.0, _MAX_SAMPLES / sum(sizes))
    tasks = []
    for number, size in enumerate(sizes):
        kind = rng.choices(("choice", "short", "long", "code"), (45, 40, 10, 5))[0]
        median = _log_uniform(rng, 300, 3_000) if kind == "long" else _log_uniform(rng, 8, 300)
        sigma = rng.uniform(0.2, 1.0)
        limit = max(16, round(median * rng.choice((2, 4, 8))))
        measured = kind == "code" or (kind == "short" and rng.random() < 0.15)
        metric = (_log_uniform(rng, 0.05, 5.0), 0.8, 120.0)
        tasks.append(
            _task(
                f"{kind}-{number}",
                rng,
                size=max(1, round(size * shrink)),
                prompt=_log_uniform(rng, 60, 3_000),
                tokens=(0.0, 0.0, 0) if kind == "choice" else (median, sigma, limit),
                metric=metric if measured else (0.0, 0.0, 0.0),
                choices=rng.randint(2, 5) if kind == "choice" else 1,
            )
        )
    return Workload(
        tasks=tuple(tasks), models=(SimModel(size_bytes=_log_uniform(rng, 2e9, 140e9)),)
    ), cluster


def _task(
    name: str,
    rng: random.Random,
    *,
    size: int,
    prompt: float,
    tokens: tuple[float, float, int],
    metric: tuple[float, float, float],
    choices: int,
) -> SimTask:
    median, sigma, limit = tokens
    metric_median_s, metric_sigma, metric_most_s = metric
    return SimTask(
        name=name,
        prompt_tokens=[max(8, round(prompt * rng.lognormvariate(0.0, 0.3))) for _ in range(size)],
        new_tokens=[
            min(limit, max(1, round(median * rng.lognormvariate(0.0, sigma)))) if limit else 0
            for _ in range(size)
        ],
        max_new_tokens=limit,
        metric_s=[
            min(metric_most_s, max(0.05, metric_median_s * rng.lognormvariate(0.0, metric_sigma)))
            if metric_median_s
            else 0.0
            for _ in range(size)
        ],
        choices=choices,
    )


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))
