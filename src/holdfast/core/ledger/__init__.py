"""Keep the records of runs, attempts, events, incidents, checkpoints, evaluations and nodes.

The ledger is a database. The modules:

| module | one idea |
|---|---|
| `records` | the records, one frozen dataclass for each table |
| `schema` | the tables |
| `migrations` | the changes of the tables from version to version |
| `engine` | opening, creating and migrating the database |
| `ledger` | the operations on the records, together with the modules named `…_table` |
| `remembered` | the operations on memories of incidents, learned rules and good runs |
| `reading` | queries with a time limit |
| `ledger_thread` | a thread that runs the operations, so that an event loop need not wait |

Only the supervisor, `holdfast eval`, the command line and the console write to the ledger. Ranks
send events over the control channel instead.
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
