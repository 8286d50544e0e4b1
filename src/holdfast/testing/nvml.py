"""Replace the module `pynvml`, with GPUs whose values a test sets.

    nvml = FakeNvml([FakeGpu(sm_active=lambda t_s: 80.0)])
    source = Nvidia(nvml, with_gpm=True)

GPM's counters are means between two samples, as on a real device: each fake counter is integrated
over time.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

NOT_SUPPORTED = 3
"""`NVML_ERROR_NOT_SUPPORTED`."""


@dataclass(kw_only=True)
class FakeGpu:
    """One GPU.

    Attributes:
        has_gpm: False for a device older than Hopper.
        gpm: by the id of each GPM metric, a function from seconds to the value, or a sentinel.
        missing: the names of NVML's calls that this device does not support.
        values: the return values of NVML's other calls, by name.
    """

    has_gpm: bool = True
    gpm: Mapping[int, Callable[[float], float]] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()
    values: dict[str, float] = field(default_factory=dict)


class FakeNvml:
    """The part of `pynvml` that Holdfast calls.

    Attributes:
        now_s: the time of the next GPM sample, in seconds.
        hangs: True makes every later call block until `let_go`.
    """

    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1
    NVML_GPM_METRICS_GET_VERSION = 1

    class NVMLError(Exception):
        """An error of NVML, with its number."""

    def __init__(self, gpus: Sequence[FakeGpu]) -> None:
        self._gpus = list(gpus)
        self.now_s = 0.0
        self.hangs = False
        self._gone_on = threading.Event()
        self.open_samples = 0

    def let_go(self) -> None:
        """Make blocked calls return."""
        self.hangs = False
        self._gone_on.set()

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's name
        """Do nothing."""
        self._answer()

    def nvmlShutdown(self) -> None:  # noqa: N802
        """Do nothing."""

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        """Return the number of GPUs."""
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:  # noqa: N802
        """Return a GPU."""
        return self._gpus[index]

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> Any:  # noqa: N802
        """Return an object with `gpu`, in percent."""
        return SimpleNamespace(gpu=self._value(gpu, "nvmlDeviceGetUtilizationRates"))

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> Any:  # noqa: N802
        """Return an object with `used` and `total`, in bytes."""
        used = self._value(gpu, "nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(used=used, total=gpu.values.get("total", 80 * 2**30))

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> float:  # noqa: N802
        """Return milliwatts."""
        return self._value(gpu, "nvmlDeviceGetPowerUsage")

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: FakeGpu) -> float:  # noqa: N802
        """Return millijoules."""
        return self._value(gpu, "nvmlDeviceGetTotalEnergyConsumption")

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, _sensor: int) -> float:  # noqa: N802
        """Return degrees Celsius."""
        return self._value(gpu, "nvmlDeviceGetTemperature")

    def nvmlDeviceGetClockInfo(self, gpu: FakeGpu, _clock: int) -> float:  # noqa: N802
        """Return MHz."""
        return self._value(gpu, "nvmlDeviceGetClockInfo")

    def nvmlGpmQueryDeviceSupport(self, gpu: FakeGpu) -> Any:  # noqa: N802
        """Return an object with `isSupportedDevice`."""
        return SimpleNamespace(isSupportedDevice=int(gpu.has_gpm))

    def nvmlGpmSampleAlloc(self) -> Any:  # noqa: N802
        """Return an empty sample."""
        self.open_samples += 1
        return SimpleNamespace(at_s=None, gpu=None)

    def nvmlGpmSampleFree(self, _sample: Any) -> None:  # noqa: N802
        """Free a sample."""
        self.open_samples -= 1

    def nvmlGpmSampleGet(self, gpu: FakeGpu, sample: Any) -> Any:  # noqa: N802
        """Fill a sample with the counters of `now_s`."""
        self._answer()
        if not gpu.has_gpm:
            raise self.NVMLError(NOT_SUPPORTED)
        sample.at_s, sample.gpu = self.now_s, gpu
        return sample

    def c_nvmlGpmMetricsGet_t(self) -> Any:  # noqa: N802
        """Return an empty request."""
        metrics = [
            SimpleNamespace(metricId=0, nvmlReturn=-1, value=float("nan")) for _ in range(128)
        ]
        return SimpleNamespace(version=0, numMetrics=0, sample1=None, sample2=None, metrics=metrics)

    def nvmlGpmMetricsGet(self, wanted: Any) -> Any:  # noqa: N802
        """Fill a request with the means between its two samples."""
        began_s, ended_s = wanted.sample1.at_s, wanted.sample2.at_s
        if wanted.version != self.NVML_GPM_METRICS_GET_VERSION or ended_s - began_s < 0.1:
            raise self.NVMLError(2)
        for one in wanted.metrics[: wanted.numMetrics]:
            curve = wanted.sample2.gpu.gpm.get(one.metricId)
            if curve is None:
                one.nvmlReturn = NOT_SUPPORTED
            else:
                one.nvmlReturn, one.value = 0, _mean(curve, began_s, ended_s)
        return wanted

    def _value(self, gpu: FakeGpu, call: str) -> float:
        self._answer()
        if call in gpu.missing:
            raise self.NVMLError(NOT_SUPPORTED)
        return gpu.values.get(call, 0.0)

    def _answer(self) -> None:
        if self.hangs:
            self._gone_on.wait()


def _mean(curve: Callable[[float], float], began_s: float, ended_s: float) -> float:
    points = [began_s + (ended_s - began_s) * (number + 0.5) / 100 for number in range(100)]
    return sum(map(curve, points)) / len(points)
