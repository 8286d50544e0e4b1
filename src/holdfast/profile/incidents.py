"""Read a run's incidents, which a recording shows beside its counters and phases."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.core.ledger import Ledger


@dataclass(frozen=True, kw_only=True, slots=True)
class IncidentMark:
    """One incident of a run.

    Attributes:
        kind: `exit`, `hang` or `anomaly`.
        reason: the diagnosed reason; empty if there is none.
        start_ns: time of the fault, in Unix nanoseconds.
        end_ns: time at which training resumed, in Unix nanoseconds; None if it did not resume.
        rank: the rank that failed first; None if unknown.
    """

    incident_id: int
    kind: str
    reason: str
    start_ns: int
    end_ns: int | None
    rank: int | None
    step: int | None


def incidents_of(ledger: "Ledger", run_id: str) -> list[IncidentMark]:
    """Return the incidents of a run that the ledger holds."""
    return [
        IncidentMark(
            incident_id=one.incident_id or 0,
            kind=one.kind,
            reason=str(one.diagnosis.get("reason") or ""),
            start_ns=round(one.fault_at_s * 1e9),
            end_ns=None if one.resumed_at_s is None else round(one.resumed_at_s * 1e9),
            rank=one.rank,
            step=one.step,
        )
        for one in ledger.incidents(run_id)
    ]
