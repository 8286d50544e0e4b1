"""Compute the cost of each incident and of the checkpoints."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast.core.accounting.records import (
    AttemptCheckpoints,
    CheckpointSummary,
    IncidentSummary,
    PassedOver,
)
from holdfast.core.accounting.survival import UNUSABLE_STATES
from holdfast.core.ledger.records import BY_TIME_LIMIT, Attempt, Checkpoint, Event, Incident


def interventions(
    attempts: Sequence[Attempt], incidents: Sequence[Incident], events: Sequence[Event]
) -> int:
    """Return the number of times that a person stopped the run or started the run again.

    A new attempt counts as started by a person (`run --resume`), unless the previous attempt ended
    in an incident whose action is `restart`.
    """
    stops = sum(
        event.kind == "stop_asked" and not str(event.data.get("by")).startswith(BY_TIME_LIMIT)
        for event in events
    )
    restarted = {incident.attempt for incident in incidents if incident.action == "restart"}
    by_hand = sum(attempt.number not in restarted for attempt in attempts[:-1])
    return stops + by_hand


def incident_summaries(
    incidents: Sequence[Incident], events: Sequence[Event], ranks: int | None
) -> tuple[IncidentSummary, ...]:
    """Summarize each incident: the fault, times, steps lost, nodes, and checkpoints passed over.

    Args:
        incidents: the incidents of a run, in their order.
        events: the events of the run.
        ranks: the number of the run's ranks; None if unknown.
    """
    faults = [event for event in events if event.kind == "fault_injected"]
    restored = _restored(events)
    about_nodes = [
        event for event in events if event.kind in ("launched", "node_lost", "nodes_tested")
    ]
    return tuple(
        replace(
            _incident(number, incident, faults, restored),
            node=_node(incident, about_nodes, ranks or 0),
            cordoned=_cordoned(incident, about_nodes),
        )
        for number, incident in enumerate(incidents, start=1)
    )


def _node(incident: Incident, events: Sequence[Event], ranks: int) -> str | None:
    """Return the name of the node that an incident concerns; None if the node is unknown.

    If a rank is at fault, that is the rank's node in the last launch up to the incident's attempt.
    Otherwise that is the first node that was reported as lost.
    """
    attempt, rank = incident.attempt, incident.rank
    if rank is None:
        lost = [one for one in events if (one.kind, one.attempt) == ("node_lost", attempt)]
        return str(lost[0].data.get("node")) if lost else None
    launches = [
        one.data.get("nodes") for one in events if one.kind == "launched" and one.attempt <= attempt
    ]
    names = list(launches[-1].values()) if launches and isinstance(launches[-1], Mapping) else []
    if not names or ranks % len(names) or rank >= ranks:
        return None
    return str(names[rank // (ranks // len(names))])


def _cordoned(incident: Incident, events: Sequence[Event]) -> tuple[str, ...]:
    found: list[str] = []
    for event in events:
        if (event.kind, event.attempt) == ("nodes_tested", incident.attempt):
            names = event.data.get("cordoned")
            found += map(str, names) if isinstance(names, list) else ()
    return tuple(found)


def _incident(
    number: int,
    incident: Incident,
    faults: Sequence[Event],
    restores: Mapping[int, Mapping[str, Any]],
) -> IncidentSummary:
    injected = [
        event
        for event in faults
        if event.attempt == incident.attempt and event.at_s <= incident.detected_at_s
    ]
    fault_at_s = max((event.at_s for event in injected), default=incident.fault_at_s)
    following = min((attempt for attempt in restores if attempt > incident.attempt), default=None)
    restored = {} if following is None else restores[following]
    steps_lost = None
    if incident.step is not None and incident.restored_step is not None:
        steps_lost = max(0, incident.step - incident.restored_step)
    seconds_to_restart = None
    if incident.resumed_at_s is not None:
        seconds_to_restart = max(0.0, incident.resumed_at_s - incident.detected_at_s)
    return IncidentSummary(
        number=number,
        incident=incident,
        injected=tuple(event.data for event in injected),
        fault_at_s=fault_at_s,
        seconds_to_detect=max(0.0, incident.detected_at_s - fault_at_s),
        seconds_to_restart=seconds_to_restart,
        steps_lost=steps_lost,
        restore_s=_seconds(restored.get("restore_s")),
        passed_over=tuple(
            PassedOver(
                step=int(passed.get("step", 0)),
                path=str(passed.get("path", "")),
                reason=str(passed.get("reason", "")),
            )
            for passed in restored.get("passed_over", ())
        ),
    )


def _restored(events: Sequence[Event]) -> dict[int, Mapping[str, Any]]:
    """Return, for each attempt, the data of the `restored` event of the lowest rank.

    An event without a rank counts as lower than rank 0. If a rank has two events, the first counts.
    """
    first: dict[int, tuple[int, Mapping[str, Any]]] = {}
    for event in events:
        if event.kind == "restored":
            rank = -1 if event.rank is None else event.rank
            if event.attempt not in first or rank < first[event.attempt][0]:
                first[event.attempt] = rank, event.data
    return {attempt: data for attempt, (_, data) in first.items()}


def _seconds(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def checkpoint_summary(checkpoints: Sequence[Checkpoint], wall_s: float) -> CheckpointSummary:
    """Return counts, stalls and sizes of the checkpoints, for the run and for each attempt.

    `wall_s` is the wall time of the run, in seconds.
    """
    numbers = sorted({checkpoint.attempt for checkpoint in checkpoints})
    total_stall_s = sum(checkpoint.stall_s for checkpoint in checkpoints)
    return CheckpointSummary(
        count=len(checkpoints),
        damaged=sum(checkpoint.state in UNUSABLE_STATES for checkpoint in checkpoints),
        total_stall_s=total_stall_s,
        share_of_wall=total_stall_s / wall_s if wall_s > 0 else 0.0,
        overall=_stalls(0, checkpoints) if checkpoints else None,
        by_attempt=tuple(
            _stalls(
                number, [checkpoint for checkpoint in checkpoints if checkpoint.attempt == number]
            )
            for number in numbers
        ),
    )


def _stalls(attempt: int, checkpoints: Sequence[Checkpoint]) -> AttemptCheckpoints:
    stalls_s = [checkpoint.stall_s for checkpoint in checkpoints]
    steps = [checkpoint.step for checkpoint in checkpoints]
    return AttemptCheckpoints(
        attempt=attempt,
        count=len(checkpoints),
        first_step=min(steps),
        last_step=max(steps),
        size_bytes=checkpoints[-1].size_bytes,
        total_stall_s=sum(stalls_s),
        mean_stall_s=statistics.fmean(stalls_s),
        median_stall_s=statistics.median(stalls_s),
        max_stall_s=max(stalls_s),
    )
