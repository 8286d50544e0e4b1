"""Define the parts of a report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.trace.analyses.result import Analysis, Result
from holdfast.trace.clusters import Cluster
from holdfast.trace.findings import Finding
from holdfast.trace.notes import Note

Progress = Callable[[str, float, float | None], None]
"""`progress(description, done, total)`."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An analysis and its result."""

    analysis: Analysis
    result: Result | None = None
    left_out: str = ""
    """The reason in a sentence if there is no result."""


@dataclass(frozen=True, kw_only=True)
class Read:
    """Counts of the jobs read from a cluster."""

    cluster: Cluster
    jobs: int
    gpu_jobs: int
    gpu_time_s: float
    first: str
    """Time of the first submission, ISO 8601, UTC; empty if no job has one."""
    last: str
    compared: bool = False


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything the page shows."""

    title: str
    clusters: Sequence[Read]
    notes: Sequence[Note]
    findings: Sequence[Finding]
    entries: Sequence[Entry]
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Name and value of each assumption, in words: `PUE`: `1.25`."""
    duration: str = "run"
    """Definition of a duration, one of `schema.DURATIONS`."""

    @property
    def numbers(self) -> dict[str, float]:
        """The named numbers of all analyses together."""
        return {
            name: number
            for entry in self.entries
            if entry.result
            for name, number in entry.result.numbers.items()
        }
