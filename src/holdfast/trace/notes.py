"""Define notes about the input, which the report shows."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Note:
    """A note of reading or checking the input: the problem, its count, and the action taken."""

    cluster: str
    check: str
    """Name of the check or rule as a slug, such as `duplicate-job-id`."""
    sentence: str
    """The problem as text for the report."""
    rows: int
    """Number of rows that have the problem."""
    action: str
    """The action taken on the rows: `kept`, `dropped` or `mended`."""
    examples: tuple[str, ...] = ()
    """A few ids of affected jobs, or places in the file."""
