"""What can bring about what: the kinds of event and the edges between them, read from `causes.yaml`."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

import yaml

Where = Literal["same", "other", "any"]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of event. Costs are in nats, about -ln of a probability."""

    name: str
    alone: float
    """That it begins a failure by itself."""
    left: float
    """That it was there and had nothing to do with the failure."""
    ends: float
    """That it ends the job without anything between."""
    brings: Mapping[str, tuple[Where, float]]
    """The kinds it can bring about: where, and at what cost."""


@functools.cache
def kinds() -> Mapping[str, Kind]:
    """Every kind by its name."""
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
