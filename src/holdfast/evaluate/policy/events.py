"""Define the events that the policy receives and the actions that it returns.

All are plain data. The caller sets their times (`now_s`) and chooses their ids, which are small
integers: engines, nodes, models, tasks, samples and requests each count from 0. A *request* is one
unit of an engine's work. A *sample* is the requests of one document, and possibly the metric of the
document.
"""

from dataclasses import dataclass

from holdfast.evaluate.types.engine import Curve

# Events


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """A request to schedule.

    Requests of equal `affinity` have the same input; equal upper 32 bits mean a long common prefix.
    """

    request: int
    prompt_tokens: int
    max_new_tokens: int
    affinity: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSpec:
    """A sample to schedule; `number` is its index in the task, by which its history is found."""

    sample: int
    model: int
    task: int
    number: int
    requests: tuple[RequestSpec, ...]
    has_metric: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """A node joined; it computes up to `metric_slots` metrics at the same time."""

    now_s: float
    node: int
    metric_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLeft:
    """A node is gone.

    Its metrics must run on other nodes. Its engines leave by events of their own.
    """

    now_s: float
    node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """An engine serves a model and is idle, because it is new or has swapped."""

    now_s: float
    engine: int
    node: int
    model: int
    curve: Curve


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLeft:
    """An engine is gone or hangs; its requests must be sent to other engines."""

    now_s: float
    engine: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReady:
    """A model's weights are in a node's memory, so engines on the node can swap to the model."""

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
    """An engine answered a request; it worked on the request for `engine_s` seconds."""

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
    """A request failed on an engine; `retry` is True if it may be tried again."""

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
    """The process that computed a sample's metric died; the metric must be computed again."""

    now_s: float
    sample: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDropped:
    """A model's scores are no longer needed, so its unfinished work is dropped."""

    now_s: float
    model: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed since the last event."""

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
class SendRequests:
    """Send requests to an engine, in this order."""

    engine: int
    requests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Recall:
    """Recall requests from an engine; a `Recalled` follows for requests that it has not begun."""

    engine: int
    requests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Measure:
    """Compute a sample's metric on a node."""

    sample: int
    node: int


@dataclass(frozen=True, slots=True)
class Swap:
    """Swap an idle engine to another model; an `EngineReady` or `EngineLeft` will follow."""

    engine: int
    model: int


Action = SendRequests | Recall | Measure | Swap
