"""Define the metrics of a recording: name, unit, meaning, and the sources that can measure each.

Each source converts its own units to the units listed here. For example, GPM reports percentages
from 0 to 100 and MiB/s, and DCGM reports ratios from 0 to 1 and bytes/s.
"""

from dataclasses import dataclass
from typing import Final

GPM: Final = "gpm"
"""NVML's GPU performance monitoring (GPM), which exists on Hopper and newer GPUs."""
DCGM: Final = "dcgm"
"""The command `dcgmi dmon`."""
EXPORTER: Final = "dcgm-exporter"
"""The metrics page that a dcgm-exporter serves on this node."""
NVML: Final = "nvml"
AMDSMI: Final = "amdsmi"
HOST: Final = "proc"
"""The kernel's files in /proc and /sys."""
SYNTHETIC: Final = "synthetic"
"""Values that a model computed; nothing was measured."""


@dataclass(frozen=True, slots=True)
class Metric:
    """The definition of one metric.

    Attributes:
        unit: `%` from 0 to 100, `B`, `B/s`, `W`, `J`, `C`, `MHz` or `s`.
        meaning: one sentence that describes the metric.
        sources: the sources that can measure the metric, the best one first.
    """

    unit: str
    meaning: str
    sources: tuple[str, ...]


_COUNTERS: Final = (GPM, DCGM, EXPORTER)
_NVIDIA: Final = (DCGM, EXPORTER, NVML)
_ALL: Final = (*_NVIDIA, AMDSMI)

METRICS: Final[dict[str, Metric]] = {
    "gpu_sm_active": Metric(
        "%", "Share of SM cycles with at least one warp, over all SMs.", _COUNTERS
    ),
    "gpu_sm_occupancy": Metric(
        "%", "Resident warps divided by the most warps that the SMs hold.", _COUNTERS
    ),
    "gpu_tensor_active": Metric(
        "%", "Share of cycles in which a tensor pipe was active.", _COUNTERS
    ),
    "gpu_dram_active": Metric(
        "%", "Share of cycles in which the device memory moved data.", _COUNTERS
    ),
    "gpu_utilization": Metric(
        "%", "Share of time in which some kernel ran, of any size; no measure of work.", _ALL
    ),
    "gpu_memory_used": Metric("B", "Device memory in use by all processes.", _ALL),
    "gpu_memory_total": Metric("B", "Device memory.", (NVML, AMDSMI)),
    "gpu_power": Metric("W", "Power draw of the GPU.", _ALL),
    "gpu_energy": Metric("J", "Energy since the driver was loaded; the value only grows.", _NVIDIA),
    "gpu_temperature": Metric("C", "Temperature of the GPU's core.", _ALL),
    "gpu_sm_clock": Metric("MHz", "Clock of the SMs.", _ALL),
    "gpu_pcie_rx": Metric("B/s", "Bytes received over PCIe.", _COUNTERS),
    "gpu_pcie_tx": Metric("B/s", "Bytes sent over PCIe.", _COUNTERS),
    "gpu_nvlink_rx": Metric("B/s", "Bytes received over all NVLinks.", _COUNTERS),
    "gpu_nvlink_tx": Metric("B/s", "Bytes sent over all NVLinks.", _COUNTERS),
    "cpu_utilization": Metric("%", "Busy share of all CPU threads of the node.", (HOST,)),
    "host_memory_used": Metric("B", "Host memory that is not available to new processes.", (HOST,)),
    "host_memory_total": Metric("B", "Host memory.", (HOST,)),
    "process_memory": Metric("B", "Resident memory of a rank's process.", (HOST,)),
    "process_cpu": Metric("%", "CPU time of a rank's process; 100 is one CPU thread.", (HOST,)),
    "disk_read": Metric("B/s", "Bytes read from all block devices.", (HOST,)),
    "disk_write": Metric("B/s", "Bytes written to all block devices.", (HOST,)),
    "network_rx": Metric("B/s", "Bytes received by all interfaces but loopback.", (HOST,)),
    "network_tx": Metric("B/s", "Bytes sent by all interfaces but loopback.", (HOST,)),
    "infiniband_rx": Metric("B/s", "Bytes received by all InfiniBand ports.", (HOST,)),
    "infiniband_tx": Metric("B/s", "Bytes sent by all InfiniBand ports.", (HOST,)),
    "sampler_cpu": Metric("s", "CPU time that the sampler itself has used.", (HOST,)),
}
"""All metrics, by name."""

TRAINING_PHASES: Final = (
    "data",
    "forward",
    "backward",
    "optimizer",
    "communication",
    "checkpoint_stall",
    "evaluation",
)
"""The phases of a training step. `communication` may lie inside `backward`."""
EVALUATION_PHASES: Final = ("load", "preprocess", "prefill", "decode", "metric")
"""The phases of an evaluation."""
STEP_PHASE: Final = "step"
"""The phase name of a whole step that was found in the log or in the utilisation.

Such a step has no known phases inside.
"""
PHASES: Final = (*TRAINING_PHASES, *EVALUATION_PHASES, STEP_PHASE)
