"""Which clusters, types and sizes an analysis speaks of, in the order and by the names that all of them use."""

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
"""What a job's type, pool or user is called where its source does not say."""
OTHERS = "others"
"""What the rest is called where only so many are shown by name."""


def in_order(trace: "Trace") -> list[str]:
    """Names of the clusters: those the trace is about first, then those it is compared with."""
    return sorted(trace.clusters, key=lambda name: name in trace.compared)


def role(trace: "Trace", cluster: str) -> Literal["main", "compared"]:
    """How the curves of a cluster are drawn."""
    return "compared" if cluster in trace.compared else "main"


def capacity_gpus(trace: "Trace", cluster: str) -> float | None:
    """GPUs of a cluster; None where nobody said."""
    known = trace.clusters[cluster]
    if known.gpu_num is not None:
        return float(known.gpu_num)
    if known.node_num is not None and known.gpus_per_node is not None:
        return float(known.node_num * known.gpus_per_node)
    return None


def some(found: Sequence[Kind], missing: str) -> Sequence[Kind]:
    """`found`, unless it is empty.

    Raises:
        LeftOut: the trace has nothing of the kind, as `missing` says (`no GPU job has a duration`).
    """
    if not found:
        raise LeftOut(f"Left out: {missing}.")
    return found


def slug(text: str) -> str:
    """A name as part of the key of a number: lower case, one underscore for all that is no letter or digit."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_") or "_"


def named(parts: Iterable[str]) -> list[str]:
    """The parts that are somebody: neither `UNKNOWN` nor `OTHERS`. None of them: there is nothing to tell apart."""
    return [part for part in parts if part not in (UNKNOWN, OTHERS)]


def types_in_order(found: Iterable[str]) -> list[str]:
    """Types in the study's order, then unheard-of ones, then `UNKNOWN`."""
    places = {name: place for place, name in enumerate(TYPES)}
    return sorted(
        set(found), key=lambda name: (name == UNKNOWN, places.get(name, len(places)), name)
    )


def size_of(gpu_num: float) -> float:
    """The bucket of a number of GPUs, as its upper end: 0, 0.5 (less than one), 1, 2, 4, 8 … powers of two."""
    if gpu_num <= 0:
        return 0.0
    return 0.5 if gpu_num < 1 else float(2 ** math.ceil(math.log2(gpu_num)))


def size_label(size: float) -> str:
    """A bucket of `size_of` for a reader: `<1`, `1`, `2`, `3-4`, `5-8` …."""
    if size < 1:
        return "<1" if size else "0"
    whole = int(size)
    return str(whole) if whole <= 2 else f"{whole // 2 + 1}\N{EN DASH}{whole}"


def size_slug(label: str) -> str:
    """A bucket's label in the key of a number: `gpus_below_1`, `gpus_8`, `gpus_5_8`."""
    return f"gpus_{slug(label.replace('<', 'below '))}"
