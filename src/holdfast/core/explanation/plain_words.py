"""Describe one incident, event or decision in a sentence that needs no glossary."""

import re
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.core import words
from holdfast.core.explanation.training_words import training_note
from holdfast.core.ledger.records import BY_TIME_LIMIT, Event, Incident

NO_REASON = ("Others", "Unknown")
"""Reasons of a diagnosis that are left out, because they add nothing to the root line."""
OWN_WORDS = re.compile(r"^(?:\S+Z )?holdfast: ")
"""Match the start of a line of the supervisor's own log."""
OBSERVED = ("ending", "rank_exited", "node_lost")
"""The kinds of the events that `observed_failure` reads."""
ASKED_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SENTENCE_LIMIT = 300
"""The most characters of a log line that is quoted in a sentence."""


def observed_failure(incident: Incident, events: Sequence[Event]) -> str:
    """Return the observed failure, such as "Rank 2 was killed (SIGKILL)".

    Args:
        incident: the incident of the run.
        events: the events of the incident's attempt; those of the kinds `OBSERVED` are enough.
    """
    decided = next(iter(incident.diagnosis.get("decided_by") or [""]))
    match incident.kind:
        case "anomaly":
            return _broken_loss(events)
        case "hang":
            return "The job stood still" if incident.rank is None else f"Rank {incident.rank} froze"
    node = lost_node(events)
    if node is not None and incident.rank is None:
        return f"Node {node} was lost"
    if incident.rank is None:
        if decided in ("observer-launcher", "launcher-killed"):
            return "The launcher of the ranks was killed or crashed"
        return "The job failed"
    return f"Rank {incident.rank} {_how_it_ended(incident.rank, events, decided)}"


def _broken_loss(events: Sequence[Event]) -> str:
    found = [event.data.get("anomaly") for event in events if event.kind == "ending"]
    anomaly = found[-1] if found else None
    if not isinstance(anomaly, Mapping):
        return "The loss was broken"
    if anomaly.get("kind") == "spike":
        return f"The loss spiked at step {anomaly.get('first_step')}"
    value = "NaN" if str(anomaly.get("value")) == "nan" else "infinite"
    rank = anomaly.get("rank")
    where = "" if rank is None else f" of rank {rank}"
    return f"The loss{where} became {value} at step {anomaly.get('first_step')}"


def _how_it_ended(rank: int, events: Sequence[Event], decided: str) -> str:
    ends = [event.data for event in events if event.kind == "rank_exited" and event.rank == rank]
    if decided == "observer-left" or not ends:
        return "ended before the others, with code 0" if decided == "observer-left" else "failed"
    number, code = ends[0].get("signal"), ends[0].get("exit_code")
    if not isinstance(number, int) or number <= 0:
        return f"ended with an error (exit code {code})"
    name = signal_name(number)
    if number == signal.SIGKILL:
        return f"was killed ({name})"
    return f"was ended by {name}" if number in ASKED_TO_END else f"crashed ({name})"


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def lost_node(events: Sequence[Event]) -> str | None:
    """Return the name of the first lost node in these events; None if no node was lost."""
    return next((str(one.data.get("node")) for one in events if one.kind == "node_lost"), None)


def cause(diagnosis: Mapping[str, Any]) -> str:
    """Return the cause that a diagnosis found, as a sentence.

    The sentence is "No cause was found." if the diagnosis has no cause.
    """
    root = diagnosis.get("root_line")
    statement = str(root.get("text", "")) if isinstance(root, Mapping) else ""
    statement = " ".join(OWN_WORDS.sub("", words.clean(statement)).split())
    statement = words.shorten(statement, SENTENCE_LIMIT).rstrip(".")
    reason = str(diagnosis.get("reason") or "")
    if reason in NO_REASON or not reason or statement.startswith(reason):
        return f"{statement}." if statement else "No cause was found."
    return f"{reason}: {statement}." if statement else f"{reason}."


def event_note(event: Event, run_id: str) -> str | None:
    """Return an event as a sentence.

    The result is None for an event that is already part of an incident or of the account.
    """
    data = event.data
    match event.kind:
        case "begun" if event.attempt > 0:
            return "A person resumed the run."
        case "supervisor_lost":
            return "The run was lost with its node, and was resumed."
        case "supervisor_followed":
            return "The supervisor ended; the next one took over, and training went on."
        case "rank_cut_off":
            return (
                f"Rank {event.rank} was cut off: {data.get('why')}. Training went on, without a watch over this "
                "rank."
            )
        case "stop_asked" | "rolled_back" | "not_rolled_back":
            return _asked_by_a_person(event)
        case "loss_accepted":
            return (
                f"The loss jumped at step {data.get('first_step')}, and a restart would not mend that: "
                "training went on from there."
            )
        case "proposal":
            return f"{data.get('text')} This waits for `holdfast runs approve {run_id}`."
        case "approved":
            return "A person approved the proposal."
        case "withdrawn":
            return f"The proposal was withdrawn: {data.get('why')}"
        case "observed":
            return f"{data.get('text')} Nothing was done, since the mode is observe."
        case "notified":
            return f"A message was sent about {_incidents(data)}."
        case "notify_failed":
            return f"The message about {_incidents(data)} could not be sent: {data.get('why')}"
    return _node_note(event) or training_note(event)


