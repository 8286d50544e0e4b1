import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.core.accounting import LostSegment, PassedOver, Point, summarize
from holdfast.core.accounting.summary import account
from holdfast.core.errors import NotFound
from holdfast.core.ledger import Attempt, Checkpoint, Event, Incident, Ledger, Run
from holdfast.core.paths import RunPaths, ledger_url
from holdfast.core.telemetry import StepJournal, StepRecord


def run(state="completed", ended_at_s=100.0, **more):
    more = {"command": ["python"], "options": {"nproc": 2}} | more
    return Run(
        run_id="r",
        state=state,
        cwd="/",
        host="h",
        pid=1,
        started_at_s=0.0,
        ended_at_s=ended_at_s,
        **more,
    )


def attempt(number, started_at_s=0.0, start_step=None):
    return Attempt(run_id="r", number=number, started_at_s=started_at_s, start_step=start_step)


def steps(number, first, last, *, began_s, step_s=1.0, first_step_s=None, **more):
    """Return steps `first` to `last`, `step_s` apart, the first ending at `began_s + step_s`."""
    return [
        StepRecord(
            attempt=number,
            rank=0,
            step=step,
            at_s=began_s + (step - first + 1) * step_s,
            step_s=first_step_s if step == first and first_step_s is not None else step_s,
            loss=float(step),
            **more,
        )
        for step in range(first, last + 1)
    ]


def incident(
    number,
    fault_at_s,
    detected_at_s,
    *,
    step=None,
    restored_step=None,
    resumed_at_s=None,
    action="restart",
):
    return Incident(
        run_id="r",
        attempt=number,
        kind="exit",
        rank=1,
        step=step,
        fault_at_s=fault_at_s,
        detected_at_s=detected_at_s,
        diagnosis={},
        action=action,
        restored_step=restored_step,
        resumed_at_s=resumed_at_s,
    )


def event(kind, at_s=0.0, number=1, rank=None, **data):
    return Event(run_id="r", attempt=number, at_s=at_s, kind=kind, rank=rank, data=data)


def checkpoint(number, step, stall_s=0.5, state="written"):
    return Checkpoint(
        run_id="r",
        attempt=number,
        step=step,
        path=f"step-{step}",
        state=state,
        size_bytes=1000,
        stall_s=stall_s,
        committed_at_s=0.0,
    )


def summary(*, of=None, attempts=(), events=(), incidents=(), checkpoints=(), journal=()):
    return account(
        run=of or run(),
        attempts=attempts,
        events=events,
        incidents=incidents,
        checkpoints=checkpoints,
        steps=journal,
    )


def surviving(found):
    return [point.step for point in found.loss.surviving]


@pytest.fixture
def one_fault():
    """Steps 1-30 at 10-40 s, a fault at 40.5 s, detected at 42 s, steps 21-60 at 50-90 s."""
    return summary(
        attempts=[attempt(1, 0.0, 0), attempt(2, 43.0, 20)],
        journal=[*steps(1, 1, 30, began_s=10), *steps(2, 21, 60, began_s=50)],
        incidents=[incident(1, 40.5, 42.0, step=30, restored_step=20, resumed_at_s=51.0)],
    )


def test_every_second_of_a_run_with_one_fault_has_its_cause(one_fault):
    assert one_fault.breakdown.by_cause() == {
        "productive": 60.0,  # 20 of the first attempt, 40 of the second
        "lost": 10.5,
        "detecting": 1.5,
        "restarting": 8.0,  # 42 to 51, without the step that ended there
        "starting": 10.0,
        "checkpoint": 0.0,
        "other": 10.0,
    }
    assert one_fault.breakdown.total_s == one_fault.wall_s == 100.0
    assert one_fault.ettr == 0.6
    assert [
        (phase.attempt, phase.cause, phase.start_s, phase.end_s) for phase in one_fault.phases
    ] == [
        (1, "starting", 0.0, 10.0),
        (1, "productive", 10.0, 30.0),
        (1, "lost", 30.0, 40.5),
        (1, "detecting", 40.5, 42.0),
        (2, "restarting", 42.0, 50.0),
        (2, "productive", 50.0, 90.0),
        (2, "other", 90.0, 100.0),
    ]


