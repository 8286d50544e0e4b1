"""Why a job failed, as far as its record says: a reason of the study's Table 3, or what a scheduler's state gives."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from holdfast.diagnose import CATEGORIES as REASONS
from holdfast.trace.table import Table

CATEGORIES: Final = ("Infrastructure", "Framework", "Script", "Limit", "Signal", "Own", "Unknown")
"""The study's three; a limit that the job met; a signal that ended it; the source's own words; and no word at all."""


@dataclass(frozen=True)
class Cause:
    """A category and a reason in it."""

    category: str
    reason: str


_BY_STATE: Final[Mapping[str, Cause]] = {
    "NODE_FAIL": Cause("Infrastructure", "NodeFailure"),
    "OUT_OF_MEMORY": Cause(
        "Limit", "OUT_OF_MEMORY"
    ),  # of host memory; the study's OutOfMemoryError is a GPU's
    "TIMEOUT": Cause("Limit", "TIMEOUT"),
}
UNKNOWN: Final = Cause("Unknown", "unknown")


def cause_of(state: str | None, reason: str | None, exit_code: float | None) -> Cause:
    """The cause that a record supports.

    A reason goes first, then the state, then a signal in the exit code (128 + N as shells have it, -N as Python does).

    Args:
        state: one of `schema.STATES`.
        reason: a reason of Table 3 or the source's own word.
        exit_code: NaN or None where unknown.
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
    """The cause of each row of an aggregate with the columns `state`, `reason` and `exit_code`."""
    columns = (table[name].tolist() for name in ("state", "reason", "exit_code"))
    known: dict[tuple[Any, ...], Cause] = {}
    causes = []
    for state, reason, code in zip(*columns, strict=True):
        key = (state, reason, None if code != code else code)  # noqa: PLR0124 - NaN is no key: it differs from itself
        if key not in known:
            known[key] = cause_of(*key)
        causes.append(known[key])
    return causes
