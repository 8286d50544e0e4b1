"""Define the telemetry metrics: names, units, physical ranges, and special values.

Each metric has one name for all sources: AcmeTrace's files, dcgm-exporter, node-exporter, and an
IPMI exporter. Values outside a metric's physical range are dropped and counted. DCGM's values for
"no value" (`DCGM_INT64_BLANK` and similar constants in NVIDIA's `dcgm_structs.h`) are dropped too,
because exporters pass them on as huge numbers.
"""

import math
import re
from dataclasses import dataclass
from typing import Any, Final, Literal


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Define one metric, with one name and unit for all sources."""

    name: str
    title: str
    """Title for an axis, without the unit."""
    unit: str
    low: float
    """Smallest and largest valid value (`low` and `high`, both inclusive), in `unit`."""
    high: float
    decimals: int
    """Number of decimals in the value counts: 3 means steps of 0.001, and -5 steps of 100,000."""
    kind: Literal["gpu", "node"] = "gpu"
    coarse: tuple[float, float] | None = None
    """The largest value in a coarser unit that some sources use, and the factor from that unit."""
    may_be_ratio: bool = False
    """True if some sources write ratios (fractions, none above 1) in place of per cent."""
    blank: float = math.nan
    """Value that an empty cell in a wide table means; NaN if it means that nothing was measured."""
    constant_is_normal: bool = True
    """True if a working device may report the same nonzero value for hours."""
    dcgm: str = ""
    """Name of the metric in dcgm-exporter."""
    promql: str = ""
    """Expression for `query_range` over node-exporter or an IPMI exporter.

    `$window` stands for the window of a rate, and `$matchers` for the user's conditions.
    """
    note: str = ""
    """A remark for people who read charts of the metric."""

    @property
    def resolution(self) -> float:
        """Return the step between two values in the value counts, in `unit`."""
        return 10.0**-self.decimals

    @property
    def label(self) -> str:
        """Return title and unit for an axis."""
        return f"{self.title} ({self.unit})"


_RATIO: Final[dict[str, Any]] = {
    "unit": "%",
    "low": 0.0,
    "high": 100.0,
    "decimals": 3,
    "coarse": (1.0, 100.0),
}
RATIO: Final = 100.0
"""Factor from a ratio to per cent."""
_PERCENT: Final[dict[str, Any]] = {
    "unit": "%", "low": 0.0, "high": 100.0, "decimals": 0, "may_be_ratio": True,
}  # fmt: skip
_MEMORY: Final[dict[str, Any]] = {"unit": "MiB", "low": 0.0, "high": 2.0**20, "decimals": 0}
_PORTS: Final[dict[str, Any]] = {
    "unit": "bytes/s", "low": 0.0, "high": 1e12, "decimals": -5, "kind": "node", "coarse": (1e6, 1e6),
}  # fmt: skip
_SERVER: Final[dict[str, Any]] = {
    "unit": "W", "low": 1.0, "high": 50_000.0, "decimals": 0, "kind": "node", "constant_is_normal": False,
}  # fmt: skip
_BOARD = "A server that draws less than 1 W is a board that did not answer."

METRICS: Final[dict[str, Metric]] = {
    metric.name: metric
    for metric in (
        Metric(
            name="GPU_UTIL", title="GPU utilisation", dcgm="DCGM_FI_DEV_GPU_UTIL", **_PERCENT,
            note="GPU utilisation counts the time in which any kernel was running, on however few "
            "of the GPU's "
            "multiprocessors: 100 % is not a GPU used to the full. SM activity is the share of "
            "busy multiprocessors.",
        ),
        Metric(
            name="SM_ACTIVE", title="SM activity", dcgm="DCGM_FI_PROF_SM_ACTIVE", **_RATIO,
            note=(
                "The share of multiprocessors with at least one warp assigned, averaged over all "
                "of them."
            ),
        ),
        Metric(
            name="SM_OCCUPANCY", title="SM occupancy", dcgm="DCGM_FI_PROF_SM_OCCUPANCY", **_RATIO,
            note="Resident warps as a share of what fits; more is not always faster.",
        ),
        Metric(
            name="PIPE_TENSOR_ACTIVE", title="Tensor-core activity", dcgm="DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", **_RATIO,
            note="The share of cycles in which the tensor cores worked.",
        ),
        Metric(
            name="DRAM_ACTIVE", title="GPU memory bandwidth", dcgm="DCGM_FI_PROF_DRAM_ACTIVE", **_RATIO,
            note="The share of cycles in which the memory interface moved data.",
        ),
        Metric(name="MEM_COPY_UTIL", title="GPU memory utilisation", dcgm="DCGM_FI_DEV_MEM_COPY_UTIL", **_PERCENT,
               note=(
                   "The time in which memory was read or written at all, not the share of its "
                   "bandwidth."
               )),
        Metric(name="FB_USED", title="GPU memory used", dcgm="DCGM_FI_DEV_FB_USED", **_MEMORY,
               note=(
                   "What processes have reserved, caching allocators included, not what they "
                   "touch."
               )),
        Metric(name="FB_FREE", title="GPU memory free", dcgm="DCGM_FI_DEV_FB_FREE", **_MEMORY),
        Metric(name="POWER_USAGE", title="GPU power", unit="W", low=0.0, high=5000.0, decimals=1,
               constant_is_normal=False, dcgm="DCGM_FI_DEV_POWER_USAGE"),
        Metric(name="GPU_TEMP", title="GPU core temperature", unit="°C", low=-40.0, high=150.0, decimals=0,
               dcgm="DCGM_FI_DEV_GPU_TEMP"),
        Metric(name="MEMORY_TEMP", title="GPU memory temperature", unit="°C", low=-40.0, high=150.0, decimals=0,
               dcgm="DCGM_FI_DEV_MEMORY_TEMP", note="GPUs without this sensor report 0."),
        Metric(
            name="XID_ERRORS", title="Xid error", unit="code", low=0.0, high=1023.0, decimals=0, blank=0.0,
            dcgm="DCGM_FI_DEV_XID_ERRORS",
            note="The gauge holds the last code until it is cleared: a fault is a transition into "
            "a code, not a sample "
            "of one. An empty cell of a wide table is no fault.",
        ),
        Metric(name="SM_CLOCK", title="SM clock", unit="MHz", low=0.0, high=10_000.0, decimals=0,
               dcgm="DCGM_FI_DEV_SM_CLOCK"),
        Metric(name="MEM_CLOCK", title="GPU memory clock", unit="MHz", low=0.0, high=50_000.0, decimals=0,
               dcgm="DCGM_FI_DEV_MEM_CLOCK"),
        Metric(
            name="NODE_CPU_UTILIZATION", title="CPU utilisation of a node", kind="node", **_RATIO,
            promql="clamp(100 * (1 - avg by (instance) "
            '(rate(node_cpu_seconds_total{mode="idle",$matchers}[$window]))), 0, 100)',
        ),
        Metric(
            name="NODE_MEMORY_UTILIZATION", title="Memory utilisation of a node", kind="node", **_RATIO,
            promql=(
                "100 * (1 - node_memory_MemAvailable_bytes{$matchers} / "
                "node_memory_MemTotal_bytes{$matchers})"
            ),
        ),
        Metric(
            name="NODE_IB_SEND", title="InfiniBand sent by a node", **_PORTS,
            promql=(
                "sum by (instance) "
                "(rate(node_infiniband_port_data_transmitted_bytes_total{$matchers}[$window]))"
            ),
        ),
        Metric(
            name="NODE_IB_RECEIVE", title="InfiniBand received by a node", **_PORTS,
            promql=(
                "sum by (instance) "
                "(rate(node_infiniband_port_data_received_bytes_total{$matchers}[$window]))"
            ),
        ),
        Metric(
            name="GPU_SERVER_POWER", title="Power of a GPU server", note=_BOARD, **_SERVER,
            promql=(
                "ipmi_dcmi_power_consumption_watts{$matchers} or sum by (instance) "
                "(ipmi_power_watts{$matchers})"
            ),
        ),
        Metric(
            name="CPU_SERVER_POWER", title="Power of a CPU server", note=_BOARD, **_SERVER,
            promql=(
                "ipmi_dcmi_power_consumption_watts{$matchers} or sum by (instance) "
                "(ipmi_power_watts{$matchers})"
            ),
        ),
    )
}  # fmt: skip
"""All metrics, by name."""

_OTHER_NAMES: Final = {
    "CPU_UTILIZATION": "NODE_CPU_UTILIZATION",
    "MEMORY_UTILIZATION": "NODE_MEMORY_UTILIZATION",
    "IB_SEND": "NODE_IB_SEND",
    "IB_RECEIVE": "NODE_IB_RECEIVE",
    "GPU_AB_POWER": "GPU_SERVER_POWER",
    "GPU_C_POWER": "GPU_SERVER_POWER",
    "CPU_D_POWER": "CPU_SERVER_POWER",
}
_DCGM: Final = {metric.dcgm: name for name, metric in METRICS.items() if metric.dcgm}
_DATE_SUFFIX: Final = re.compile(r"[-_.]?\d{4}-\d{2}(-\d{2})?$|[-_]\d+$")

INT32_BLANK: Final = 0x7FFFFFF0
INT64_BLANK: Final = 0x7FFFFFFFFFFFFFF0
FP64_BLANK: Final = 140737488355328.0
"""The number 2 ** 47.

