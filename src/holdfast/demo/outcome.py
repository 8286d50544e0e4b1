"""Match each fault of a demonstration with its detection and the action, from the run's records."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.core.accounting import IncidentSummary
from holdfast.core.explanation import IncidentStory, RunStory
from holdfast.core.ledger import Event
from holdfast.core.left_out import in_words


@dataclass(frozen=True, kw_only=True)
class FaultRow:
    """One injected fault, with the incidents between this fault and the next one.

    Attributes:
        fault: the name of the fault.
        step: the last step that was completed before the fault.
        injected: the details of the injected fault, as a clause.
        seen_as: the failure that Holdfast observed.
        node: the node of the rank at fault, if one was found.
        rank: the rank at fault, if one was found.
        action: the action, in a few words.
        seconds_to_detect: the time from the fault to its detection.
        seconds_to_restart: the time from the detection to the next completed step; None if there
            was no such step.
        rank_seconds_lost: the cost of the fault, in seconds times ranks; these are GPU-seconds if
            each rank has a GPU.
        incidents: the numbers of the incidents.
    """

    fault: str
    step: int
    injected: str
    seen_as: str
    node: str | None
    rank: int | None
    action: str
    seconds_to_detect: float
    seconds_to_restart: float | None
    rank_seconds_lost: float
    incidents: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the row as a dictionary for JSON."""
        return asdict(self)


def fault_rows(story: RunStory, events: Sequence[Event]) -> list[FaultRow]:
    """Return a row for each injected fault that led to an incident, in the order of the faults.

    Args:
        story: the story of the run.
        events: the events of the run, in the order of their records.
    """
    groups: list[list[tuple[IncidentSummary, IncidentStory]]] = []
    for pair in zip(story.summary.incidents, story.incidents, strict=True):
        if pair[0].injected:
            groups.append([pair])
        elif groups:
            groups[-1].append(pair)
    return [_row(group, story, events) for group in groups]


def _row(
    group: Sequence[tuple[IncidentSummary, IncidentStory]],
    story: RunStory,
    events: Sequence[Event],
) -> FaultRow:
    cost, incident = group[0]
    injected = cost.injected[-1]
    costs = [one for one, _ in group]
    ends_s = [one.incident.resumed_at_s for one in costs if one.incident.resumed_at_s is not None]
    lost = story.summary.lost_time
    return FaultRow(
        fault=str(injected.get("fault")),
        step=int(injected.get("step", 0)),
        injected=str(injected.get("detail")),
        seen_as=incident.what,
        node=incident.node,
        rank=incident.rank,
        action=_action(costs, events),
        seconds_to_detect=cost.seconds_to_detect,
        seconds_to_restart=max(ends_s) - cost.incident.detected_at_s if ends_s else None,
        rank_seconds_lost=sum(lost.incident_s(one.number) for one in costs),
        incidents=tuple(one.number for one in costs),
    )


def _action(costs: Sequence[IncidentSummary], events: Sequence[Event]) -> str:
    """Return the action that was taken on the incidents of one fault, as a clause."""
    last = costs[-1].incident
    if last.action != "restart":
        return "the run was ended" if last.action else "nothing was done"
    attempts = {one.incident.attempt for one in costs}
    done = []
    for event in events:
        if event.attempt not in attempts:
            continue
        if event.kind == "nodes_tested" and event.data.get("cordoned"):
            done.append(f"{', '.join(map(str, event.data['cordoned']))} found bad and replaced")
        if event.kind == "leave_out":
            done.append(f"{in_words(event.data['first'], event.data['last'])} left out")
    passed = ", ".join(str(over.step) for one in costs for over in one.passed_over)
    over = f", since that of step {passed} is damaged" if passed else ""
    where = f"the checkpoint of step {last.restored_step}" if last.restored_step else "the start"
    return "; ".join([f"went on from {where}{over}", *done])
