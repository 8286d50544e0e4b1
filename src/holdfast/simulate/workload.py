"""Define a simulation's input: tasks with their true costs, and the cluster."""

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.evaluate.policy import Curve, TaskHistory

GPU_7B = Curve(
    prefill_tokens_per_s=40_000.0,
    request_s=0.001,
    step_base_s=0.018,
    step_sequence_s=0.0002,
    max_batch=128,
)
"""Rates of an engine of one GPU with a 7B model: a guess, not a measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimTask:
    """One benchmark. The columns are by sample; the policy sees none of the true values.

    Attributes:
        name: the task's name in the history.
        prompt_tokens: the prompt tokens of each request of a sample.
        new_tokens: the tokens that a sample's request truly generates; all 0 for log-probabilities.
        max_new_tokens: the limit that the policy sees.
        metric_s: CPU seconds of each sample's metric; all 0 without a metric.
        choices: requests of a sample; they share a prefix, and more than one only without
            generation.
    """

    name: str
    prompt_tokens: Sequence[int]
    new_tokens: Sequence[int]
    max_new_tokens: int
    metric_s: Sequence[float]
    choices: int = 1

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    @property
    def has_metric(self) -> bool:
        """Return True if samples have a metric of their own."""
        return any(self.metric_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimModel:
    """A checkpoint to evaluate, available from `release_s` on."""

    release_s: float = 0.0
    size_bytes: float = 15e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Tasks, each to be done for every model."""

    tasks: tuple[SimTask, ...]
    models: tuple[SimModel, ...] = (SimModel(),)

    def history(self, noise: float, seed: int) -> list[TaskHistory]:
        """Return a past evaluation: the true values times log-normal noise of sigma `noise`."""
        rng = random.Random(seed)
        return [
            TaskHistory(
                task=task.name,
                numbers=array("i", range(len(task))).tobytes(),
                new_tokens=_noisy(task.new_tokens, noise, rng).tobytes(),
                metric_s=_noisy(task.metric_s, noise, rng).tobytes(),
            )
            for task in self.tasks
        ]


def _noisy(values: Sequence[float], noise: float, rng: random.Random) -> "array[float]":
    return array("f", (value * rng.lognormvariate(0.0, noise) for value in values))


@dataclass(frozen=True, slots=True, kw_only=True)
class SimCluster:
    """Nodes, engines and wires: the constants of a simulation besides the workload's.

    Attributes:
        nodes, engines_per_node, metric_slots: the numbers of each; slots are per node.
        curve: the true cost of engines, which the engines also report.
        slowness: the factor by which an engine's true times exceed its curve, by engine number.
        store_bytes_per_s: the rate of the remote storage, for all readers together.
        node_bytes_per_s: the rate of one node's storage NIC.
        fabric_bytes_per_s: the rate between peers, each way per node.
        device_bytes_per_s: the rate from a node's memory into an engine.
        node_start_s: seconds until a node's agent is up.
        engine_start_s: seconds to start an engine's process, before it needs weights.
        swap_s: seconds beyond the copy to swap the weights of a running engine.
        process_start_s: seconds of imports of one harness process, which only the peers' policies
            start for each trial.
        prepare_s: seconds from the start until the harness has built the requests.
        latency_s: the seconds of a message, one way.
        flush_s: the least seconds between two batches of answers of an engine.
        coordinator_s: the coordinator's time per message.
        metric_start_s: the overhead of each metric.
        judge_per_s: metrics per second that a judge's quota admits; 0 for no limit.
        prefetch: True to read the next model's weights while one is evaluated.
    """

    nodes: int = 1
    engines_per_node: int = 8
    metric_slots: int = 16
    curve: Curve = GPU_7B
    slowness: dict[int, float] = field(default_factory=dict)
    store_bytes_per_s: float = 6.0e9
    node_bytes_per_s: float = 3.125e9
    fabric_bytes_per_s: float = 20.0e9
    device_bytes_per_s: float = 20.0e9
    node_start_s: float = 0.0
    engine_start_s: float = 20.0
    swap_s: float = 0.3
    process_start_s: float = 14.0
    prepare_s: float = 0.0
    latency_s: float = 0.001
    flush_s: float = 0.02
    coordinator_s: float = 0.0
    metric_start_s: float = 0.0
    judge_per_s: float = 0.0
    prefetch: bool = True

    @property
    def engines(self) -> int:
        """The number of engines on all nodes."""
        return self.nodes * self.engines_per_node

    def fetch_s(self, size_bytes: float) -> float:
        """Return the seconds to bring a model into every node's memory.

        Each node reads 1/N from storage and the rest from its peers at the same time. Chunks pass
        through, so the slowest of the three ways sets the time.
        """
        return max(
            size_bytes / self.store_bytes_per_s,
            size_bytes / self.nodes / self.node_bytes_per_s,
            size_bytes * (self.nodes - 1) / self.nodes / self.fabric_bytes_per_s,
        )