def _node_note(event: Event) -> str | None:
    """Return an event about the nodes as one or more sentences; None for any other event."""
    data = event.data
    match event.kind:
        case "nodes_tested":
            return _tested(data)
        case "nodes_not_tested":
            return f"The tests of the nodes ended without a result: {data.get('why')}"
        case "nodes_marked":
            return " ".join(map(str, _listed(data, "sentences")))
        case "nodes_readmitted":
            names = ", ".join(map(str, _listed(data, "nodes")))
            return f"There were too few other nodes: the run went on with {names}, though cordoned."
        case "node_signal":
            return f"Node {data.get('node')}: {data.get('text')} ({data.get('source')})."
        case "notice":
            return f"Node {data.get('node')} is to be taken away: {data.get('text')}{_left(data.get('left_s'))}."
        case "handed_over":
            return (
                f"The node of the supervisor was ending. Node {data.get('node')} took over, and training "
                "went on."
            )
        case "node_cordoned":
            return f"Node {data.get('node')} was cordoned: {data.get('why')}."
        case "node_set_aside":
            return f"Node {data.get('node')} was left out from then on: {data.get('why')}."
        case "cannot_see" if data.get("why"):
            return f"{_begun(data.get('detector'))} could not be observed: {data.get('why')}."
        case "cannot_see":
            return f"{_begun(data.get('detector'))} could be observed again."
    return None


def _left(left_s: object) -> str:
    if not isinstance(left_s, int | float):
        return ""
    return f", in {words.duration(max(0.0, float(left_s))).replace(words.NBSP, ' ')}"


def _begun(name: object) -> str:
    text = str(name)
    return f"{text[:1].upper()}{text[1:]}"


def _asked_by_a_person(event: Event) -> str | None:
    by, data = event.data.get("by"), event.data
    if event.kind == "stop_asked":
        return _stop_requested(str(by))
    if event.kind == "not_rolled_back":
        return f"{by} asked to go back to an earlier checkpoint. {data.get('why')}"
    if by is None:  # a part of the incident of a broken loss
        return None
    return f"{by} had the training go back to the checkpoint of step {data.get('to_step')}."


def _stop_requested(by: str) -> str:
    if by.startswith(BY_TIME_LIMIT):
        return f"The run was to save its state and stop, since {by} was near."
    return f"{by} asked the run to stop."


def _tested(data: Mapping[str, Any]) -> str:
    """Return what the tests of the nodes found, as sentences."""
    nodes = [one for one in _listed(data, "nodes") if isinstance(one, Mapping)]
    cordoned = _listed(data, "cordoned")
    found = [
        f"Node {one.get('node')} {one.get('evidence')}"
        + (" and was cordoned." if one.get("node") in cordoned else ".")
        for one in nodes
        if one.get("outcome") == "bad"
    ]
    if not found:
        found = [
            "None was found to be bad."
            if data.get("can_tell")
            else "The tests cannot tell which one is bad."
        ]
    return " ".join([f"Tested {words.plainly(len(nodes), 'node')}.", *found])


def _listed(data: Mapping[str, Any], name: str) -> list[Any]:
    found = data.get(name)
    return found if isinstance(found, list) else []


def _incidents(data: Mapping[str, Any]) -> str:
    found = data.get("incidents")
    count = len(found) if isinstance(found, list) else 0
    if count == 0:
        return "saves" if "saves_until_s" in data and not data.get("proposals") else "a proposal"
    return "one incident" if count == 1 else f"{count} incidents"


RULES: Mapping[str, str] = {
    "stop-asked": "a person has requested a stop",
    "kept-launcher": "an attempt that failed before its first step below a kept launcher gets a new launcher",
    "work-done": "a job that failed only after its work was done is not restarted",
    "not-mended": "a cause that a restart does not mend ends the run",
    "rollback-missed": "a broken loss ends the run if the job does not go back to the checkpoint that a rollback left",
    "same-root": "the same root at the same place, without progress since, ends the run",
    "budget-spent": "too many restarts in a row without progress end the run",
    "observe": "in the mode observe nothing is restarted",
    "replay": "the steps of a broken loss run again, to find the cause",
    "restart": "a restart helps, and comes at once after progress",
    "restart-after-wait": "a restart helps, after a wait that grows with each restart without progress",
    "await-teardown": "when a rank fails, the other ranks are stopped",
    "kill-frozen": "a job that stands still is ended",
    "leave-broken-state": "a broken loss ends the attempt, and the run goes back to a healthy checkpoint",
    "exited": "a job that has ended is diagnosed",
    "approved": "a person has approved the proposal",
    "nodes-missing": "a run that has waited too long for nodes ends",
    "node-confirmed": "a node that two independent signals call faulty is left, with the state saved, for a spare",
    "node-leaving_at": "a node that will be taken away is left, with the state saved",
    "queued-again": "a run that lacks nodes which cannot come back is queued again without them",
    "go-on": "a spike that came again, or without a healthy checkpoint, is accepted",
    "propose": "in the mode propose a running job is touched only after an approval",
    "note": "in the mode observe a running job is not touched",
}
"""The meaning of each rule of the policy, by the rule's name in the record of a decision."""
