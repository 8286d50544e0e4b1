"""What is known of a cluster beside its jobs: its size, its GPUs, its place on the clock."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from holdfast.core.errors import BadUse


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster as the analyses need it; None where nobody said."""

    name: str
    source: str
    """The adapter that read it."""
    node_num: int | None = None
    gpus_per_node: int | None = None
    gpu_num: int | None = None
    """All its GPUs; the product of the two above where they are alike."""
    gpu_model: str = ""
    gpu_tdp_w: float | None = None
    gpu_memory_mib: float | None = None
    utc_offset_h: float = 0.0
    """Hours that its people's clocks are ahead of UTC: what `hour of the day` means."""
    duration_counts_queue: bool = False
    """Whether what the source calls duration begins at submission."""
    time_resolution_s: float = 1.0
    """How coarse the source's clock times are; what may differ from a duration without contradicting it."""
    citation: str = ""
    """Who published the trace, and its licence."""


def known_first(one: Cluster, other: Cluster) -> Cluster:
    """What is known of a cluster from two sources: the first's word, and the second's where the first has none."""
    unknown = {
        field.name: getattr(other, field.name)
        for field in fields(one)
        if getattr(one, field.name) in (None, "")
    }
    return replace(one, **unknown)


def sized(cluster: Cluster, capacity: str) -> Cluster:
    """The cluster with its size as `NODESxGPUS`: how many nodes, and GPUs of each.

    Raises:
        BadUse: it is not of that form.
    """
    form = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", capacity)
    if form is None:
        raise BadUse(
            f"The capacity of {cluster.name} is {capacity!r}. Expected NODESxGPUS, such as 286x8."
        )
    nodes, gpus = int(form[1]), int(form[2])
    return replace(cluster, node_num=nodes, gpus_per_node=gpus, gpu_num=nodes * gpus)


def together(clusters: Sequence[Cluster], name: str) -> Cluster:
    """Several clusters as one: sizes add up where all are known, the rest stays where they are alike."""

    def alike(field: str) -> Any:
        values = {getattr(cluster, field) for cluster in clusters}
        return values.pop() if len(values) == 1 else Cluster.__dataclass_fields__[field].default

    def total(field: str) -> int | None:
        values = [getattr(cluster, field) for cluster in clusters]
        return None if None in values else sum(values)

    others = {
        field.name: alike(field.name)
        for field in fields(Cluster)
        if field.name not in {"name", "source"}
    }
    sizes = {field: total(field) for field in ("node_num", "gpu_num")}
    return Cluster(name=name, source=clusters[0].source, **{**others, **sizes})
