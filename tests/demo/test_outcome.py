"""The table of faults, detections and actions, from the records of a run alone."""

import pytest

from holdfast.core.accounting.summary import account
from holdfast.core.explanation import story_of
from holdfast.core.ledger import Attempt, Event, Incident, Run
from holdfast.demo.outcome import fault_rows


def event(kind, at_s, attempt, **data):
    return Event(run_id="r", attempt=attempt, at_s=at_s, kind=kind, data=data)


def incident(attempt, at_s, *, kind="exit", rank=1, action="restart", restored_step=24):
    return Incident(
        run_id="r",
        attempt=attempt,
        kind=kind,
        rank=rank,
        step=30,
        fault_at_s=at_s - 1.0,
        detected_at_s=at_s,
        diagnosis={},
        action=action,
        restored_step=restored_step if action == "restart" else None,
        resumed_at_s=at_s + 4.0 if action == "restart" else None,
    )


def injected(attempt, at_s, fault):
    return event("fault_injected", at_s, attempt, fault=fault, detail="it breaks", step=29)


@pytest.fixture
def rows():
    events = [
        event("launched", 0.0, 1, nodes={"a": "n1", "b": "n2"}),
        event("restored", 1.0, 1, step=0, world_size=2),
        injected(1, 9.0, "Bad node"),
        event("nodes_tested", 11.0, 1, cordoned=["n2"]),
        event("launched", 12.0, 2, nodes={"a": "n1", "c": "n3"}),
        injected(2, 19.5, "Loss became NaN"),
        event("leave_out", 21.0, 3, first=30, last=32),
        *(event("restored", 10.0 * one, one, step=24) for one in (2, 3, 4)),
        injected(4, 39.0, "Checkpoint damaged"),
        event("restored", 41.0, 5, step=24, passed_over=[{"step": 36, "reason": "damaged"}]),
        injected(5, 49.0, "Rank killed"),
    ]
    incidents = [
        incident(1, 10.0),
        incident(2, 20.0, kind="anomaly", rank=None),
        incident(3, 30.0, kind="anomaly", rank=None, restored_step=0),
        incident(4, 40.0),
        incident(5, 50.0, action="stop"),
    ]
    run = Run(
        run_id="r",
        state="failed",
        command=["python"],
        options={"nnodes": 2},
        cwd="/",
        host="h",
        pid=1,
        started_at_s=0.0,
        ended_at_s=60.0,
    )
    attempts = [Attempt(run_id="r", number=one, started_at_s=10.0 * one) for one in range(1, 6)]
    summary = account(
        run=run, attempts=attempts, events=events, incidents=incidents, checkpoints=[], steps=[]
    )
    return {row.fault: row for row in fault_rows(story_of(summary, events), events)}


def test_each_fault_has_a_row_with_its_node_and_its_seconds(rows):
    assert list(rows) == ["Bad node", "Loss became NaN", "Checkpoint damaged", "Rank killed"]
    bad = rows["Bad node"]
    assert (bad.rank, bad.node, bad.step, bad.injected) == (1, "n2", 29, "it breaks")
    assert (bad.seconds_to_detect, bad.seconds_to_restart) == (1.0, 4.0)
    assert rows["Checkpoint damaged"].node == "n3"


def test_what_was_done_is_said_in_plain_words(rows):
    assert (
        rows["Bad node"].action
        == "went on from the checkpoint of step 24; n2 found bad and replaced"
    )
    assert rows["Loss became NaN"].action == "went on from the start; batches 30 to 32 left out"
    assert rows["Checkpoint damaged"].action == (
        "went on from the checkpoint of step 24, since that of step 36 is damaged"
    )
    assert rows["Rank killed"].action == "the run was ended"
    assert rows["Rank killed"].seconds_to_restart is None


def test_an_incident_without_a_fault_of_its_own_belongs_to_the_fault_before(rows):
    """A broken loss may break once more before its batches are left out."""
    found = rows["Loss became NaN"]
    assert found.incidents == (2, 3)
    assert found.seconds_to_restart == 14.0
