"""Define the events that the policy receives and the actions that it returns.

All are plain data, with times in `now_s` from the caller. Ids are small integers from the caller:
engines, nodes, models, tasks, samples and requests each count from 0. A *request* is one unit of an
engine's work; a *sample* is the requests of one document and possibly its metric.
"""

from dataclasses import dataclass

from holdfast.evaluate.types.engine import Curve

# Events


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """A request for the policy; requests of equal `affinity` share their input or a long prefix."""

    request: int
    prompt_tokens: int
    max_new_tokens: int
    affinity: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSpec:
    """A sample for the policy; `number` is its place in the task, the key of its history."""

    sample: int
    model: int
    task: int
    number: int
    requests: tuple[RequestSpec, ...]
    has_metric: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """A node offers CPU slots for metrics."""

    now_s: float
    node: int
    metric_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLeft:
    """A node is gone; its metrics must run elsewhere, and its engines leave by events of their own."""

    now_s: float
    node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """An engine serves a model and is idle, newly connected or after a swap."""

    now_s: float
    engine: int
    node: int
    model: int
    curve: Curve


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLeft:
    """An engine is gone or hangs; its requests must be sent again."""

    now_s: float
    engine: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReady:
    """A model's weights are in a node's memory: engines on the node may swap to the model."""

    now_s: float
    node: int
    model: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesAdded:
    """New samples to process."""

    now_s: float
    samples: tuple[SampleSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """An engine answered a request, which took `engine_s` on the engine."""

    now_s: float
    engine: int
    request: int
    new_tokens: int
    engine_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """An engine returned requests that it had not begun."""

    now_s: float
    engine: int
    requests: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRefused:
    """A request failed on an engine; `retry` allows another attempt."""

    now_s: float
    engine: int
    request: int
    retry: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A sample's metric was computed, or failed for good."""

    now_s: float
    sample: int
    metric_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricLost:
    """A sample's metric must run again, since its process died."""

    now_s: float
    sample: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDropped:
    """A model's scores are no longer needed: drop its unfinished work."""

    now_s: float
    model: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed."""

    now_s: float


Event = (
    NodeJoined
    | NodeLeft
    | EngineReady
    | EngineLeft
    | ModelReady
    | SamplesAdded
    | Answered
    | Recalled
    | RequestRefused
    | Measured
    | MetricLost
    | ModelDropped
    | Tick
)

# Actions


@dataclass(frozen=True, slots=True)
class Ask:
    """Send requests to an engine, in this order."""

    engine: int
    requests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Recall:
    """Take requests back from an engine; those not begun return with `Recalled`."""

    engine: int
    requests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Measure:
    """Compute a sample's metric on a node."""

    sample: int
    node: int


@dataclass(frozen=True, slots=True)
class Swap:
    """Swap an idle engine to another model; `EngineReady` or `EngineLeft` follows."""

    engine: int
    model: int


Action = Ask | Recall | Measure | Swap
