"""Define the findings that a check returns."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Outcome = Literal["good", "wrong", "not looked at"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One result of a check.

    Attributes:
        outcome: "good", "wrong", or "not looked at" if the check could not decide.
        what: one sentence with the values that were found.
        mend: the command that fixes the problem, or that makes the check possible; may be empty.
    """

    outcome: Outcome
    what: str
    mend: str = ""


Check = Callable[[Path], Iterator[Finding]]
"""A function that checks one thing on this host.

Its argument is the folder in which the training saves its checkpoints.
"""


def good(what: str) -> Finding:
    """Return a finding that something is in order."""
    return Finding(outcome="good", what=what)


def wrong(what: str, mend: str) -> Finding:
    """Return a finding of a problem, with the command that fixes it."""
    return Finding(outcome="wrong", what=what, mend=mend)


def unseen(what: str, mend: str = "") -> Finding:
    """Return a finding that something could not be checked, and why."""
    return Finding(outcome="not looked at", what=what, mend=mend)
