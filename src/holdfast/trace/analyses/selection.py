"""Select, sort and name clusters, types and sizes, in the same way for all analyses."""

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
"""Name of the combined rest, where only some items are shown by name."""


def in_order(trace: "Trace") -> list[str]:
    """Return the names of the clusters; those that serve only for comparison come last."""
    return sorted(trace.clusters, key=lambda name: name in trace.compared)


def role(trace: "Trace", cluster: str) -> Literal["main", "compared"]:
    """Return the role of a cluster's curves in a chart: `main` or `compared`."""
    return "compared" if cluster in trace.compared else "main"


def capacity_gpus(trace: "Trace", cluster: str) -> float | None:
    """Return the number of GPUs of a cluster; None if unknown."""
    known = trace.clusters[cluster]
    if known.gpu_num is not None:
        return float(known.gpu_num)
    if known.node_num is not None and known.gpus_per_node is not None:
        return float(known.node_num * known.gpus_per_node)
    return None


def some(found: Sequence[Kind], missing: str) -> Sequence[Kind]:
    """Return `found` unchanged, or raise `LeftOut` if it is empty.

    Raises:
        LeftOut: `found` is empty. The message gives `missing` as the reason, such as `no GPU job
            has a duration`.
    """
    if not found:
        raise LeftOut(f"Left out: {missing}.")
    return found


def slug(text: str) -> str:
    """Convert a name for use in a number's key: lower case, with `_` for all other characters."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_") or "_"


def named(parts: Iterable[str]) -> list[str]:
    """Return the parts that have a name, without `UNKNOWN` and `OTHERS`."""
    return [part for part in parts if part not in (UNKNOWN, OTHERS)]


def types_in_order(found: Iterable[str]) -> list[str]:
    """Sort types in the study's order, then other types, then `UNKNOWN`."""
    places = {name: place for place, name in enumerate(TYPES)}
    return sorted(
        set(found), key=lambda name: (name == UNKNOWN, places.get(name, len(places)), name)
    )


def size_of(gpu_num: float) -> float:
    """Return the upper end of a job's size bucket: 0, 0.5 (below one GPU), 1, 2, 4, 8 and so on."""
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
    """Return the name of a size bucket within the key of a number: `gpus_below_1`, `gpus_5_8`."""
    return f"gpus_{slug(label.replace('<', 'below '))}"