The 16 values from each of the three constants on mean: blank, not found, not supported, not
permissioned, …
"""


def metric_named(name: str) -> tuple[Metric, float | None] | None:
    """Return the metric for a name that a source uses, and the factor from the source's unit.

    The name is the stem of a file name, a column, or the name in an exporter. For example,
    `GPU_UTIL`, `GPU_UTIL-2023-07` (AcmeTrace splits some files by month) and `DCGM_FI_DEV_GPU_UTIL`
    are the same metric.

    The factor is None if the unit can only be inferred from the values. This is the case for ratios
    and per cent (dcgm-exporter writes ratios, and AcmeTrace's script multiplies them by 100), and
    for MB/s and bytes/s (AcmeTrace's InfiniBand has at most 23,695, just under the speed of a 200
    Gb/s port).

    Returns:
        The metric and the factor; None if the name is unknown.
    """
    for word in (name, _DATE_SUFFIX.sub("", name)):
        upper = word.strip().upper()
        if upper in _DCGM:
            metric = METRICS[_DCGM[upper]]
            return metric, metric.coarse[1] if metric.coarse else 1.0
        found = METRICS.get(_OTHER_NAMES.get(upper, upper))
        if found:
            return found, None if found.coarse or found.may_be_ratio else 1.0
    return None


def is_sentinel(value: Any) -> Any:
    """Return True if a value, or each element of an array, is one of DCGM's for "no value".

    These are the 16 values from each `…_BLANK` constant on.
    """
    return (
        ((value >= INT32_BLANK) & (value < INT32_BLANK + 16))
        | ((value >= FP64_BLANK) & (value < FP64_BLANK + 16))
        # A double cannot represent the last digits of an int64, so all 16 values are 2 ** 63.
        | (value >= float(INT64_BLANK))
    )


# AcmeTrace writes 172.31.0.1-3, and others write 172.31.0.1#3, node:3 or node/gpu3. Names of pods
# and hosts may contain dashes.
_GPU: Final = re.compile(r"(?P<node>.+)[-#:/_](?:gpu)?(?P<gpu>\d{1,2})", re.IGNORECASE)


@dataclass(frozen=True)
class Device:
    """The device of a telemetry column or series: a GPU or a node."""

    name: str
    """Name of the device in the source."""
    node: str
    gpu: int | None
    """Index of the GPU on its node; None if the device is a node."""


def device_named(name: str, metric: Metric) -> Device:
    """Parse the name of a device, for a metric of GPUs or of nodes."""
    if metric.kind == "gpu" and (found := _GPU.fullmatch(name)):
        return Device(name, found["node"], int(found["gpu"]))
    return Device(name, name, None)
