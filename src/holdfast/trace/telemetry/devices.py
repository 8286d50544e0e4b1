"""Names of devices: a node, or a GPU as its node and index."""

import re
from dataclasses import dataclass
from typing import Final

from holdfast.trace.telemetry.metrics import Metric

# AcmeTrace writes 172.31.0.1-3, others 172.31.0.1#3, node:3 or node/gpu3; pods and hosts may hold dashes themselves.
_GPU: Final = re.compile(r"(?P<node>.+)[-#:/_](?:gpu)?(?P<gpu>\d{1,2})", re.IGNORECASE)


@dataclass(frozen=True)
class Device:
    """What a telemetry column or series is of."""

    name: str
    """As the source has it."""
    node: str
    gpu: int | None
    """Index on its node; None: the device is a node."""


def device_named(name: str, metric: Metric) -> Device:
    """The device that a source calls `name`, for a metric of GPUs or of nodes."""
    if metric.kind == "gpu" and (found := _GPU.fullmatch(name)):
        return Device(name, found["node"], int(found["gpu"]))
    return Device(name, name, None)
