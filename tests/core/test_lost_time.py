"""Test the account of every rank's seconds: one cause each, and the incident that cost them."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.accounting import LOST_CAUSES, gpu_hours
from holdfast.core.accounting.summary import account
from holdfast.core.ledger import Attempt, Checkpoint, Event, Incident, Run
from holdfast.core.telemetry import StepRecord

RANKS = 4


def run(state="completed", ended_at_s=100.0, **options):
    return Run(
        run_id="r",
        state=state,
        command=["python"],
        options={"nproc": RANKS, **options},
        cwd="/",
        host="h",
        pid=1,
        started_at_s=0.0,
        ended_at_s=ended_at_s,
    )


def attempt(number, started_at_s, start_step=None, ended_at_s=None):
    return Attempt(
        run_id="r",
        number=number,
        started_at_s=started_at_s,
        start_step=start_step,
        ended_at_s=ended_at_s,
    )


def steps(number, first, last, began_s, step_s=1.0):
    return [
        StepRecord(
            attempt=number,
            rank=0,
            step=step,
            at_s=began_s + (step - first + 1) * step_s,
            step_s=step_s,
            loss=None,
            metrics={},
        )
        for step in range(first, last + 1)
    ]


def incident(number, fault_at_s, detected_at_s, action="restart"):
    return Incident(
        run_id="r",
        attempt=number,
        kind="exit",
        rank=1,
        step=1,
        fault_at_s=fault_at_s,
        detected_at_s=detected_at_s,
        diagnosis={},
        action=action,
    )


def event(kind, number, at_s, rank=None, **data):
    return Event(run_id="r", attempt=number, at_s=at_s, kind=kind, rank=rank, data=data)


def decision(number, at_s, wait_s=0.0):
    finding, plan = {"kind": "diagnosed"}, {"action": "restart", "wait_s": wait_s}
    return event("decision", number, at_s, finding=finding, plan=plan)


def lost(*, of=None, attempts=(), events=(), incidents=(), checkpoints=(), journal=()):
    found = account(
        run=of or run(),
        attempts=attempts,
        events=events,
        incidents=incidents,
        checkpoints=checkpoints,
        steps=journal,
    )
    assert found.lost_time.total_s == pytest.approx(found.wall_s * found.lost_time.ranks)
    return found.lost_time


ONE_FAULT = {
    "attempts": [attempt(1, 1.0, 0, ended_at_s=43.0), attempt(2, 46.5, 20)],
    "journal": [*steps(1, 1, 30, 10), *steps(2, 21, 60, 50)],
    "incidents": [incident(1, 40.5, 42.0)],
    "events": [
        decision(1, 43.5, wait_s=2.0),
        event("restored", 2, 49.0, rank=0, restore_s=1.0),
        event("restored", 2, 49.5, rank=3, restore_s=2.0),
    ],
}
"""Fault at 40.5 s, detected 42, ended 43, decided 43.5, restarted 46.5, restored 49, training 50.
"""


def test_each_stretch_of_a_restart_has_its_cause():
    found = lost(**ONE_FAULT)
    (usual, last) = found.by_rank
    assert (usual.ranks, last.ranks) == ((0, 1, 2), (3,))
    assert usual.seconds == pytest.approx(
        {
            "start": 10.0
            + 1.0
            + 1.5,  # of the first attempt; between the wait and the processes; until the restore
            "trained": 60.0,
            "steps_again": 10.5,
            "detection": 1.5,
            "teardown": 1.0,
            "diagnosis": 0.5,
            "backoff": 2.0,
            "restore": 1.0,
            "first_step": 1.0,
            "after_end": 10.0,
        }
    )
    assert last.seconds["restore"] == pytest.approx(2.0)
    assert last.seconds["first_step"] == pytest.approx(0.5)


def test_an_incident_costs_what_lies_between_its_fault_and_the_next_step_and_the_steps_made_again():
    found = lost(**ONE_FAULT)
    assert found.incident_s(1) == pytest.approx(RANKS * ((50.0 - 40.5) + 10.5))
    assert set(found.by_incident[1]).isdisjoint({"trained", "after_end", "saves", "sections"})
    assert gpu_hours(3600.0) == 1.0
    assert found.unexplained_share == 0.0


def test_several_nodes_wait_for_nodes_and_one_node_starts():
    waiting = lost(of=run(nnodes=2), **ONE_FAULT)
    assert waiting.by_rank[0].seconds["nodes_missing"] == pytest.approx(1.0 + 1.0)


def test_tests_of_the_nodes_before_a_start_are_their_own_cause_and_cost_the_incident():
    tests = [event("nodes_test_began", 1, 45.6), event("nodes_tested", 1, 46.2)]
    events = [*tests, *ONE_FAULT["events"]]
    found = lost(of=run(nnodes=2), **{**ONE_FAULT, "events": events})
    assert found.by_rank[0].seconds["node_tests"] == pytest.approx(0.6)
    assert found.by_incident[1]["node_tests"] == pytest.approx(RANKS * 0.6)
    assert found.by_rank[0].seconds["nodes_missing"] == pytest.approx(1.0 + 0.4)
    assert found.total_s == pytest.approx(lost(of=run(nnodes=2), **ONE_FAULT).total_s)


def test_tests_whose_supervisor_died_end_with_that_supervisor():
    tests = [event("nodes_test_began", 1, 45.6), event("supervisor_followed", 1, 46.0)]
    fault = {**ONE_FAULT, "events": [*tests, *ONE_FAULT["events"]]}
    assert lost(of=run(nnodes=2), **fault).by_rank[0].seconds["node_tests"] == pytest.approx(0.4)
    tests = [event("nodes_test_began", 0, -1.0), *ONE_FAULT["events"]]
    fault = {**ONE_FAULT, "events": tests}
    assert "node_tests" not in lost(of=run(nnodes=2), **fault).by_incident[1]


def test_tests_before_the_first_launch_that_go_on_are_tests():
    found = lost(of=run(nnodes=2), events=[event("nodes_test_began", 0, 30.0)])
    assert found.by_cause == pytest.approx(
        {"nodes_missing": RANKS * 30.0, "node_tests": RANKS * 70.0}
    )


def test_steps_that_a_later_rollback_undid_are_the_later_incidents():
    found = lost(
        attempts=[
            attempt(1, 0.0, 0, ended_at_s=21.0),
            attempt(2, 21.0, 20, ended_at_s=41.0),
            attempt(3, 41.0, 10),
        ],
        journal=[*steps(1, 1, 20, 0), *steps(2, 21, 30, 30), *steps(3, 11, 60, 50)],
        incidents=[incident(1, 20.0, 20.5), incident(2, 40.0, 40.5)],
        events=[decision(1, 21.0), decision(2, 41.0)],
    )
    assert found.by_incident[2]["steps_again"] == pytest.approx(RANKS * 20.0)
    assert "steps_again" not in found.by_incident[1]


def test_the_time_until_a_person_resumes_a_run_is_no_incidents():
    found = lost(
        attempts=[attempt(1, 0.0, 0, ended_at_s=12.0), attempt(2, 61.0, 10)],
        journal=[*steps(1, 1, 10, 0), *steps(2, 11, 40, 62)],
        incidents=[incident(1, 11.0, 11.5, action="stop")],
        events=[decision(1, 12.5), event("begun", 1, 60.0)],
    )
    assert found.by_cause["not_running"] == pytest.approx(RANKS * 47.5)
    assert found.incident_s(1) == pytest.approx(RANKS * (1.0 + 0.5 + 0.5 + 0.5))


def test_a_run_that_was_lost_was_not_running_until_its_resume():
    found = lost(
        attempts=[attempt(1, 0.0, 0, ended_at_s=60.0), attempt(2, 61.0, 10)],
        journal=[*steps(1, 1, 10, 0), *steps(2, 11, 40, 62)],
        events=[event("supervisor_lost", 1, 60.0)],
    )
    assert found.by_cause["not_running"] == pytest.approx(RANKS * 50.0)


def test_a_run_that_failed_for_good_has_its_end_after_the_decision():
    found = lost(
        of=run("failed"),
        attempts=[attempt(1, 0.0, 0, ended_at_s=12.0)],
        journal=steps(1, 1, 10, 0),
        incidents=[incident(1, 11.0, 11.5, action="stop")],
        events=[decision(1, 12.5)],
    )
    assert found.by_cause["after_end"] == pytest.approx(RANKS * 87.5)
    assert found.by_incident[1]["diagnosis"] == pytest.approx(RANKS * 0.5)


def test_what_no_record_explains_is_said_to_be_unexplained():
    found = lost(
        attempts=[attempt(1, 0.0, 0, ended_at_s=12.0), attempt(2, 40.0, 10)],
        journal=[*steps(1, 1, 10, 0), *steps(2, 11, 40, 62)],
        incidents=[incident(1, 11.0, 11.5)],
    )
    assert found.by_cause["unexplained"] == pytest.approx(RANKS * 28.0)
    assert found.unexplained_share == pytest.approx(0.28)


def test_a_save_and_a_section_between_two_steps_are_told_apart():
    late = [*steps(1, 1, 2, 0), *steps(1, 3, 4, 12)]
    saved = Checkpoint(
        run_id="r",
        attempt=1,
        step=2,
        path="p",
        state="written",
        size_bytes=1,
        stall_s=4.0,
        committed_at_s=5.0,
    )
    found = lost(attempts=[attempt(1, 0.0, 0)], journal=late, checkpoints=[saved])
    assert found.by_cause["saves"] == pytest.approx(RANKS * 4.0)
    assert found.by_cause["sections"] == pytest.approx(RANKS * 6.0)


def test_a_run_that_waits_for_its_first_nodes_says_so():
    found = lost(of=run(nnodes=2))
    assert found.by_cause == pytest.approx({"nodes_missing": RANKS * 100.0})


def test_an_attempt_of_a_running_run_before_its_first_step_is_starting():
    found = lost(
        of=run("running", ended_at_s=None),
        attempts=[attempt(1, 0.0, 0, ended_at_s=12.0), attempt(2, 13.0)],
        journal=steps(1, 1, 10, 0),
        incidents=[incident(1, 11.0, 11.5)],
        events=[decision(1, 12.5), event("started", 2, 30.0)],
    )
    assert found.by_incident[1]["start"] == pytest.approx(RANKS * 17.5)
    assert found.unexplained_share == 0.0


TIMES = st.floats(min_value=-50, max_value=200, allow_nan=False)
NUMBERS = st.integers(min_value=1, max_value=4)


@st.composite
def histories(draw):
    """Return any records: in no order, with gaps, with clocks that were set back."""
    numbers = draw(st.sets(NUMBERS))
    attempts = [
        attempt(one, draw(TIMES), draw(st.none() | NUMBERS), draw(st.none() | TIMES))
        for one in sorted(numbers)
    ]
    journal = [
        StepRecord(
            attempt=draw(NUMBERS),
            rank=0,
            step=draw(st.integers(min_value=1, max_value=9)),
            at_s=draw(TIMES),
            step_s=draw(st.floats(min_value=-1, max_value=30)),
            loss=None,
            metrics={},
        )
        for _ in range(draw(st.integers(min_value=0, max_value=12)))
    ]
    incidents = [
        incident(
            draw(NUMBERS), draw(TIMES), draw(TIMES), draw(st.sampled_from(["", "restart", "stop"]))
        )
        for _ in range(draw(st.integers(min_value=0, max_value=4)))
    ]
    kinds = st.sampled_from(
        ["restored", "begun", "supervisor_lost", "decision", "nodes_test_began", "nodes_tested"]
    )
    events = []
    for _ in range(draw(st.integers(min_value=0, max_value=8))):
        number, at_s, kind = draw(NUMBERS), draw(TIMES), draw(kinds)
        if kind == "decision":
            events.append(decision(number, at_s, draw(TIMES)))
        else:
            rank = draw(st.none() | st.integers(min_value=0, max_value=5))
            data = {"restore_s": draw(st.none() | TIMES), "step": 1}
            events.append(event(kind, number, at_s, rank, **data))
    checkpoints = [
        Checkpoint(
            run_id="r",
            attempt=draw(NUMBERS),
            step=1,
            path="p",
            state="written",
            size_bytes=1,
            stall_s=draw(st.floats(min_value=0, max_value=30)),
            committed_at_s=1.0,
        )
        for _ in range(draw(st.integers(min_value=0, max_value=2)))
    ]
    state = draw(st.sampled_from(["running", "completed", "failed", "stopped"]))
    return {
        "of": run(state, draw(TIMES), nnodes=draw(st.integers(min_value=1, max_value=2))),
        "attempts": attempts,
        "journal": journal,
        "incidents": incidents,
        "events": events,
        "checkpoints": checkpoints,
    }


@settings(max_examples=150, deadline=None)
@given(histories())
def test_the_seconds_of_each_rank_add_up_to_the_wall_time_whatever_the_records_say(records):
    found = lost(**records)
    assert sorted(rank for one in found.by_rank for rank in one.ranks) == list(range(found.ranks))
    wall_s = found.total_s / found.ranks
    for one in found.by_rank:
        assert sum(one.seconds.values()) == pytest.approx(wall_s, abs=1e-6)
        assert all(value_s > 0 for value_s in one.seconds.values())
        assert set(one.seconds) <= set(LOST_CAUSES)
    of_incidents_s = sum(found.incident_s(number) for number in found.by_incident)
    assert of_incidents_s <= found.total_s + 1e-6
    assert math.isfinite(of_incidents_s)
