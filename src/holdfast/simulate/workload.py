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
"""The rates of an engine with a 7B model on one GPU: a guess, not a measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimTask:
    """One benchmark. Each list has one entry per sample; the policy does not see the true values.

    Attributes:
        name: the task's name in the history.
        prompt_tokens: the prompt tokens of each request of a sample.
        new_tokens: the number of tokens that a request of the sample really generates; all 0 if the
            benchmark compares log-probabilities.
        max_new_tokens: the limit on generated tokens per request, which the policy sees.
        metric_s: CPU seconds of each sample's metric; all 0 without a metric.
        choices: the number of requests per sample, which share a prefix. More than one is allowed
            only if no tokens are generated.
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
        """True if computing the metric of a sample takes CPU time."""
        return any(self.metric_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimModel:
    """A checkpoint to evaluate, available from `release_s` on."""

    release_s: float = 0.0
    size_bytes: float = 15e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Tasks and models; each task is evaluated for every model."""

    tasks: tuple[SimTask, ...]
    models: tuple[SimModel, ...] = (SimModel(),)

    def history(self, noise: float, seed: int) -> list[TaskHistory]:
        """Return a fake history: the true costs times log-normal noise with the sigma `noise`."""
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
    """The nodes, engines and networks of a simulated cluster.

    Attributes:
        nodes, engines_per_node, metric_slots: the number of nodes, of engines per node, and of CPU
            slots for metrics per node.
        curve: the true times of an engine, which engines also report to the policy.
        slowness: for each slow engine, by its number, the factor by which its times exceed `curve`.
        store_bytes_per_s: the rate of the remote storage, shared by all readers.
        node_bytes_per_s: the rate of the network card through which one node reads storage.
        fabric_bytes_per_s: the rate between nodes, per node and direction.
        device_bytes_per_s: the rate of copies from a node's memory into the device of an engine.
        node_start_s: seconds until the agent of a node has started.
        engine_start_s: seconds to start an engine's process, before it needs weights.
        swap_s: seconds to swap the weights of a running engine, in addition to the copy.
        process_start_s: seconds that one harness process needs for its imports. Only the policies
            of other systems start such a process for each trial.
        prepare_s: seconds from the start until the harness has built the requests.
        latency_s: the seconds that a message takes in one direction.
        flush_s: the minimum of seconds between two batches of answers that an engine sends.
        coordinator_s: the seconds that the coordinator spends on a message.
        metric_start_s: the seconds of overhead for each metric.
        judge_per_s: the metrics per second that the quota of a judge model allows; 0 for no limit.
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
        """Return the seconds to load a model of `size_bytes` into the memory of every node.

        Each of N nodes reads 1/N of the model from storage and, at the same time, receives the rest
        from the other nodes in chunks. So the slowest of the three rates (storage, node, fabric)
        sets the time.
        """
        return max(
            size_bytes / self.store_bytes_per_s,
            size_bytes / self.nodes / self.node_bytes_per_s,
            size_bytes * (self.nodes - 1) / self.nodes / self.fabric_bytes_per_s,
        )
