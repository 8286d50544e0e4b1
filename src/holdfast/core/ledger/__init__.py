"""The ledger: runs, attempts, events, incidents, checkpoints, evaluations, priors, nodes.

The ledger stores records (frozen dataclasses, `records`) and returns them in order. `schema` holds
the tables, `migrations` the changes between versions, `engine` the opening and the migration of the
database, and `ledger` the operations.

`ledger_thread` runs the operations in a thread beside an event loop. Only the supervisor, `holdfast
eval`, the command line and the console write to the ledger. Ranks send events over the control
channel instead.
"""

from holdfast.core.ledger.engine import downgrade_ledger
from holdfast.core.ledger.ledger import Ledger
from holdfast.core.ledger.ledger_thread import LedgerThread
from holdfast.core.ledger.reading import TooSlow
from holdfast.core.ledger.records import (
    ActionRecord,
    Attempt,
    Checkpoint,
    EvaluationRecord,
    Event,
    Incident,
    Lead,
    MeetingPlace,
    NodeRecord,
    Prior,
    Run,
    Verdict,
)

__all__ = [
    "ActionRecord",
    "Attempt",
    "Checkpoint",
    "EvaluationRecord",
    "Event",
    "Incident",
    "Lead",
    "Ledger",
    "LedgerThread",
    "MeetingPlace",
    "NodeRecord",
    "Prior",
    "Run",
    "TooSlow",
    "Verdict",
    "downgrade_ledger",
]
