"""The one memory: runs, attempts, events, incidents, checkpoints, evaluations, priors, nodes.

Enter records (frozen dataclasses, `records`), leave the same records, in the order they happened. `schema`
holds the tables, `migrations` how a ledger of an earlier version becomes this one, `engine` how it is
opened, `ledger` the operations.
Only the supervisor, `holdfast eval` and the command line write here; ranks send events over the control channel.
"""

from holdfast.core.ledger.ledger import Ledger
from holdfast.core.ledger.records import (
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
    "Attempt",
    "Checkpoint",
    "EvaluationRecord",
    "Event",
    "Incident",
    "Lead",
    "Ledger",
    "MeetingPlace",
    "NodeRecord",
    "Prior",
    "Run",
    "Verdict",
]
