"""The emulated cluster and suite: the simulator's `paper_like`, small enough for two cores.

Three reductions, the same for all policies, keep the proportions of 128 GPUs and 93,000 samples:

* An engine spans two GPUs, so that a node has 4 engines.
* Every sixteenth sample of each dataset is taken. An engine's batch, its reading speed and the time
  that one more sequence adds to a step are reduced by the same factor. So a step of a full batch, a
  dataset on an engine and the longest answer last as long as before. A multiple-choice sample has
  one request with the tokens of all its choices. One slot for metrics stands for sixteen: a sample,
  which stands for sixteen, holds it for one metric's time. A process that computes the metrics of a
  dataset one by one, as in the paper's policy, takes sixteen times the sum; a node runs
  `METRIC_JOBS` such processes at a time.
* A second lasts `PACE` seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from evaluation.suites import paper_like
from holdfast.evaluate.types.engine import Curve
from holdfast.simulate.workload import SimCluster, SimModel, SimTask, Workload

THIN = 16
PACE = 1 / 10
ENGINES_PER_NODE = 4
METRIC_JOBS = 16
METRIC_SLOTS = METRIC_JOBS // THIN
MODEL_BYTES = 24 * 1024 * 1024
"""The size of a checkpoint; rates are reduced with it."""
LATENCY_S, FLUSH_S = 0.002, 0.02
"""Not shortened: these are the times of the real coordinator and engine worker."""


@dataclass(frozen=True, kw_only=True)
class Miniature:
    """An emulated workload and cluster, also simulated for a prediction.

    Times are emulated ones.
    """

    workload: Workload
    cluster: SimCluster
    pace: float
    """The seconds that a real second lasts."""

    def on(self, nodes: int) -> "Miniature":
        """Return the same on another number of nodes."""
        return replace(self, cluster=replace(self.cluster, nodes=nodes))

    def of(self, models: int) -> "Miniature":
        """Return the same for a stream of models."""
        return replace(
            self,
            workload=replace(self.workload, models=(SimModel(size_bytes=MODEL_BYTES),) * models),
        )


def miniature(
    *, seed: int = 0, thin: int = THIN, pace: float = PACE, tasks: int | None = None
) -> Miniature:
    """Return the suite of a seed; `tasks` takes some of its datasets, of every kind."""
    whole = paper_like(seed)
    every = 1 if tasks is None else max(1, len(whole.tasks) // tasks)
    chosen = [_thinned(task, thin, pace) for task in whole.tasks[::every]]
    workload = Workload(tasks=tuple(chosen), models=(SimModel(size_bytes=MODEL_BYTES),))
    full = SimCluster()
    shrunk = MODEL_BYTES / whole.models[0].size_bytes / pace
    cluster = SimCluster(
        nodes=1,
        engines_per_node=ENGINES_PER_NODE,
        metric_slots=METRIC_SLOTS,
        curve=Curve(
            prefill_tokens_per_s=full.curve.prefill_tokens_per_s / thin / pace,
            request_s=full.curve.request_s * thin * pace,
            step_base_s=full.curve.step_base_s * pace,
            step_sequence_s=full.curve.step_sequence_s * thin * pace,
            max_batch=max(1, full.curve.max_batch // thin),
        ),
        store_bytes_per_s=full.store_bytes_per_s * shrunk,
        node_bytes_per_s=full.node_bytes_per_s * shrunk,
        fabric_bytes_per_s=full.fabric_bytes_per_s * shrunk,
        device_bytes_per_s=full.device_bytes_per_s * shrunk,
        engine_start_s=full.engine_start_s * pace,
        swap_s=full.swap_s * pace,
        process_start_s=full.process_start_s * pace,
        latency_s=LATENCY_S,
        flush_s=FLUSH_S,
    )
    return Miniature(workload=workload, cluster=cluster, pace=pace)


def _thinned(task: SimTask, thin: int, pace: float) -> SimTask:
    places = _spread(len(task), thin)
    return replace(
        task,
        prompt_tokens=[task.prompt_tokens[place] * task.choices for place in places],
        new_tokens=[task.new_tokens[place] for place in places],
        metric_s=[task.metric_s[place] * pace for place in places],
        choices=1,
    )


def _spread(size: int, thin: int) -> Sequence[int]:
    count = max(1, round(size / thin))
    return [int((number + 0.5) * size / count) for number in range(count)]
