"""The functions that the console's caller passes in: everything that `ui` must not import."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from holdfast.core.ledger import Ledger

ActionName = Literal[
    "confirm", "correct", "stop", "restart", "approve", "roll-back", "cordon", "return"
]


@dataclass(frozen=True, kw_only=True)
class Order:
    """One action that a person has ordered."""

    target: str
    """The id of the run or of the incident, or the name of the node."""
    why: str
    """The reason of a cordon, the true cause of an incident, the step to go back to, or nothing."""
    by: str
    """The person."""


@dataclass(frozen=True, kw_only=True)
class ClusterReport:
    """The trace report of the ledger: every attempt of every run is a job."""

    findings: Mapping[str, Any]
    """The object of the report's `findings.json`."""
    files: Mapping[str, bytes]
    """The drawing of each figure as `NAME.svg`, and the numbers of each figure as `NAME.csv`."""


@dataclass(frozen=True, kw_only=True)
class Backend:
    """The console's records, and its actions."""

    ledger: Ledger
    home: Path
    """`$HOLDFAST_HOME`, above the journals and the logs of the runs."""
    state_of: Callable[[str, str, str], str]
    """Returns a run's state (`lost` included) from its id, its state in the ledger and its host."""
    actions: Mapping[ActionName, Callable[[Order], str]]
    """Each carries out an order and returns a sentence; raises `HoldfastError` or `OSError`."""
    reasons: Callable[[], Sequence[str]]
    """Returns the names of the causes, for a correction."""
    healthy_steps: Callable[[str], Sequence[int]]
    """Returns the steps of the healthy checkpoints to which a run can go back, newest first."""
    profile_of: Callable[[str], Sequence[Mapping[str, Any]]]
    """Returns the profile curves of a run: `metric`, `unit`, `meaning`, `series`, and equally long
    `times_s`, `low`, `mean` and `high`; raises `HoldfastError`."""
    cluster_report: Callable[[], ClusterReport]
    """Returns the trace report of the ledger; may take minutes; raises `HoldfastError`."""
    me: str
    """The name of the first person who signs in."""
