"""Count the accelerators among a pod's extended resources, for all vendors.

One unit of a whole resource counts as one GPU. One unit of a shared resource counts as a part of a
GPU, if its name or a second resource gives the size of the part. Examples are a MIG slice, an AMD
compute partition, and a percentage of the cores. Any other resource that looks like an accelerator
is not counted; its name is returned for the report.

Sources: the documentation of each vendor's device plugin; HAMi, "Device supported"; Volcano, "GPU
virtualization"; Koordinator, "GPU share"; Run:ai, "Run workloads with GPU fractions"; KubeVirt,
"Host devices assignment".
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from holdfast.trace.sources.kubernetes.quantity import quantity
from holdfast.trace.sources.mig import is_slice, mig_share

_WHOLE: Final = re.compile(
    r"(amd|enflame|iluvatar|metax-tech|mthreads|nvidia)\.(com|ai)/(gpu|gcu)"
    r"|volcano\.sh/(gpu|vgpu)-number"
    r"|gpu\.intel\.com/(i915|xe)"
    r"|habana\.ai/gaudi\d*"
    r"|google\.com/tpu"
    r"|aws\.amazon\.com/neuron(device)?"
    r"|huawei\.com/Ascend\d+[A-Z]*\d*"
    r"|cambricon\.com/(v?mlu|mlu\d+)"
    r"|hygon\.com/dcu(num)?"
    r"|(kunlunxin|baidu)\.com/xpu"
    r"|mthreads\.com/vgpu"
    r"|nvidia\.com/G[A-Z]\d+[A-Z]*(_[A-Z0-9]+)*"  # KubeVirt: a GPU passed through, such as GH100_H100_SXM5_80GB
)
_SHARE_OF_EACH: Final = {
    "nvidia.com/gpu": ("nvidia.com/gpucores", "nvidia.com/gpumem-percentage", "nvidia.com/gpumem"),
    "volcano.sh/vgpu-number": (
        "volcano.sh/vgpu-cores", "volcano.sh/vgpu-memory-percentage", "volcano.sh/vgpu-memory",
    ),
    "hygon.com/dcunum": ("hygon.com/dcucores", "", "hygon.com/dcumem"),
    "cambricon.com/vmlu": ("cambricon.com/mlu.smlu.vcore", "", "cambricon.com/mlu.smlu.vmemory"),
    "mthreads.com/vgpu": ("mthreads.com/sgpu-core", "", "mthreads.com/sgpu-memory"),
}  # fmt: skip
"""Whole resources, each with the resources that state which part of a GPU is requested.

The part is stated in per cent of the cores, in per cent of the memory, or as an amount of memory.
"""
_PERCENT: Final = frozenset(
    {
        "aliyun.com/gpu-core.percentage",
        "koordinator.sh/gpu",
        "koordinator.sh/gpu-core",
        "tencent.com/vcuda-core",
    }
)
"""Resources of which one hundred units are one GPU."""
_AMD_PARTITION: Final = re.compile(r"amd\.com/([sdtqc]px)_nps\d")
_DIES_SHARED: Final = {"spx": 1.0, "dpx": 1 / 2, "tpx": 1 / 3, "qpx": 1 / 4, "cpx": 1 / 8}
"""Share of an MI300X, which has eight dies, for each partition mode.

Source: AMD Instinct documentation, Compute Partitioning Modes.
"""
_LIKE_GPUS: Final = re.compile(
    r"^nvidia\.com/|^(requests\.)?[^/]*/.*(gpu|npu|tpu|xpu|dcu|mlu|gcu|qaic|neuron|ascend|gaudi|vcuda|accelerator)"
    r"|^[^/]*(gpu|npu)[^/]*/",
    re.IGNORECASE,
)
_NO_GPUS: Final = re.compile(r"/(.*hostdev.*|.*rdma.*|.*_vf|.*nic.*|priority|.*memory-ratio)$")
"""Resources that look like accelerators but are not: network cards, and sizes of shares."""
_PART: Final = re.compile(r"mem|core")
"""Matches the names of resources that state which part of a GPU is requested."""
_FRACTION, _FRACTION_DEVICES, _FRACTION_MEMORY = (
    "gpu-fraction",
    "gpu-fraction-num-devices",
    "gpu-memory",
)
"""Run:ai's annotations of a pod.

They give a share of a GPU, the number of GPUs, and memory in MiB in place of a share.
"""


def of_extended(resources: Mapping[str, Any]) -> tuple[float, frozenset[str]]:
    """Return the number of GPUs in a list of resources, and the resources that cannot be counted.

    `resources` maps the names of resources to quantities.
    """
    amounts = {
        name: quantity(value)
        for name, value in resources.items()
        if "/" in name and quantity(value) > 0
    }
    gpu_num, uncounted = 0.0, set[str]()
    for name, amount in amounts.items():
        share = _share_of(name, amounts)
        if share is not None:
            gpu_num += amount * share
        elif _LIKE_GPUS.search(name) and not _NO_GPUS.search(name):
            uncounted.add(name)
    if gpu_num:  # Memory and core resources state a share of these GPUs; they are not further GPUs.
        uncounted = {name for name in uncounted if not _PART.search(name)}
    return gpu_num, frozenset(uncounted)


def of_annotations(annotations: Mapping[str, Any]) -> tuple[float, frozenset[str]]:
    """Return the same as `of_extended`, from Run:ai's annotations of a pod."""
    if _FRACTION in annotations:
        devices = quantity(annotations.get(_FRACTION_DEVICES, 1))
        return quantity(annotations[_FRACTION]) * devices, frozenset()
    return 0.0, frozenset({_FRACTION_MEMORY} & annotations.keys())


def _share_of(name: str, amounts: Mapping[str, float]) -> float | None:
    """Return which share of a GPU one unit of a resource is; None if unknown."""
    if name in _SHARE_OF_EACH:
        cores, memory_percent, memory = _SHARE_OF_EACH[name]
        for percent in (cores, memory_percent):
            if percent in amounts:
                return amounts[percent] / 100
        return None if memory in amounts else 1.0
    if _WHOLE.fullmatch(name):
        return 1.0
    if name in _PERCENT:
        # Both names of Koordinator refer to the same GPU, which counts once.
        doubled = name == "koordinator.sh/gpu-core" and "koordinator.sh/gpu" in amounts
        return 0.0 if doubled else 0.01
    if partition := _AMD_PARTITION.fullmatch(name):
        return _DIES_SHARED[partition[1]]
    return mig_share(name) if is_slice(name) else None
