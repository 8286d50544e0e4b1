"""Describe a cluster: size, GPUs, time zone."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from holdfast.core.errors import BadUse


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hold the attributes of a cluster that the analyses read; None if unknown."""

    name: str
    source: str
    """Name of the adapter that read the cluster's jobs."""
    node_num: int | None = None
    gpus_per_node: int | None = None
    gpu_num: int | None = None
    """Number of GPUs of the cluster; the product of the two fields above if all nodes are alike."""
    gpu_model: str = ""
    gpu_tdp_w: float | None = None
    gpu_memory_mib: float | None = None
    utc_offset_h: float = 0.0
    """Hours from UTC to the users' local time, used for the hour of the day."""
    duration_counts_queue: bool = False
    """True if the duration that the source reports starts at submission and includes the wait."""
    time_resolution_s: float = 1.0
    """Resolution of the source's times in seconds.

    If a duration differs from the times by less than this, the two do not contradict each other.
    """
    citation: str = ""
    """The publisher of the trace, and the licence."""


def known_first(one: Cluster, other: Cluster) -> Cluster:
    """Merge two descriptions of one cluster; where both have a value, the value of `one` counts."""
    unknown = {
        field.name: getattr(other, field.name)
        for field in fields(one)
        if getattr(one, field.name) in (None, "")
    }
    return replace(one, **unknown)


def sized(cluster: Cluster, capacity: str) -> Cluster:
    """Return the cluster with a new size.

    `capacity` has the form `NODESxGPUS`: the number of nodes, and the GPUs of each node.

    Raises:
        BadUse: `capacity` does not have this form.
    """
    form = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", capacity)
    if form is None:
        raise BadUse(
            f"The capacity of {cluster.name} is {capacity!r}. Expected NODESxGPUS, such as 286x8."
        )
    nodes, gpus = int(form[1]), int(form[2])
    return replace(cluster, node_num=nodes, gpus_per_node=gpus, gpu_num=nodes * gpus)


def together(clusters: Sequence[Cluster], name: str) -> Cluster:
    """Describe several clusters as one.

    Sizes are added if all are known. Other fields are kept if they are equal in all clusters.
    """

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
