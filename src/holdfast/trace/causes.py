"""Derive why a job failed from its record.

The cause is a reason of the study's Table 3, or else a state of the scheduler or a signal.
"""

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from holdfast.diagnose import CATEGORIES as REASONS
from holdfast.trace.table import Table

CATEGORIES: Final = ("Infrastructure", "Framework", "Script", "Limit", "Signal", "Own", "Unknown")
"""The study's three categories, and four of ours.

`Limit` means that the job exceeded a limit, `Signal` that a signal ended it, `Own` that the reason
is the source's own word, and `Unknown` that no cause is recorded.
"""


@dataclass(frozen=True)
class Cause:
    """Name a cause of failure: a category, and a reason within the category."""

    category: str
    reason: str


_BY_STATE: Final[Mapping[str, Cause]] = {
    "NODE_FAIL": Cause("Infrastructure", "NodeFailure"),
    "OUT_OF_MEMORY": Cause(
        "Limit", "OUT_OF_MEMORY"
    ),  # The limit is host memory; the study's OutOfMemoryError concerns a GPU.
    "TIMEOUT": Cause("Limit", "TIMEOUT"),
}
UNKNOWN: Final = Cause("Unknown", "unknown")


def cause_of(state: str | None, reason: str | None, exit_code: float | None) -> Cause:
    """Derive the cause of a failure from the fields of a job record.

    The first of these that is present decides: the reason, the state, a signal in the exit code
    (128 + N as in shells, -N as in Python).

    Args:
        state: one of `schema.STATES`; None if unknown.
        reason: a reason of Table 3 or the source's own word; None or empty if unknown.
        exit_code: exit code of the job; NaN or None if unknown.
    """
    if reason:
        category = REASONS.get(reason)
        if category is None:
            return Cause("Own", reason)
        return UNKNOWN if category == "Unknown" else Cause(category, reason)
    if state in _BY_STATE:
        return _BY_STATE[str(state)]
    if exit_code is not None and exit_code == exit_code:  # noqa: PLR0124 - NaN differs from itself
        number = int(-exit_code if exit_code < 0 else exit_code - 128)
        if number in signal.valid_signals():
            return Cause(
                "Signal",
                signal.Signals(number).name
                if number in set(signal.Signals)
                else f"signal {number}",
            )
    return UNKNOWN


def causes_of(table: Table) -> list[Cause]:
    """Return the cause of each row, from the columns `state`, `reason` and `exit_code`."""
    columns = (table[name].tolist() for name in ("state", "reason", "exit_code"))
    known: dict[tuple[Any, ...], Cause] = {}
    causes = []
    for state, reason, code in zip(*columns, strict=True):
        # NaN is no key: NaN differs from itself.
        key = (state, reason, None if code != code else code)  # noqa: PLR0124
        if key not in known:
            known[key] = cause_of(*key)
        causes.append(known[key])
    return causes
