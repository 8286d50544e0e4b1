"""Select and name clusters, types and sizes in one order for all analyses."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

from holdfast.trace.errors import LeftOut
from holdfast.trace.schema import TYPES

if TYPE_CHECKING:
    from holdfast.trace.trace import Trace

Kind = TypeVar("Kind")

UNKNOWN = "unknown"
"""Name of a missing type, pool or user."""
OTHERS = "others"
"""Name of the remainder where only some are shown by name."""


def in_order(trace: "Trace") -> list[str]:
    """List the names of the clusters, compared clusters last."""
    return sorted(trace.clusters, key=lambda name: name in trace.compared)


def role(trace: "Trace", cluster: str) -> Literal["main", "compared"]:
    """Return how to draw the curves of a cluster."""
    return "compared" if cluster in trace.compared else "main"


def capacity_gpus(trace: "Trace", cluster: str) -> float | None:
    """Return the GPUs of a cluster; None if unknown."""
    known = trace.clusters[cluster]
    if known.gpu_num is not None:
        return float(known.gpu_num)
    if known.node_num is not None and known.gpus_per_node is not None:
        return float(known.node_num * known.gpus_per_node)
    return None


def some(found: Sequence[Kind], missing: str) -> Sequence[Kind]:
    """Return `found` unless empty.

    Raises:
        LeftOut: `found` is empty; `missing` is the reason (`no GPU job has a duration`).
    """
    if not found:
        raise LeftOut(f"Left out: {missing}.")
    return found


def slug(text: str) -> str:
    """Convert a name to a part of a number's key: lower case, one `_` for other characters."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_") or "_"


def named(parts: Iterable[str]) -> list[str]:
    """Return the parts other than `UNKNOWN` and `OTHERS`; an empty result allows no comparison."""
    return [part for part in parts if part not in (UNKNOWN, OTHERS)]


def types_in_order(found: Iterable[str]) -> list[str]:
    """Sort types in the study's order, then other types, then `UNKNOWN`."""
    places = {name: place for place, name in enumerate(TYPES)}
    return sorted(
        set(found), key=lambda name: (name == UNKNOWN, places.get(name, len(places)), name)
    )


def size_of(gpu_num: float) -> float:
    """Return the upper end of the size bucket: 0, 0.5 (less than one), 1, 2, 4, 8 … powers of two."""
    if gpu_num <= 0:
        return 0.0
    return 0.5 if gpu_num < 1 else float(2 ** math.ceil(math.log2(gpu_num)))


def size_label(size: float) -> str:
    """Name a bucket of `size_of` for the report: `<1`, `1`, `2`, `3-4`, `5-8` …."""
    if size < 1:
        return "<1" if size else "0"
    whole = int(size)
    return str(whole) if whole <= 2 else f"{whole // 2 + 1}\N{EN DASH}{whole}"


def size_slug(label: str) -> str:
    """Name a bucket in the key of a number: `gpus_below_1`, `gpus_8`, `gpus_5_8`."""
    return f"gpus_{slug(label.replace('<', 'below '))}"
