"""What the policy hears (events) and says (actions). Plain data; every time is `now_s`, given by the caller.

Ids are small integers that the caller gives: engines, nodes, models, tasks, samples and requests each count from 0.
A *request* is what an engine is asked; a *sample* is the requests of one document and, maybe, its metric.
"""

from dataclasses import dataclass

from holdfast.evaluate.types.engine import Curve

# Events


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """A request as the policy sees it. Requests of equal `affinity` share their input or a long prefix of it."""

    request: int
    prompt_tokens: int
    max_new_tokens: int
    affinity: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSpec:
    """A sample as the policy sees it: `number` is its place in the task, by which its history is found."""

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
    """A node is gone; its engines are told of separately, its metrics that ran are to be run elsewhere."""

    now_s: float
    node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """An engine serves a model and is idle: newly joined, or after a swap."""

    now_s: float
    engine: int
    node: int
    model: int
    curve: Curve


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLeft:
    """An engine is gone (or hangs); what it held is to be asked again."""

    now_s: float
    engine: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReady:
    """The weights of a model lie in a node's memory: engines there may swap to it."""

    now_s: float
    node: int
    model: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesAdded:
    """Samples to do. `final`: no more will come for this task and model."""

    now_s: float
    samples: tuple[SampleSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """An engine answered a request. `engine_s` is from its start to its end on the engine."""

    now_s: float
    engine: int
    request: int
    new_tokens: int
    engine_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """An engine gave back requests that it had not begun."""

    now_s: float
    engine: int
    requests: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRefused:
    """A request failed on an engine by itself; the caller says whether it may be asked again."""

    now_s: float
    engine: int
    request: int
    retry: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A sample's metric is computed (or has failed for good)."""

    now_s: float
    sample: int
    metric_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricLost:
    """The process that computed a sample's metric died; it is to be computed again."""

    now_s: float
    sample: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDropped:
    """Nobody wants this model's scores any more: forget what is not done of it."""

    now_s: float
    model: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time went by."""

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
    """Give these requests to an engine, in this order."""

    engine: int
    requests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Recall:
    """Ask an engine for requests back; those it has not begun come with `Recalled`."""

    engine: int
    requests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Measure:
    """Compute a sample's metric on a node."""

    sample: int
    node: int


@dataclass(frozen=True, slots=True)
class Swap:
    """Let an idle engine serve another model; `EngineReady` follows, or `EngineLeft`."""

    engine: int
    model: int


Action = Ask | Recall | Measure | Swap