def test_steps_and_losses_of_a_run_with_one_fault(one_fault):
    assert (one_fault.steps_executed, one_fault.steps_lost, one_fault.final_step) == (70, 10, 60)
    assert surviving(one_fault) == list(range(1, 61))
    lost = tuple(Point(step, float(step)) for step in range(21, 31))
    assert one_fault.loss.lost == (LostSegment(attempt=1, points=lost),)
    assert one_fault.median_step_s == 1.0
    assert one_fault.world_size == 2
    assert one_fault.interventions == 0


def test_the_cost_of_an_incident():
    passed = {"step": 30, "path": "step-30", "reason": "checksum"}
    found = summary(
        attempts=[attempt(1, 0.0, 0), attempt(2, 43.0, 20)],
        incidents=[incident(1, 40.5, 42.0, step=31, restored_step=20, resumed_at_s=51.0)],
        events=[
            event("fault_injected", 39.0, fault="damaged checkpoint"),
            event("fault_injected", 40.0, fault="SIGKILL"),
            event("fault_injected", 60.0, number=2, fault="later"),
            event("restored", 50.0, number=2, rank=1, step=20, restore_s=9.0, passed_over=[]),
            event("restored", 50.0, number=2, rank=0, step=20, restore_s=0.5, passed_over=[passed]),
        ],
    )
    (cost,) = found.incidents
    assert [data["fault"] for data in cost.injected] == ["damaged checkpoint", "SIGKILL"]
    assert (cost.number, cost.fault_at_s, cost.seconds_to_detect, cost.seconds_to_restart) == (
        1,
        40.0,
        2.0,
        9.0,
    )
    assert (cost.steps_lost, cost.restore_s) == (11, 0.5)
    assert cost.passed_over == (PassedOver(step=30, path="step-30", reason="checksum"),)


@pytest.mark.parametrize(
    ("rank", "node"), [(0, "n1"), (1, "n1"), (2, "n3"), (3, "n3"), (4, None), (None, None)]
)
def test_an_incident_has_the_node_of_its_rank_and_the_nodes_found_bad(rank, node):
    found = summary(
        of=run(options={"nnodes": 2}),
        attempts=[attempt(1), attempt(2, started_at_s=10.0)],
        events=[
            event("launched", nodes={"a": "n1", "b": "n2"}),
            event("launched", number=2, nodes={"a": "n1", "c": "n3"}),
            event("nodes_tested", number=2, cordoned=["n3"]),
            event("restored", number=2, rank=0, step=0, world_size=4),
        ],
        incidents=[replace(incident(2, 1.0, 2.0), rank=rank)],
    )
    (cost,) = found.incidents
    assert (cost.node, cost.cordoned) == (node, ("n3",))


def test_a_lost_node_is_the_node_of_its_incident():
    found = summary(
        of=run(),
        attempts=[attempt(1)],
        events=[event("node_lost", node="n2")],
        incidents=[replace(incident(1, 1.0, 2.0), rank=None)],
    )
    assert (found.incidents[0].node, found.incidents[0].cordoned) == ("n2", ())


def test_without_an_injected_fault_the_incident_s_own_time_counts(one_fault):
    (cost,) = one_fault.incidents
    assert (cost.injected, cost.seconds_to_detect, cost.passed_over) == ((), 1.5, ())


