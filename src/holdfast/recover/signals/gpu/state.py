"""Define the findings of a reader of the GPUs, in a form that can be sent through a pipe."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Protocol, Self

HW_THERMAL: Final = 0x40
HW_POWER_BRAKE: Final = 0x80
SLOWDOWNS: Final = {HW_THERMAL: "hw_thermal_slowdown", HW_POWER_BRAKE: "hw_power_brake_slowdown"}
"""The names of those reasons for low clocks that mean a fault, by their bit in NVML and DCGM
(nvml.h, nvmlClocksEventReasons). Other reasons, such as a power cap, are normal."""


def slowdowns_of(bits: int | None) -> tuple[str, ...]:
    """Return the names of the reasons in `bits` that mean a fault."""
    return tuple(name for bit, name in SLOWDOWNS.items() if bits is not None and bits & bit)


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """The health of one GPU. A value that is None or empty is good, or the reader cannot read it."""

    uncorrectable_errors: int | None = None
    """The number of uncorrectable ECC errors since the driver was loaded."""
    remap_failed: bool = False
    remap_pending: bool = False
    recovery_action: str = ""
    """The action that the driver requests, such as a reset."""
    slowdowns: tuple[str, ...] = ()
    """The names in `SLOWDOWNS` that apply now."""
    temperature: str = "?"
    nvlink_errors: int | None = None
    """The number of errors of all NVLinks: CRC errors, replays and recoveries."""
    nvlinks_up: int | None = None
    xids: tuple[int, ...] = ()
    """The codes of Xid events since the last look."""

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> Self:
        """Convert JSON to a state."""
        lists = {name: tuple(fields[name]) for name in ("slowdowns", "xids")}
        return cls(**{**fields, **lists})


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The findings of one reader about all GPUs of a node."""

    reader: str
    gpus: Mapping[str, GpuState]
    """The states of the GPUs, by PCI address or number."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """For each GPU that the driver reports as lost, the message of the driver. If a GPU is lost,
    the reader may have missed other GPUs."""

    def to_json(self) -> dict[str, Any]:
        """Return the reading as JSON."""
        return asdict(self)

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> Self:
        """Convert JSON to a reading."""
        gpus = {where: GpuState.of_json(gpu) for where, gpu in fields["gpus"].items()}
        return cls(reader=fields["reader"], gpus=gpus, lost=fields["lost"])


class Reader(Protocol):
    """One way to read the GPUs of this node."""

    @property
    def name(self) -> str:
        """The name of the reader, such as "NVML"."""
        ...

    def read(self) -> Reading:
        """Read all GPUs.

        Raises:
            CannotSee: this reader cannot read the GPUs here.
        """
        ...
