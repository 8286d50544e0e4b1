"""Define the answer of a check."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Outcome = Literal["good", "wrong", "not looked at"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One answer of a check.

    Attributes:
        outcome: "not looked at" if the check found out neither good nor wrong.
        what: one sentence with the values that were found.
        mend: the command that mends the fault, or that makes the look possible; may be empty.
    """

    outcome: Outcome
    what: str
    mend: str = ""


Check = Callable[[Path], Iterator[Finding]]
"""Look at one thing; the argument is the folder in which the training saves its checkpoints."""


def good(what: str) -> Finding:
    """Return a finding of nothing wrong."""
    return Finding(outcome="good", what=what)


def wrong(what: str, mend: str) -> Finding:
    """Return a finding of a fault, with the command that mends the fault."""
    return Finding(outcome="wrong", what=what, mend=mend)


def unseen(what: str, mend: str = "") -> Finding:
    """Return the reason why something was not looked at."""
    return Finding(outcome="not looked at", what=what, mend=mend)