def test_a_rollback_further_than_one_attempt_takes_back_what_survived_before():
    found = summary(
        attempts=[attempt(1, start_step=0), attempt(2, start_step=20), attempt(3, start_step=10)],
        journal=[
            *steps(1, 1, 30, began_s=0),
            *steps(2, 21, 25, began_s=40),
            *steps(3, 11, 40, began_s=50),
        ],
    )
    assert surviving(found) == list(range(1, 41))
    assert [(segment.attempt, segment.points[0].step) for segment in found.loss.lost] == [
        (1, 11),
        (2, 21),
    ]
    assert found.steps_lost == 25


def test_attempts_without_a_step_change_nothing():
    found = summary(
        attempts=[attempt(1, start_step=0), attempt(2), attempt(3, start_step=20)],
        journal=[*steps(1, 1, 30, began_s=0), *steps(3, 21, 40, began_s=50)],
    )
    assert surviving(found) == list(range(1, 41))


def test_a_job_without_checkpoints_executes_everything_again():
    found = summary(
        attempts=[attempt(1), attempt(2)],
        journal=[*steps(1, 1, 30, began_s=0), *steps(2, 1, 40, began_s=40)],
    )
    assert surviving(found) == list(range(1, 41))
    assert found.steps_lost == 30


def test_a_script_s_own_rollback_within_an_attempt_counts_as_one():
    journal = [*steps(1, 1, 10, began_s=0), *steps(1, 6, 15, began_s=10)]
    found = summary(attempts=[attempt(1, start_step=0)], journal=journal)
    assert surviving(found) == list(range(1, 16))
    assert (found.steps_executed, found.steps_lost) == (20, 5)


def test_a_step_may_be_reported_in_two_lines():
    journal = [*steps(1, 1, 3, began_s=0), *steps(1, 3, 5, began_s=3)]
    found = summary(attempts=[attempt(1, start_step=0)], journal=journal)
    assert surviving(found) == [1, 2, 3, 3, 4, 5]
    assert (found.steps_executed, found.steps_lost) == (5, 0)


def test_saves_show_the_final_step_of_a_script_that_reports_no_steps():
    attempts = [attempt(1, start_step=0), attempt(2, start_step=100)]
    saves = [checkpoint(1, 100), checkpoint(1, 300), checkpoint(2, 120), checkpoint(2, 200)]
    assert summary(attempts=attempts, checkpoints=saves).final_step == 200
    damaged = [*saves[:3], checkpoint(2, 200, state="damaged")]
    assert summary(attempts=attempts, checkpoints=damaged).final_step == 120
    assert summary(attempts=attempts, checkpoints=saves[:2]).final_step == 100
    not_restored = [attempt(1, start_step=0), attempt(2)]
    assert summary(attempts=not_restored, checkpoints=saves[:2]).final_step == 300


def test_a_script_may_report_every_tenth_step():
    journal = [
        StepRecord(attempt=1, rank=0, step=10 * n, at_s=10.0 * n, step_s=10.0) for n in range(1, 5)
    ]
    found = summary(attempts=[attempt(1, start_step=0)], journal=journal)
    assert (found.steps_executed, found.final_step, found.breakdown.productive_s) == (40, 40, 40.0)


def test_an_attempt_s_first_step_counts_without_its_warm_up():
    journal = steps(1, 1, 10, began_s=20, first_step_s=15.0)
    found = summary(attempts=[attempt(1, start_step=0)], journal=journal)
    assert found.breakdown.productive_s == 10.0
    assert found.breakdown.starting_s == 20.0


def test_a_run_that_failed_keeps_its_newest_usable_checkpoint_and_no_more():
    marks = [checkpoint(1, 10), checkpoint(1, 20), checkpoint(1, 25, state="damaged")]
    found = summary(
        of=run(state="failed"),
        attempts=[attempt(1, start_step=0)],
        journal=steps(1, 1, 30, began_s=0),
        checkpoints=marks,
        incidents=[incident(1, 30.0, 31.0, step=30, action="stop")],
    )
    assert surviving(found) == list(range(1, 21))
    assert (found.final_step, found.steps_lost) == (20, 10)
    assert found.breakdown.other_s == 69.0  # from the detection to the end
    assert found.checkpoints.damaged == 1


