"""Read AMD GPUs with the package `amdsmi`, which needs ROCm's library on the host.

AMD's library has no counter of SM activity.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

from holdfast.profile.metrics import AMDSMI
from holdfast.profile.recording import SeriesId
from holdfast.profile.sources.source import CannotRead, plausible

MIB: Final = 1024 * 1024


def import_amdsmi() -> Any:
    """Return the module `amdsmi`.

    Raises:
        CannotRead: the module or ROCm's library is missing.
    """
    try:
        import amdsmi
    except ImportError:
        raise CannotRead("amdsmi is not installed: pip install amdsmi") from None
    except Exception as error:  # the module loads ROCm's library when it is imported
        raise CannotRead(f"amdsmi: {error}") from error
    return amdsmi


class Amd:
    """The AMD GPUs of this node, as AMD's library reports them."""

    name = AMDSMI

    def __init__(self, amdsmi: Any, *, interval_s: float = 1.0) -> None:
        """Find the AMD GPUs of this node.

        Raises:
            CannotRead: the library finds no GPU.
        """
        self._amdsmi = amdsmi
        self._interval_s = interval_s
        try:
            amdsmi.amdsmi_init()
            self._handles = list(amdsmi.amdsmi_get_processor_handles())
        except amdsmi.AmdSmiException as error:
            raise CannotRead(f"amdsmi: {error}") from error
        if not self._handles:
            raise CannotRead("amdsmi shows no GPU")

    def read(self, now_ns: int) -> dict[SeriesId, float]:  # noqa: ARG002 - no value is a rate
        """See `Source.read`."""
        return plausible(
            (SeriesId(metric, AMDSMI, device=device, interval_s=self._interval_s), value)
            for device, handle in enumerate(self._handles)
            for metric, value in self._of(handle)
        )

    def close(self) -> None:
        """See `Source.close`."""
        with contextlib.suppress(self._amdsmi.AmdSmiException):
            self._amdsmi.amdsmi_shut_down()

    def _of(self, handle: Any) -> Iterator[tuple[str, float | None]]:
        amd = self._amdsmi
        calls: tuple[tuple[str, Callable[[], Any], float], ...] = (
            ("gpu_utilization", lambda: amd.amdsmi_get_gpu_activity(handle)["gfx_activity"], 1.0),
            ("gpu_memory_used", lambda: amd.amdsmi_get_gpu_vram_usage(handle)["vram_used"], MIB),
            ("gpu_memory_total", lambda: amd.amdsmi_get_gpu_vram_usage(handle)["vram_total"], MIB),
            ("gpu_power", lambda: _power(amd.amdsmi_get_power_info(handle)), 1.0),
            ("gpu_temperature", lambda: self._temperature(handle), 1.0),
            (
                "gpu_sm_clock",
                lambda: amd.amdsmi_get_clock_info(handle, amd.AmdSmiClkType.GFX)["clk"],
                1.0,
            ),
        )
        for metric, call, factor in calls:
            with contextlib.suppress(amd.AmdSmiException, KeyError):
                value = call()
                if isinstance(value, int | float):  # the library returns "N/A" for what is missing
                    yield metric, value * factor

    def _temperature(self, handle: Any) -> Any:
        amd = self._amdsmi
        return amd.amdsmi_get_temp_metric(
            handle, amd.AmdSmiTemperatureType.HOTSPOT, amd.AmdSmiTemperatureMetric.CURRENT
        )


def _power(info: dict[str, Any]) -> Any:
    # MI300 has a current power, older devices have an average.
    current = info["current_socket_power"]
    return current if isinstance(current, int | float) else info["average_socket_power"]
