"""Replace the module `pynvml` by a fake with GPUs whose values a test sets.

    nvml = FakeNvml([FakeGpu(sm_active=lambda t_s: 80.0)])
    source = Nvidia(nvml, with_gpm=True)

GPM's counters are means between two samples, as on a real device. For this, each fake counter is
integrated over time.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

NOT_SUPPORTED = 3
"""The value of `NVML_ERROR_NOT_SUPPORTED`."""


@dataclass(kw_only=True)
class FakeGpu:
    """One GPU with the values that NVML's calls return for it.

    Attributes:
        has_gpm: False for a device that is older than Hopper.
        gpm: by the id of each GPM metric, a function from the time in seconds to the value, or a
            sentinel that NVML returns instead of a value.
        missing: the names of NVML's calls that this device does not support.
        values: the return values of NVML's other calls, by name.
        bus: the PCI address.
        fields: the values of NVML's fields, by number.
        nvlinks: for each NVLink, True if the link is up.
        is_lost: True makes every call about this device fail, as if it had fallen off the bus.
    """

    has_gpm: bool = True
    gpm: Mapping[int, Callable[[float], float]] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()
    values: dict[str, float] = field(default_factory=dict)
    bus: str = "00000000:19:00.0"
    is_lost: bool = False
    fields: dict[int, int] = field(default_factory=dict)
    nvlinks: list[bool] = field(default_factory=list)


class FakeNvml:
    """The part of `pynvml` that Holdfast calls.

    Attributes:
        now_s: the time of the next GPM sample, in seconds.
        hangs: True makes every later call block until `let_go` is called.
        xids: the Xid events that no caller has received yet, each with its GPU.
    """

    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1
    NVML_GPM_METRICS_GET_VERSION = 1
    NVML_ERROR_UNINITIALIZED = 1
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    NVML_ERROR_TIMEOUT = 10
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_NVLINK_MAX_LINKS = 36
    NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL = 38
    NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL = 45
    NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL = 52
    NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL = 59
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
    NVML_GPU_RECOVERY_ACTION_NONE = 0
    NVML_GPU_RECOVERY_ACTION_GPU_RESET = 1
    nvmlEventTypeXidCriticalError = 8  # noqa: N815 - NVML's name

    class NVMLError(Exception):
        """An error of NVML, with its error number."""

        def __init__(self, value: int) -> None:
            super().__init__(value)
            self.value = value

    def __init__(self, gpus: Sequence[FakeGpu]) -> None:
        self._gpus = list(gpus)
        self.now_s = 0.0
        self.hangs = False
        self._gone_on = threading.Event()
        self.open_samples = 0
        self.xids: list[tuple[FakeGpu, int]] = []

    def let_go(self) -> None:
        """Let all blocked calls return."""
        self.hangs = False
        self._gone_on.set()

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's name
        """Return at once, unless `hangs` makes the call block."""
        self._answer()

    def nvmlShutdown(self) -> None:  # noqa: N802
        """Do nothing, because the fake has nothing to shut down."""

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        """Return the number of GPUs."""
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:  # noqa: N802
        """Return the GPU at an index."""
        return self._gpus[index]

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> Any:  # noqa: N802
        """Return an object with the GPU's utilization as `gpu`, in percent."""
        return SimpleNamespace(gpu=self._value(gpu, "nvmlDeviceGetUtilizationRates"))

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> Any:  # noqa: N802
        """Return an object with the GPU's memory as `used` and `total`, in bytes."""
        used = self._value(gpu, "nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(used=used, total=gpu.values.get("total", 80 * 2**30))

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> float:  # noqa: N802
        """Return the power of the GPU in milliwatts."""
        return self._value(gpu, "nvmlDeviceGetPowerUsage")

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: FakeGpu) -> float:  # noqa: N802
        """Return the energy that the GPU has consumed, in millijoules."""
        return self._value(gpu, "nvmlDeviceGetTotalEnergyConsumption")

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, _sensor: int) -> float:  # noqa: N802
        """Return the temperature of the GPU in degrees Celsius."""
        return self._value(gpu, "nvmlDeviceGetTemperature")

    def nvmlDeviceGetClockInfo(self, gpu: FakeGpu, _clock: int) -> float:  # noqa: N802
        """Return the clock rate of the GPU in MHz."""
        return self._value(gpu, "nvmlDeviceGetClockInfo")

    def nvmlGpmQueryDeviceSupport(self, gpu: FakeGpu) -> Any:  # noqa: N802
        """Return an object whose `isSupportedDevice` shows whether the GPU has GPM counters."""
        return SimpleNamespace(isSupportedDevice=int(gpu.has_gpm))

    def nvmlGpmSampleAlloc(self) -> Any:  # noqa: N802
        """Return an empty sample."""
        self.open_samples += 1
        return SimpleNamespace(at_s=None, gpu=None)

    def nvmlGpmSampleFree(self, _sample: Any) -> None:  # noqa: N802
        """Count that a sample was freed."""
        self.open_samples -= 1

    def nvmlGpmSampleGet(self, gpu: FakeGpu, sample: Any) -> Any:  # noqa: N802
        """Fill a sample with the counters at the time `now_s`."""
        self._answer()
        if not gpu.has_gpm:
            raise self.NVMLError(NOT_SUPPORTED)
        sample.at_s, sample.gpu = self.now_s, gpu
        return sample

    def c_nvmlGpmMetricsGet_t(self) -> Any:  # noqa: N802
        """Return an empty request for GPM metrics."""
        metrics = [
            SimpleNamespace(metricId=0, nvmlReturn=-1, value=float("nan")) for _ in range(128)
        ]
        return SimpleNamespace(version=0, numMetrics=0, sample1=None, sample2=None, metrics=metrics)

    def nvmlGpmMetricsGet(self, wanted: Any) -> Any:  # noqa: N802
        """Fill a request with the means of its metrics between its two samples."""
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

    def nvmlDeviceGetPciInfo(self, gpu: FakeGpu) -> Any:  # noqa: N802
        """Return an object with the GPU's PCI address as `busId`."""
        return SimpleNamespace(busId=gpu.bus)

    def nvmlDeviceGetTotalEccErrors(self, gpu: FakeGpu, error_type: int, counter: int) -> int:  # noqa: N802
        """Return the number of uncorrectable errors since the driver was loaded."""
        if (error_type, counter) != (
            self.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            self.NVML_VOLATILE_ECC,
        ):
            raise self.NVMLError(NOT_SUPPORTED)
        return int(self._value(gpu, "nvmlDeviceGetTotalEccErrors"))

    def nvmlDeviceGetRemappedRows(self, gpu: FakeGpu) -> tuple[int, int, int, int]:  # noqa: N802
        """Return the numbers of rows that were remapped, and flags for the state of remapping.

        Returns:
            The rows remapped because of correctable errors, the rows remapped because of
            uncorrectable errors, 1 if a remapping is pending, and 1 if a remapping has failed.
        """
        self._value(gpu, "nvmlDeviceGetRemappedRows")
        return 0, 0, int(gpu.values.get("pending", 0)), int(gpu.values.get("failure", 0))

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: FakeGpu) -> int:  # noqa: N802
        """Return the reasons why the clocks are low, as a bit mask."""
        return int(self._value(gpu, "nvmlDeviceGetCurrentClocksEventReasons"))

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: FakeGpu) -> int:  # noqa: N802
        """Return the same bit mask; older drivers have the call under this name."""
        return int(self._value(gpu, "nvmlDeviceGetCurrentClocksThrottleReasons"))

    def nvmlDeviceGetNvLinkState(self, gpu: FakeGpu, link: int) -> int:  # noqa: N802
        """Return 1 if an NVLink is up, 0 if it is down."""
        self._value(gpu, "nvmlDeviceGetNvLinkState")
        if link >= len(gpu.nvlinks):
            raise self.NVMLError(NOT_SUPPORTED)
        return int(gpu.nvlinks[link])

    def nvmlDeviceGetFieldValues(self, gpu: FakeGpu, numbers: Sequence[int]) -> list[Any]:  # noqa: N802
        """Return the values of NVML's fields by number, as `unsigned long long`."""
        self._value(gpu, "nvmlDeviceGetFieldValues")
        return [
            SimpleNamespace(
                nvmlReturn=0 if number in gpu.fields else NOT_SUPPORTED,
                valueType=3,
                value=SimpleNamespace(ullVal=gpu.fields.get(number, 0)),
            )
            for number in numbers
        ]

    def nvmlEventSetCreate(self) -> list[FakeGpu]:  # noqa: N802
        """Return an empty set of events."""
        self._answer()
        return []

    def nvmlDeviceRegisterEvents(self, gpu: FakeGpu, types: int, events: list[FakeGpu]) -> None:  # noqa: N802
        """Register a set to receive the Xid events of a GPU."""
        if types & self.nvmlEventTypeXidCriticalError:
            events.append(gpu)

    def nvmlEventSetWait_v2(self, events: list[FakeGpu], _timeout_ms: int) -> Any:  # noqa: N802
        """Return the oldest event of a set.

        Raises:
            NVMLError: the set has no event, which is reported as a timeout.
        """
        self._answer()
        for place, (gpu, code) in enumerate(self.xids):
            if any(gpu is each for each in events):
                del self.xids[place]
                return SimpleNamespace(device=gpu, eventData=code)
        raise self.NVMLError(self.NVML_ERROR_TIMEOUT)

    def _value(self, gpu: FakeGpu, call: str) -> float:
        self._answer()
        if gpu.is_lost:
            raise self.NVMLError(self.NVML_ERROR_GPU_IS_LOST)
        if call in gpu.missing:
            raise self.NVMLError(NOT_SUPPORTED)
        return gpu.values.get(call, 0.0)

    def _answer(self) -> None:
        if self.hangs:
            self._gone_on.wait()


def _mean(curve: Callable[[float], float], began_s: float, ended_s: float) -> float:
    points = [began_s + (ended_s - began_s) * (number + 0.5) / 100 for number in range(100)]
    return sum(map(curve, points)) / len(points)