def test_a_run_that_failed_without_a_checkpoint_keeps_nothing():
    found = summary(
        of=run(state="failed"), attempts=[attempt(1)], journal=steps(1, 1, 30, began_s=0)
    )
    assert (surviving(found), found.ettr, found.final_step) == ([], 0.0, 0)


def test_a_failed_last_attempt_that_did_nothing_leaves_what_the_one_before_left():
    found = summary(
        of=run(state="failed"),
        attempts=[attempt(1, start_step=0), attempt(2), attempt(3)],
        journal=[*steps(1, 1, 30, began_s=0), *steps(3, 1, 2, began_s=50)],
        checkpoints=[checkpoint(1, 20)],
    )
    assert found.final_step == 20


def test_an_attempt_that_ended_before_its_first_step_began_where_it_restored():
    found = summary(
        of=run(state="failed"),
        attempts=[attempt(1, start_step=0), attempt(2)],
        journal=steps(1, 1, 30, began_s=0),
        checkpoints=[checkpoint(1, 20), checkpoint(1, 30)],
        events=[event("restored", 40.0, number=2, step=20)],
    )
    assert found.final_step == 20
    assert found.attempts[1].start_step == 20


def test_a_running_run_lasts_to_its_last_record():
    found = summary(
        of=run(state="running", ended_at_s=None),
        attempts=[attempt(1, 0.0, 0)],
        journal=steps(1, 1, 30, began_s=10),
        incidents=[incident(1, 40.0, 44.0)],
        events=[event("rank_exited", 50.0)],
    )
    assert found.wall_s == 50.0
    assert found.breakdown.restarting_s == 6.0
    assert found.incidents[0].seconds_to_restart is None


def test_a_run_without_any_record_is_empty():
    found = summary(of=run(state="running", ended_at_s=None))
    assert (found.wall_s, found.ettr, found.phases, found.proof, found.median_step_s) == (
        0.0,
        None,
        (),
        None,
        None,
    )
    assert found.checkpoints.overall is None


def test_checkpoint_stalls_and_their_share():
    found = summary(
        attempts=[attempt(1, start_step=0)],
        journal=steps(1, 1, 30, began_s=10),
        checkpoints=[checkpoint(1, 10, 1.0), checkpoint(1, 20, 2.0), checkpoint(2, 30, 6.0)],
    )
    rows = found.checkpoints
    assert (rows.count, rows.total_stall_s, rows.share_of_wall) == (3, 9.0, 0.09)
    assert (rows.overall.median_stall_s, rows.overall.mean_stall_s, rows.overall.max_stall_s) == (
        2.0,
        3.0,
        6.0,
    )
    assert [(row.attempt, row.count, row.total_stall_s) for row in rows.by_attempt] == [
        (1, 2, 3.0),
        (2, 1, 6.0),
    ]


def test_stalls_and_sections_between_steps_are_told_apart():
    journal = [
        StepRecord(attempt=1, rank=0, step=step, at_s=10.0 + 4 * step, step_s=1.0)
        for step in range(1, 11)
    ]  # 3 s between the steps
    found = summary(
        of=run(ended_at_s=50.0),
        attempts=[attempt(1, start_step=0)],
        journal=journal,
        checkpoints=[checkpoint(1, 5, 7.0)],
    )
    assert (found.breakdown.checkpoint_s, found.breakdown.other_s) == (7.0, 20.0)
    assert found.breakdown.productive_s == 10.0


@pytest.mark.parametrize(
    ("events", "incidents", "expected"),
    [
        ([], [incident(1, 1, 1)], 0),
        ([], [], 1),  # the supervisor was killed, and a person resumed the run
        ([], [incident(1, 1, 1, action="stop")], 1),
        ([event("stop_asked", by="SIGINT")], [], 2),
        ([event("stop_asked", by="the time limit of Slurm job 12")], [], 1),
    ],
)
def test_people_who_stepped_in_are_counted(events, incidents, expected):
    found = summary(attempts=[attempt(1), attempt(2)], events=events, incidents=incidents)
    assert found.interventions == expected


