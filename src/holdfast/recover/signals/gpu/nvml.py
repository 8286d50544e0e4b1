"""Read the GPUs by NVML (`nvidia-ml-py`): their state, their NVLinks, and Xid events.

NVML delivers Xid events even to a container that cannot read the kernel's log.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from holdfast.recover.signals.facts import CannotSee
from holdfast.recover.signals.gpu.state import GpuState, Reading, slowdowns_of

MAX_XIDS = 100
"""The largest number of events per look; further events are read at the next look."""
_NVLINK_COUNTERS: Final = (
    "NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
    "NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL",
    "NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",
    "NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
)
_ACTION: Final = "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"
_VALUES: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal")
"""The name of the union member with the value, for each `valueType` (nvml.h, nvmlValueType_t)."""
_T = TypeVar("_T")


class _GpuLost(Exception):
    pass


def open_nvml() -> "Nvml":
    """Return a reader that uses the library on this host.

    Raises:
        CannotSee: the binding or the library is missing, or NVML shows no GPU.
    """
    try:
        import pynvml
    except ImportError:
        raise CannotSee("nvidia-ml-py is not installed: pip install 'holdfast[gpu]'") from None
    return Nvml(pynvml)


class Nvml:
    """A reader that keeps NVML open between looks, so that no Xid event is missed."""

    name = "NVML"

    def __init__(self, nvml: Any) -> None:
        """Find the GPUs, and register for Xid events.

        Args:
            nvml: the module `pynvml`, or `holdfast.testing.nvml.FakeNvml`.

        Raises:
            CannotSee: NVML finds no GPU.
        """
        self._nvml = nvml
        self._handles: dict[str, Any] = {}
        self._lost: dict[str, str] = {}
        try:
            nvml.nvmlInit()
            for index in range(nvml.nvmlDeviceGetCount()):
                self._find(index)
        except nvml.NVMLError as error:
            raise CannotSee(f"NVML: {error}") from error
        if not self._handles and not self._lost:
            raise CannotSee("NVML shows no GPU")
        self._actions = {
            getattr(nvml, name): name.removeprefix("NVML_GPU_RECOVERY_ACTION_").replace("_", " ")
            for name in dir(nvml)
            if name.startswith("NVML_GPU_RECOVERY_ACTION_")
        }
        self._events = self._register()

    def read(self) -> Reading:
        """See `Reader.read`."""
        xids = self._xids()
        gpus: dict[str, GpuState] = {}
        lost = dict(self._lost)
        for where, handle in self._handles.items():
            try:
                gpus[where] = self._state(handle, tuple(xids.get(where, ())))
            except _GpuLost as error:
                lost[where] = str(error)
        return Reading(reader=self.name, gpus=gpus, lost=lost)

    def _find(self, index: int) -> None:
        try:
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            self._handles[self._address(handle)] = handle
        except self._nvml.NVMLError as error:
            if error.value != self._nvml.NVML_ERROR_GPU_IS_LOST:
                raise
            self._lost[f"number {index}"] = f"NVML: {error}"

    def _address(self, handle: Any) -> str:
        found = self._nvml.nvmlDeviceGetPciInfo(handle).busId
        return (found.decode() if isinstance(found, bytes) else str(found)).lower()

    def _register(self) -> Any:
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:
            return None
        for handle in self._handles.values():
            self._of(
                nvml.nvmlDeviceRegisterEvents, handle, nvml.nvmlEventTypeXidCriticalError, events
            )
        return events

    def _xids(self) -> dict[str, list[int]]:
        """Return the codes of the Xid events since the last look, by the address of the GPU."""
        found: dict[str, list[int]] = {}
        if self._events is None:
            return found
        for _ in range(MAX_XIDS):
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
                found.setdefault(self._address(event.device), []).append(int(event.eventData))
            except self._nvml.NVMLError:  # a timeout: there is no further event
                break
        return found

    def _state(self, handle: Any, xids: tuple[int, ...]) -> GpuState:
        nvml = self._nvml
        rows = self._of(nvml.nvmlDeviceGetRemappedRows, handle)
        bits = self._of(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        if bits is None:  # drivers before R535 have only the older name
            bits = self._of(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        degrees = self._of(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
        counters = list(self._fields(handle, _NVLINK_COUNTERS))
        return GpuState(
            uncorrectable_errors=self._of(
                nvml.nvmlDeviceGetTotalEccErrors,
                handle,
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                nvml.NVML_VOLATILE_ECC,
            ),
            remap_pending=rows is not None and bool(rows[2]),
            remap_failed=rows is not None and bool(rows[3]),
            recovery_action=" ".join(
                self._actions.get(action, f"action {action}")
                for action in self._fields(handle, (_ACTION,))
                if action != 0
            ),
            slowdowns=slowdowns_of(bits),
            temperature="?" if degrees is None else f"{degrees} C",
            nvlink_errors=sum(counters) if counters else None,
            nvlinks_up=self._links_up(handle),
            xids=xids,
        )

    def _links_up(self, handle: Any) -> int | None:
        states = []
        for link in range(self._nvml.NVML_NVLINK_MAX_LINKS):
            state = self._of(self._nvml.nvmlDeviceGetNvLinkState, handle, link)
            if state is None:  # the GPU has no further links
                break
            states.append(int(state))
        return sum(states) if states else None

    def _fields(self, handle: Any, names: tuple[str, ...]) -> Iterator[int]:
        """Return the values of those fields in `names` that this GPU has."""
        numbers = [number for name in names if (number := getattr(self._nvml, name, None))]
        for one in self._of(self._nvml.nvmlDeviceGetFieldValues, handle, numbers) or ():
            if one.nvmlReturn == 0 and one.valueType < len(_VALUES):
                yield int(getattr(one.value, _VALUES[one.valueType]))

    def _of(self, call: Callable[..., _T], *arguments: Any) -> _T | None:
        """Return the result of a call; None if this GPU or this driver does not support it.

        Raises:
            _GpuLost: the driver has lost the GPU.
            CannotSee: the library cannot be used any more, for example because the driver was
                reloaded.
        """
        nvml = self._nvml
        try:
            return call(*arguments)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                raise _GpuLost(f"NVML: {error}") from error
            if error.value in (
                nvml.NVML_ERROR_UNINITIALIZED,
                nvml.NVML_ERROR_DRIVER_NOT_LOADED,
                nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
            ):
                raise CannotSee(f"NVML: {error}") from error
            return None
