"""Read the kinds of events, and which kind can cause which other kind, from `causes.yaml`."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

import yaml

Where = Literal["same", "other", "any"]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of event. Costs are in nats: about -ln of a probability."""

    name: str
    alone: float
    """The cost of the assumption that an event of the kind begins a failure without a cause."""
    left: float
    """The cost of the assumption that such an event is unrelated to the failure."""
    ends: float
    """The cost of the assumption that such an event directly ends the job."""
    brings: Mapping[str, tuple[Where, float]]
    """The kinds of events that such an event can cause, each with the required relation between the
    ranks of cause and effect, and the cost.
    """


@functools.cache
def kinds() -> Mapping[str, Kind]:
    """Return all kinds by name."""
    text = (resources.files("holdfast.diagnose.rules") / "causes.yaml").read_text("utf-8")
    given: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    brings = given.pop("brings")
    return {
        name: Kind(
            name=name,
            alone=float(costs["alone"]),
            left=float(costs["left"]),
            ends=float(costs["ends"]),
            brings={to: (where, float(cost)) for to, (where, cost) in brings.get(name, {}).items()},
        )
        for name, costs in given.items()
    }
