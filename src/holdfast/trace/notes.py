"""Record findings about the input, for the report."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Note:
    """Something found, dropped or mended while reading or checking, with its count."""

    cluster: str
    check: str
    """Which check or rule, a slug: `duplicate-job-id`."""
    sentence: str
    """What was found, for a person."""
    rows: int
    """How many rows it concerns."""
    action: str
    """`kept`, `dropped` or `mended`."""
    examples: tuple[str, ...] = ()
    """A few job ids or places."""
