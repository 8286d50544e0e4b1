"""Define what a reader of the GPUs has found, in a form that crosses a pipe."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Protocol, Self

HW_THERMAL: Final = 0x40
HW_POWER_BRAKE: Final = 0x80
SLOWDOWNS: Final = {HW_THERMAL: "hw_thermal_slowdown", HW_POWER_BRAKE: "hw_power_brake_slowdown"}
"""The names of the reasons for low clocks that report a fault, by their bit in NVML and DCGM
(nvml.h, nvmlClocksEventReasons). Other reasons, such as a power cap, are ordinary operation."""


def slowdowns_of(bits: int | None) -> tuple[str, ...]:
    """Return the names of the reasons for low clocks that report a fault."""
    return tuple(name for bit, name in SLOWDOWNS.items() if bits is not None and bits & bit)


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """The health of one GPU; None or empty: good, or not visible to the reader."""

    uncorrectable_errors: int | None = None
    """Uncorrectable ECC errors since the driver was loaded."""
    remap_failed: bool = False
    remap_pending: bool = False
    recovery_action: str = ""
    """The action that the driver requests, such as a reset."""
    slowdowns: tuple[str, ...] = ()
    """The names in `SLOWDOWNS` that hold now."""
    temperature: str = "?"
    nvlink_errors: int | None = None
    """Errors of all NVLinks: CRC errors, replays and recoveries."""
    nvlinks_up: int | None = None
    xids: tuple[int, ...] = ()
    """The codes of Xid events since the last look."""

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> Self:
        """Read a state that crossed a pipe."""
        lists = {name: tuple(fields[name]) for name in ("slowdowns", "xids")}
        return cls(**{**fields, **lists})


@dataclass(frozen=True, kw_only=True)
class Reading:
    """All GPUs of a node, as one reader has found them."""

    reader: str
    gpus: Mapping[str, GpuState]
    """For each GPU, by its PCI address or number."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """For each GPU that the driver calls lost, the driver's words. If a GPU is lost, the reader
    may have missed others."""

    def to_json(self) -> dict[str, Any]:
        """Return the reading as it crosses a pipe."""
        return asdict(self)

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> Self:
        """Read a reading that crossed a pipe."""
        gpus = {where: GpuState.of_json(gpu) for where, gpu in fields["gpus"].items()}
        return cls(reader=fields["reader"], gpus=gpus, lost=fields["lost"])


class Reader(Protocol):
    """One way to read the GPUs of this node."""

    @property
    def name(self) -> str:
        """Return the name of the reader, such as "NVML"."""
        ...

    def read(self) -> Reading:
        """Read all GPUs.

        Raises:
            CannotSee: this reader cannot read the GPUs here.
        """
        ...
