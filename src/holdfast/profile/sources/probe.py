"""Choose the source of GPU counters: the best one that works on this node."""

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
    """Return True if a GPU driver is loaded or the URL of a dcgm-exporter is configured.

    Otherwise a probe of the sources cannot succeed.
    """
    return bool(os.environ.get(ENV_EXPORTER)) or any(one.exists() for one in drivers)


def gpu_sources(interval_s: float) -> dict[str, Open]:
    """Return a function that opens each source of GPU counters, by name, the best source first."""

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
    """Read the total memory of each GPU once.

    Args:
        sources: functions that open a source, by name. By default NVML and AMD's library, because
            these two return the memory at the first read.

    Returns:
        Two dicts: the bytes of each GPU, by its index, and the reason for each source that does not
            work.
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
    """Open the first source that works.

    Returns:
        The source, or None if no source works; and the reason for each source that does not work.
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
