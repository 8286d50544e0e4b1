"""Read NVIDIA GPUs through NVML, with the package `nvidia-ml-py`.

On GPUs with GPM, NVML also reads the SM counters, and needs neither root nor DCGM nor CUDA for
this. GPM computes a counter from two samples, which must be at least 100 ms apart. The sampler's
interval is longer.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

from holdfast.profile.metrics import GPM, NVML
from holdfast.profile.recording import SeriesId
from holdfast.profile.sources.source import CannotRead, plausible

MIB: Final = 1024 * 1024
MIN_SPACING_NS: Final = 100_000_000
GPM_METRICS: Final = {
    2: ("gpu_sm_active", 1.0),
    3: ("gpu_sm_occupancy", 1.0),
    5: ("gpu_tensor_active", 1.0),
    10: ("gpu_dram_active", 1.0),
    20: ("gpu_pcie_tx", MIB),
    21: ("gpu_pcie_rx", MIB),
    60: ("gpu_nvlink_rx", MIB),
    61: ("gpu_nvlink_tx", MIB),
}
"""For each GPM metric id: the metric's name, and the factor that converts NVML's %, MiB/s."""


def import_nvml() -> Any:
    """Return the module `pynvml`.

    Raises:
        CannotRead: the module is missing.
    """
    try:
        import pynvml
    except ImportError:
        raise CannotRead("nvidia-ml-py is not installed: pip install 'holdfast[gpu]'") from None
    return pynvml


class Nvidia:
    """The NVIDIA GPUs of this node, as NVML reports them."""

    def __init__(self, nvml: Any, *, with_gpm: bool, interval_s: float = 1.0) -> None:
        """Find the NVIDIA GPUs of this node.

        Args:
            nvml: the module `pynvml`, or `holdfast.testing.nvml.FakeNvml`.
            with_gpm: True to read the SM counters too; the source is then named `gpm`, otherwise
                `nvml`.
            interval_s: seconds between two reads.

        Raises:
            CannotRead: NVML finds no GPU, or `with_gpm` is True and no GPU supports GPM.
        """
        self.name = GPM if with_gpm else NVML
        self._nvml = nvml
        self._interval_s = interval_s
        self._samples: dict[int, tuple[int, Any, Any]] = {}
        """For each GPU with GPM: the time of the last sample, that sample, and a spare sample."""
        try:
            nvml.nvmlInit()
            self._handles = [
                nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
            ]
        except nvml.NVMLError as error:
            raise CannotRead(f"NVML: {error}") from error
        if not self._handles:
            raise CannotRead("NVML shows no GPU")
        if with_gpm:
            self._begin_gpm()

    def read(self, now_ns: int) -> dict[SeriesId, float]:
        """See `Source.read`."""
        found = [
            (SeriesId(metric, source, device=device, interval_s=self._interval_s), value)
            for device, handle in enumerate(self._handles)
            for metric, source, value in self._of(device, handle, now_ns)
        ]
        if not found:
            raise CannotRead("NVML gives no value of any GPU")
        return plausible(found)

    def close(self) -> None:
        """See `Source.close`."""
        with contextlib.suppress(self._nvml.NVMLError):
            for _, last, free in self._samples.values():
                self._nvml.nvmlGpmSampleFree(last)
                self._nvml.nvmlGpmSampleFree(free)
            self._nvml.nvmlShutdown()
        self._samples.clear()

    def _begin_gpm(self) -> None:
        nvml = self._nvml
        why = "no GPU here supports GPM (Hopper and newer do)"
        for device, handle in enumerate(self._handles):
            try:
                if nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                    last, free = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
                    nvml.nvmlGpmSampleGet(handle, last)
                    self._samples[device] = 0, last, free
            except nvml.NVMLError as error:
                why = f"GPM: {error}"
        if not self._samples:
            raise CannotRead(why)

    def _of(self, device: int, handle: Any, now_ns: int) -> Iterator[tuple[str, str, float | None]]:
        if device in self._samples:
            for metric, value in self._counters(device, handle, now_ns):
                yield metric, GPM, value
        nvml = self._nvml
        calls: tuple[tuple[str, Callable[[], float]], ...] = (
            ("gpu_utilization", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            ("gpu_memory_used", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used),
            ("gpu_memory_total", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total),
            ("gpu_power", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            ("gpu_energy", lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000),
            (
                "gpu_temperature",
                lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            ),
            ("gpu_sm_clock", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        )
        for metric, call in calls:
            with contextlib.suppress(nvml.NVMLError):  # not every device has every value
                yield metric, NVML, call()

    def _counters(
        self, device: int, handle: Any, now_ns: int
    ) -> Iterator[tuple[str, float | None]]:
        nvml = self._nvml
        at_ns, last, free = self._samples[device]
        if now_ns - at_ns < MIN_SPACING_NS:
            return
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlGpmSampleGet(handle, free)
            self._samples[device] = now_ns, free, last
            if at_ns == 0:  # the first sample was taken by `_begin_gpm`, at another moment
                return
            wanted = nvml.c_nvmlGpmMetricsGet_t()
            wanted.version = nvml.NVML_GPM_METRICS_GET_VERSION
            wanted.numMetrics = len(GPM_METRICS)
            wanted.sample1, wanted.sample2 = last, free
            for place, number in enumerate(GPM_METRICS):
                wanted.metrics[place].metricId = number
            nvml.nvmlGpmMetricsGet(wanted)
            for place, (metric, factor) in enumerate(GPM_METRICS.values()):
                one = wanted.metrics[place]
                yield metric, one.value * factor if one.nvmlReturn == 0 else None
