"""What a pod asks for, of the Kubernetes API: its containers together, and the rule for init containers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from holdfast.trace.sources.kubernetes.accelerators import of_annotations, of_extended
from holdfast.trace.sources.kubernetes.quantity import quantity

MODEL_LABELS: Final = (
    "nvidia.com/gpu.product",
    "amd.com/gpu.product-name",
    "cloud.google.com/gke-accelerator",
)
"""Labels of nodes that name the GPU, as a pod's nodeSelector asks for them."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a pod, or a few of them, ask for."""

    gpu_num: float = 0.0
    cpu_num: float = 0.0
    mem_gb: float = 0.0
    """In units of 2**30 bytes."""
    uncounted: frozenset[str] = frozenset()
    """Resources of accelerators of which nobody says how many make a GPU; they count as none."""

    def __add__(self, other: "Request") -> "Request":
        return Request(
            gpu_num=self.gpu_num + other.gpu_num,
            cpu_num=self.cpu_num + other.cpu_num,
            mem_gb=self.mem_gb + other.mem_gb,
            uncounted=self.uncounted | other.uncounted,
        )

    def __or__(self, other: "Request") -> "Request":
        """What is enough for either: the larger of each."""
        return Request(
            gpu_num=max(self.gpu_num, other.gpu_num),
            cpu_num=max(self.cpu_num, other.cpu_num),
            mem_gb=max(self.mem_gb, other.mem_gb),
            uncounted=self.uncounted | other.uncounted,
        )

    def times(self, count: int) -> "Request":
        """What so many of it ask for."""
        return Request(
            gpu_num=self.gpu_num * count,
            cpu_num=self.cpu_num * count,
            mem_gb=self.mem_gb * count,
            uncounted=self.uncounted,
        )


def of_resources(resources: Mapping[str, Any]) -> Request:
    """Return the request of a list of resources, name to quantity; `accelerators` says what counts as a GPU."""
    gpu_num, uncounted = of_extended(resources)
    return Request(
        gpu_num=gpu_num,
        cpu_num=quantity(resources.get("cpu", 0)),
        mem_gb=quantity(resources.get("memory", 0)) / 2**30,
        uncounted=uncounted,
    )


def of_pod(spec: Mapping[str, Any], annotations: Mapping[str, Any] | None = None) -> Request:
    """What the scheduler sets aside for a pod.

    The containers and the sidecars together, or, where that is more, an init container with the sidecars before it
    (Kubernetes documentation, Sidecar Containers, "Resource sharing within containers"); and the pod's overhead.
    What `annotations` and dynamic resource claims ask for is of the whole pod.
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
    gpu_num, uncounted = of_annotations(annotations or {})
    # A claim is an object of its own, which says how many devices of which class.
    claims = {f"resourceClaims/{claim['name']}" for claim in spec.get("resourceClaims") or ()}
    of_whole_pod = Request(gpu_num=gpu_num, uncounted=uncounted | claims)
    return (together | largest) + of_resources(spec.get("overhead") or {}) + of_whole_pod


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