def test_the_newest_proof_counts_and_validation_points_survive_or_not():
    found = summary(
        attempts=[attempt(1, start_step=0), attempt(2, start_step=1)],
        journal=[
            *steps(1, 1, 2, began_s=0, metrics={"val_loss": 3.0}),
            *steps(2, 2, 2, began_s=9, metrics={"val_loss": 2.0}),
        ],
        events=[event("proof", step=1), event("proof", step=2)],
    )
    assert found.proof == {"step": 2}
    assert found.loss.validation == (Point(1, 3.0), Point(2, 2.0))


@pytest.mark.parametrize(
    ("command", "events", "expected"),
    [
        (["python"], [], 2),
        (["/bin/torchrun"], [], None),
        (["torchrun"], [event("attached", world_size=8)], 8),
    ],
)
def test_the_world_size_is_what_was_started(command, events, expected):
    assert summary(of=run(command=command), events=events).world_size == expected


def test_summarize_reads_the_ledger_and_the_journal(tmp_path):
    with Ledger.open(ledger_url(tmp_path)) as ledger:
        ledger.add_run(run())
        ledger.add_attempt(attempt(1, start_step=0))
        with StepJournal(RunPaths(tmp_path, "r").steps) as journal:
            for record in steps(1, 1, 30, began_s=10):
                journal.append(record)
        found = summarize(ledger, tmp_path, "r")
        assert (found.run, found.ettr, surviving(found)) == (run(), 0.3, list(range(1, 31)))
        with pytest.raises(NotFound):
            summarize(ledger, tmp_path, "z")


times = st.floats(-5.0, 120.0)
seconds = st.floats(0.0, 30.0) | st.just(math.inf) | st.just(math.nan)
numbers = st.integers(1, 4)
records = st.builds(
    StepRecord,
    attempt=numbers,
    rank=st.just(0),
    step=st.integers(0, 30),
    at_s=times,
    step_s=seconds,
)
incidents = st.builds(
    incident,
    numbers,
    times,
    times,
    step=st.none() | st.integers(0, 30),
    action=st.sampled_from(["restart", "stop"]),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    of=st.builds(
        run,
        state=st.sampled_from(["running", "completed", "failed", "stopped"]),
        ended_at_s=st.none() | st.floats(0.0, 110.0),
    ),
    starts=st.lists(st.tuples(times, st.none() | st.integers(0, 30)), max_size=4),
    journal=st.lists(records, max_size=40),
    incidents=st.lists(incidents, max_size=4),
    checkpoints=st.lists(
        st.builds(checkpoint, numbers, st.integers(0, 30), st.floats(0.0, 50.0)), max_size=5
    ),
)
def test_the_parts_add_up_to_the_wall_time_whatever_the_records_say(
    of, starts, journal, incidents, checkpoints
):
    attempts = [attempt(number, at_s, step) for number, (at_s, step) in enumerate(starts, start=1)]
    found = summary(
        of=of, attempts=attempts, journal=journal, incidents=incidents, checkpoints=checkpoints
    )
    parts = found.breakdown.by_cause()
    assert all(part_s >= 0 for part_s in parts.values())
    assert found.breakdown.total_s == pytest.approx(found.wall_s, abs=1e-6)
    assert found.ettr is None or 0 <= found.ettr <= 1 + 1e-9
    assert 0 <= found.steps_lost <= found.steps_executed
    ends_s = [0.0, *(phase.end_s for phase in found.phases)]
    assert [phase.start_s for phase in found.phases] == ends_s[:-1]
    assert ends_s[-1] == pytest.approx(found.wall_s, abs=1e-6)
