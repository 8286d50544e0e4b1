"""Choose the source of the GPUs' counters: the first one that answers, the best one first."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from holdfast.core.exporter import ENV_EXPORTER
from holdfast.profile.metrics import AMDSMI, DCGM, EXPORTER, GPM, NVML
from holdfast.profile.sources.source import CannotRead, Source

NO_GPU: Final = "this host has no driver of an NVIDIA or AMD GPU"
DRIVERS: Final = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/kfd"))
Open = Callable[[], Source]


def has_gpu(drivers: Sequence[Path] = DRIVERS) -> bool:
    """Return True if a probe is worth its cost: a driver is loaded, or an exporter named."""
    return bool(os.environ.get(ENV_EXPORTER)) or any(one.exists() for one in drivers)


def gpu_sources(interval_s: float) -> dict[str, Open]:
    """Return what opens each source of GPU counters, in the order of the probe."""

    def nvidia(*, with_gpm: bool) -> Source:
        from holdfast.profile.sources.nvidia import Nvidia, import_nvml

        return Nvidia(import_nvml(), with_gpm=with_gpm, interval_s=interval_s)

    def dcgm() -> Source:
        from holdfast.profile.sources.dcgm import Dcgmi

        return Dcgmi(interval_s=interval_s)

    def exporter() -> Source:
        from holdfast.profile.sources.dcgm import Exporter

        return Exporter()

    def amd() -> Source:
        from holdfast.profile.sources.amd import Amd, import_amdsmi

        return Amd(import_amdsmi(), interval_s=interval_s)

    return {
        GPM: lambda: nvidia(with_gpm=True),
        DCGM: dcgm,
        EXPORTER: exporter,
        NVML: lambda: nvidia(with_gpm=False),
        AMDSMI: amd,
    }


def gpu_memory(sources: dict[str, Open] | None = None) -> tuple[dict[int, float], dict[str, str]]:
    """Read the memory of each GPU once.

    Args:
        sources: what opens each source; None: the sources that give the memory at their first read.

    Returns:
        the bytes of each GPU, by its number; and for each source that does not answer, the reason.
    """
    if sources is None:
        opened = gpu_sources(1.0)
        sources = {name: opened[name] for name in (NVML, AMDSMI)}
    source, missing = probe(sources)
    if source is None:
        return {}, missing
    try:
        values = source.read(time.monotonic_ns())
    except CannotRead as error:
        return {}, {**missing, source.name: str(error)}
    finally:
        source.close()
    return {
        key.device: value
        for key, value in values.items()
        if key.metric == "gpu_memory_total" and key.device is not None
    }, missing


def probe(sources: dict[str, Open]) -> tuple[Source | None, dict[str, str]]:
    """Open the first source that answers.

    Returns:
        the source, None if no source answers; and for each source that did not answer, the reason.
    """
    missing: dict[str, str] = {}
    for name, open_source in sources.items():
        try:
            return open_source(), missing
        except CannotRead as error:
            missing[name] = str(error)
        except Exception as error:  # a driver's library may fail in any way
            missing[name] = f"{type(error).__name__}: {error}"
    return None, missing
