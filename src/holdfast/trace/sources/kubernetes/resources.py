"""Sum the resources that a pod requests, including the special rule for init containers."""

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
"""Node labels that name the GPU model, as used in a pod's nodeSelector."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The resources that one or several pods request."""

    gpu_num: float = 0.0
    cpu_num: float = 0.0
    mem_gb: float = 0.0
    """Memory in GiB (2**30 bytes)."""
    uncounted: frozenset[str] = frozenset()
    """Accelerator resources whose size is unknown; they are not counted as GPUs."""

    def __add__(self, other: "Request") -> "Request":
        return Request(
            gpu_num=self.gpu_num + other.gpu_num,
            cpu_num=self.cpu_num + other.cpu_num,
            mem_gb=self.mem_gb + other.mem_gb,
            uncounted=self.uncounted | other.uncounted,
        )

    def __or__(self, other: "Request") -> "Request":
        """Return the larger of both requests for each resource, so that it suffices for either."""
        return Request(
            gpu_num=max(self.gpu_num, other.gpu_num),
            cpu_num=max(self.cpu_num, other.cpu_num),
            mem_gb=max(self.mem_gb, other.mem_gb),
            uncounted=self.uncounted | other.uncounted,
        )

    def times(self, count: int) -> "Request":
        """Multiply the request by `count`."""
        return Request(
            gpu_num=self.gpu_num * count,
            cpu_num=self.cpu_num * count,
            mem_gb=self.mem_gb * count,
            uncounted=self.uncounted,
        )


def of_resources(resources: Mapping[str, Any]) -> Request:
    """Return the request for resources given as a mapping from name to quantity.

    `accelerators` describes which resources count as GPUs.
    """
    gpu_num, uncounted = of_extended(resources)
    return Request(
        gpu_num=gpu_num,
        cpu_num=quantity(resources.get("cpu", 0)),
        mem_gb=quantity(resources.get("memory", 0)) / 2**30,
        uncounted=uncounted,
    )


def of_pod(spec: Mapping[str, Any], annotations: Mapping[str, Any] | None = None) -> Request:
    """Return the resources that the scheduler reserves for a pod.

    Containers and sidecars run together, so their requests are added. An init container runs
    together with the sidecars before it; if that sum is larger, it counts instead (Kubernetes
    documentation, Sidecar Containers, "Resource sharing within containers"). The pod's overhead is
    added. Annotations and dynamic resource claims apply to the whole pod.
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
    # A claim is a separate object with the number and class of its devices.
    claims = {f"resourceClaims/{claim['name']}" for claim in spec.get("resourceClaims") or ()}
    of_whole_pod = Request(gpu_num=gpu_num, uncounted=uncounted | claims)
    return (together | largest) + of_resources(spec.get("overhead") or {}) + of_whole_pod


def gpu_model_of(spec: Mapping[str, Any]) -> str | None:
    """Return the GPU model in a pod's node selector; None if the pod accepts any model."""
    selector = spec.get("nodeSelector") or {}
    return next((str(selector[label]) for label in MODEL_LABELS if label in selector), None)


def _containers(spec: Mapping[str, Any], name: str) -> Iterable[Mapping[str, Any]]:
    return spec.get(name) or ()


def _of_container(container: Mapping[str, Any]) -> Request:
    # The API sets a missing request to the limit.
    resources = container.get("resources") or {}
    return of_resources({**(resources.get("limits") or {}), **(resources.get("requests") or {})})
