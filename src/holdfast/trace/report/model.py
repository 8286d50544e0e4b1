"""Define the parts of a report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.trace.analyses.result import Analysis, Result
from holdfast.trace.clusters import Cluster
from holdfast.trace.findings import Finding
from holdfast.trace.notes import Note

Progress = Callable[[str, float, float | None], None]
"""A function `progress(description, done, total)`."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An analysis together with its result."""

    analysis: Analysis
    result: Result | None = None
    left_out: str = ""
    """The reason why there is no result, as a sentence; empty if there is one."""


@dataclass(frozen=True, kw_only=True)
class Read:
    """Counts of the jobs that were read for a cluster."""

    cluster: Cluster
    jobs: int
    gpu_jobs: int
    gpu_time_s: float
    first: str
    """Time of the first submission (ISO 8601, UTC); empty if no job has a submission time."""
    last: str
    compared: bool = False


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that the page shows."""

    title: str
    clusters: Sequence[Read]
    notes: Sequence[Note]
    findings: Sequence[Finding]
    entries: Sequence[Entry]
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Name and value of each assumption as text, such as `PUE`: `1.25`."""
    duration: str = "run"
    """Definition of a job's duration, one of `schema.DURATIONS`."""

    @property
    def numbers(self) -> dict[str, float]:
        """Return the named numbers of all analyses in one mapping."""
        return {
            name: number
            for entry in self.entries
            if entry.result
            for name, number in entry.result.numbers.items()
        }
