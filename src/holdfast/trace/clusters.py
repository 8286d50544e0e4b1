"""What is known of a cluster beside its jobs: its size, its GPUs, its place on the clock."""

from dataclasses import dataclass


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
