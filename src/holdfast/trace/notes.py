"""Record findings about the input, for the report."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Note:
    """A finding of reading or checking, with its count and the action taken."""

    cluster: str
    check: str
    """Name of the check or rule, a slug: `duplicate-job-id`."""
    sentence: str
    """The finding as text for the report."""
    rows: int
    """Number of rows concerned."""
    action: str
    """`kept`, `dropped` or `mended`."""
    examples: tuple[str, ...] = ()
    """A few job ids or places."""
