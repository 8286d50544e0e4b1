"""Choose the action on a node from a finding about it, by a table without side effects.

A job that works is disturbed only in two cases: two independent signals show that a node is faulty,
or a notice states the time at which a node will be taken away. If a single signal appears while the
job works, it is recorded, and counts at the next failure.
"""

from dataclasses import dataclass
from typing import Literal

Finding = Literal["suspect", "faulty", "confirmed", "leaving", "leaving_at", "cannot_launch"]
"""The class of a finding.

- `suspect`: there are only corroborating signals.
- `faulty`: one source has a decisive signal.
- `confirmed`: a second, independent source agrees with a decisive signal.
- `leaving`: there is a notice that states no time.
- `leaving_at`: there is a notice that states a time.
- `cannot_launch`: the launcher could not be started on the node.
"""
Job = Literal["healthy", "failed"]
NodePlan = Literal["record", "test", "exclude", "move"]
"""The action on a node.

- `record`: only record the finding.
- `test`: test the nodes before the next launch.
- `exclude`: do not launch anything on the node any more.
- `move`: save the state now, and continue without the node.
"""

_PLANS: dict[tuple[Finding, Job], NodePlan] = {
    ("suspect", "healthy"): "record",
    ("suspect", "failed"): "test",
    ("faulty", "healthy"): "record",
    ("faulty", "failed"): "exclude",
    ("confirmed", "healthy"): "move",
    ("confirmed", "failed"): "exclude",
    ("leaving", "healthy"): "exclude",
    ("leaving", "failed"): "exclude",
    ("leaving_at", "healthy"): "move",
    ("leaving_at", "failed"): "exclude",
    ("cannot_launch", "failed"): "exclude",
}
"""The action for each finding, if a spare is free and no other node has such a finding."""


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """The circumstances in which a finding is made."""

    has_spare: bool
    """True if a free node can take the place of this node."""
    is_single: bool = False
    """True if the run has only one node."""
    is_due: bool = False
    """True if the state must be saved now, before the node is taken away."""
    is_only_one: bool = True
    """False if other nodes of the job have findings of the same kind.

    Such findings probably have a common cause.
    """


def plan_for(finding: Finding, job: Job, circumstances: Circumstances) -> NodePlan:
    """Return the action on a node."""
    plan = _PLANS.get((finding, job), "record")
    if plan == "test" and not circumstances.is_only_one:
        return "record"
    if plan == "move":
        if circumstances.has_spare or (finding == "leaving_at" and circumstances.is_due):
            return "move"
        plan = "exclude" if finding == "leaving_at" else "record"
    if plan == "exclude" and circumstances.is_single and not circumstances.has_spare:
        return "record"
    return plan
