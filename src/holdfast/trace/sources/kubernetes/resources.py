"""What a pod asks for, of the Kubernetes API: quantities, GPUs, and the rule for init containers."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from holdfast.trace.sources.mig import mig_share

WHOLE_GPUS: Final = frozenset(
    {"nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/i915", "gpu.intel.com/xe", "habana.ai/gaudi"}
)
"""Extended resources of which one is one GPU."""
MIG_PREFIX: Final = "nvidia.com/mig-"
"""Of MIG's mixed strategy; under the single strategy a slice is called nvidia.com/gpu and cannot be told from one."""
MODEL_LABELS: Final = (
    "nvidia.com/gpu.product",
    "amd.com/gpu.product-name",
    "cloud.google.com/gke-accelerator",
)
"""Labels of nodes that name the GPU, as a pod's nodeSelector asks for them."""

_QUANTITY = re.compile(r"([+-]?\d*\.?\d+)(?:([eE][+-]?\d+)|([numkMGTPE]|[KMGTPE]i))?$")
_SUFFIXES: Final = {
    "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    **{f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTPE", start=1)},
}  # fmt: skip


def quantity(value: object) -> float:
    """A quantity as a number: `500m` is 0.5, `64Gi` 2**36 (Kubernetes API, resource.Quantity).

    Raises:
        ValueError: it is none.
    """
    match = _QUANTITY.match(str(value).strip())
    if match is None:
        raise ValueError(f"expected a quantity such as 500m or 64Gi where there is {value!r}")
    number = float(match[1] + (match[2] or ""))
    return number * _SUFFIXES[match[3]] if match[3] else number


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a pod, or a few of them, ask for."""

    gpu_num: float = 0.0
    cpu_num: float = 0.0
    mem_gb: float = 0.0
    """In units of 2**30 bytes."""
    has_shares: bool = False
    """Asks for time-sliced GPUs; how many make one, no record says, so they count as none."""

    def __add__(self, other: "Request") -> "Request":
        return Request(
            gpu_num=self.gpu_num + other.gpu_num,
            cpu_num=self.cpu_num + other.cpu_num,
            mem_gb=self.mem_gb + other.mem_gb,
            has_shares=self.has_shares or other.has_shares,
        )

    def __or__(self, other: "Request") -> "Request":
        """What is enough for either: the larger of each."""
        return Request(
            gpu_num=max(self.gpu_num, other.gpu_num),
            cpu_num=max(self.cpu_num, other.cpu_num),
            mem_gb=max(self.mem_gb, other.mem_gb),
            has_shares=self.has_shares or other.has_shares,
        )

    def times(self, count: int) -> "Request":
        """What so many of it ask for."""
        return Request(
            gpu_num=self.gpu_num * count,
            cpu_num=self.cpu_num * count,
            mem_gb=self.mem_gb * count,
            has_shares=self.has_shares,
        )


def of_resources(resources: Mapping[str, Any]) -> Request:
    """The request of a list of resources, name to quantity.

    A MIG slice counts as its share of a GPU (`mig.mig_share`).
    """
    gpu_num, shared = 0.0, False
    for name, value in resources.items():
        if name in WHOLE_GPUS:
            gpu_num += quantity(value)
        elif name.endswith(".shared") and name.startswith("nvidia.com/"):
            shared = shared or quantity(value) > 0
        elif name.startswith(MIG_PREFIX):
            gpu_num += quantity(value) * mig_share(name)
    return Request(
        gpu_num=gpu_num,
        cpu_num=quantity(resources.get("cpu", 0)),
        mem_gb=quantity(resources.get("memory", 0)) / 2**30,
        has_shares=shared,
    )


def of_pod(spec: Mapping[str, Any]) -> Request:
    """What the scheduler sets aside for a pod.

    The containers and the sidecars together, or, where that is more, an init container with the sidecars before it
    (Kubernetes documentation, Sidecar Containers, "Resource sharing within containers"); and the pod's overhead.
    """
    sidecars, largest = Request(), Request()
    for container in _containers(spec, "initContainers"):
        request = _of_container(container)
        if container.get("restartPolicy") == "Always":
            sidecars += request
            largest |= sidecars
        else:
            largest |= sidecars + request
    together = sidecars
    for container in _containers(spec, "containers"):
        together += _of_container(container)
    return (together | largest) + of_resources(spec.get("overhead") or {})


def gpu_model_of(spec: Mapping[str, Any]) -> str | None:
    """The GPU that a pod's node selector names; None where it takes any."""
    selector = spec.get("nodeSelector") or {}
    return next((str(selector[label]) for label in MODEL_LABELS if label in selector), None)


def _containers(spec: Mapping[str, Any], name: str) -> Iterable[Mapping[str, Any]]:
    return spec.get(name) or ()


def _of_container(container: Mapping[str, Any]) -> Request:
    # A request that is not there is its limit: so the API itself defaults it.
    resources = container.get("resources") or {}
    return of_resources({**(resources.get("limits") or {}), **(resources.get("requests") or {})})
