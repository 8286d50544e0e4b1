"""Who is there: nodes, and on each of them places for engines."""

from dataclasses import dataclass, field

from holdfast.evaluate.wire.messages import NodeReport
from holdfast.evaluate.wire.server import Connection


@dataclass
class Node:
    """A node, as long as its agent is connected."""

    number: int
    name: str
    peer: Connection
    joined_s: float
    report: NodeReport | None = None
    told: dict[int, tuple[list[int], float]] = field(default_factory=dict)
    """Model to the owners and the rate that this node was last told."""
    crowded: dict[int, list[int]] = field(default_factory=dict)
    """Model that did not fit into this node's memory, to the models that lay there."""


@dataclass
class EngineSlot:
    """A place for an engine, kept while its processes come and go.

    `number` is the policy's, new for each time that an engine is ready; None while none is. `asked` maps the keys in
    its hands to requests.
    """

    name: str
    place: int
    node: int
    ordered_s: float
    """When it was told to start, or to take a model."""
    orders: int = 0
    """How often it was told to start since it last dialled."""
    is_spare: bool = False
    """It takes no requests: it loads each model afresh, to say what swaps are held against."""
    has_loaded: bool = False
    """Whether its process has loaded a model, and with it all that the next one will not have to wait for."""
    peer: Connection | None = None
    number: int | None = None
    swapping: int | None = None
    """The number it had before it began to swap, and has again after it."""
    serving: int | None = None
    loading: int | None = None
    meant_for: int | None = None
    """The model that it was started anew for."""
    heard_s: float = 0.0
    failures: int = 0
    asked: dict[bytes, int] = field(default_factory=dict)
    ready_s: float = 0.0
    pid: int = 0
    cut_s: float | None = None
    """When its line was cut."""
    has_said_all: bool = False
    """Whether it has said, after a restart of ours, what it holds."""

    @property
    def index(self) -> int:
        """Its number on its node."""
        return int(self.name.rsplit("/", 1)[1])
