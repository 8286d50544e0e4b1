"""The recorder: its records, their time, and its behaviour if writing fails."""

import math
import threading
from pathlib import Path

import pytest

from holdfast.core.errors import LedgerUnreachable
from holdfast.core.failure_history import FailureHistory
from holdfast.core.ledger import Event, Incident, Ledger, Run, ledger_thread
from holdfast.core.paths import RunPaths, ledger_url
from holdfast.core.telemetry import StepRecord, read_steps
from holdfast.recover import policy
from holdfast.recover.agent import child
from holdfast.recover.detectors.anomaly import Anomaly
from holdfast.recover.detectors.hang import Frozen
from holdfast.recover.recorder import Recorder
from holdfast.recover.skipping.plan import Skip
from holdfast.testing import FakeClock


@pytest.fixture
def ledger(tmp_path):
    with Ledger.open(ledger_url(tmp_path)) as ledger:
        ledger.add_run(
            Run(
                run_id="r",
                state="running",
                command=["python"],
                options={},
                cwd="/",
                host="h",
                pid=1,
                started_at_s=0.0,
            )
        )
        yield ledger


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def complaints():
    return []


@pytest.fixture
def recorder(tmp_path, ledger, clock, complaints):
    paths = RunPaths(tmp_path, "r")
    paths.attempt_logs(1).mkdir(parents=True)
    recorder = Recorder(paths, ledger, clock, complaints.append)
    yield recorder
    recorder.close()


def incident(clock, step=7, fingerprint="f", attempt=1):
    return Incident(
        run_id="r",
        attempt=attempt,
        kind="exit",
        rank=0,
        step=step,
        fault_at_s=clock.now_s(),
        detected_at_s=clock.now_s(),
        diagnosis={"fingerprint": fingerprint},
    )


def step(number):
    return StepRecord(attempt=1, rank=0, step=number, at_s=1.0, step_s=0.1, loss=2.0)


def test_times_are_the_clocks(recorder, ledger, clock):
    began_s = clock.now_s()
    recorder.attempt_began(1)
    clock.advance(5)
    recorder.event("note", {"a": 1}, rank=1)
    recorder.first_step(0, clock.now_s())
    clock.advance(5)
    recorder.attempt_ended(outcome="completed", last_step=3)
    recorder.run_ended(state="completed", exit_code=0, outcome="Done.")
    (attempt,) = ledger.attempts("r")
    assert (attempt.started_at_s, attempt.first_step_at_s, attempt.ended_at_s) == (
        began_s,
        began_s + 5,
        began_s + 10,
    )
    (event,) = ledger.events("r")
    assert (event.at_s, event.attempt, event.rank, event.data) == (began_s + 5, 1, 1, {"a": 1})
    assert (ledger.run("r").state, ledger.run("r").ended_at_s) == ("completed", began_s + 10)


def test_an_incident_is_resolved_and_resumed(recorder, ledger, clock):
    recorder.attempt_began(1)
    incident_id = recorder.incident(incident(clock))
    recorder.resolved(incident_id, policy.Resolve(action="restart", explanation="It helps."))
    recorder.resumed(incident_id, 9.0, 5)
    (found,) = ledger.incidents("r")
    assert (found.action, found.explanation, found.resumed_at_s, found.restored_step) == (
        "restart",
        "It helps.",
        9.0,
        5,
    )


@pytest.mark.parametrize("hours", [-5, 5])
def test_a_wall_clock_that_is_set_hides_no_incident(recorder, ledger, clock, hours):
    recorder.event("begun", {})
    recorder.attempt_began(1)
    clock.jump(hours * 3600.0)
    incident_id = recorder.incident(incident(clock))
    opened = recorder.open_incident()
    assert opened is not None
    assert opened.incident_id == incident_id
    recorder.event("begun", {})  # a person has looked at it
    assert recorder.open_incident() is None


def test_what_a_dead_supervisor_had_learnt_is_remembered(recorder, ledger, clock):
    recorder.attempt_began(1)
    incident_id = recorder.incident(incident(clock, step=7, fingerprint="f"))
    recorder.resolved(incident_id, policy.Resolve(action="restart", explanation=""))
    clock.advance(1000)
    recorder.attempt_began(2)
    recorder.checkpoint({"step": 7, "path": "p", "size_bytes": 1, "stall_s": 0.0})
    recorder.incident(incident(clock, step=None, fingerprint="g", attempt=2))
    recorder.incident(incident(clock, step=8, fingerprint="f", attempt=2))
    clock.advance(30)
    state = recorder.remembered(policy.RestartLimits())
    assert [root for root, _ in state.roots_since_gain] == ["g", "f"], (
        "the checkpoint was a gain over the first, and since then there was none"
    )
    assert (state.best_step, state.best_checkpoint_step) == (8, 7)
    (in_vain_at_s,) = state.vain_at_s
    assert clock.monotonic_s() - in_vain_at_s == pytest.approx(30)


@pytest.mark.parametrize("has_stepped", [True, False])
def test_a_dead_supervisor_s_rollback_is_remembered(recorder, ledger, clock, has_stepped):
    """Attempt 2 began at step 40, since the checkpoint of step 100 was lost, and reached 60."""
    for attempt, begun_from, saved, failed_at in ((1, 0, 100, 100), (2, 40, 60, 60)):
        recorder.attempt_began(attempt)
        assert recorder.checkpoint_step is None
        if attempt == 2:
            recorder.event("restored", {"step": begun_from})
        if has_stepped:
            recorder.first_step(begun_from, clock.now_s())
        recorder.checkpoint({"step": saved, "path": "p", "size_bytes": 1, "stall_s": 0.0})
        recorder.incident(incident(clock, step=failed_at if has_stepped else None, attempt=attempt))
    state = recorder.remembered(policy.RestartLimits())
    assert (state.best_checkpoint_step, state.vain_at_s) == (60, ())


def test_a_checkpoint_that_a_rollback_abandoned_is_not_the_newest(recorder):
    def saved(attempt, step):
        recorder.attempt = attempt
        recorder.checkpoint({"path": f"step-{step}", "step": step, "size_bytes": 1, "stall_s": 0.0})

    assert recorder.newest_checkpoint() is None
    for step in (20, 40, 60):
        saved(1, step)
    assert recorder.newest_checkpoint().step == 60
    recorder.event("rolled_back", {"to_step": 20})
    assert recorder.newest_checkpoint().step == 20
    saved(2, 40)
    assert recorder.newest_checkpoint().step == 40
    recorder.event("rolled_back", {"to_step": None})
    assert recorder.newest_checkpoint().step == 40


def test_the_health_of_checkpoints_is_recorded_until_a_rollback_abandons_them(recorder, ledger):
    for step in (20, 40, 60):
        path = f"/c/step-{step}"
        recorder.checkpoint({"path": path, "step": step, "size_bytes": 1, "stall_s": 0.0})
    for step in (20, 40, 80):
        recorder.healthy(Path(f"/c/step-{step}"))

    def states():
        recorder._thread.call(lambda _: None)  # after all that waits in the thread
        return [one.state for one in ledger.checkpoints("r")]

    recorder.rolled_back({"by": "ada"}, None)
    assert states() == ["healthy", "healthy", "written"]
    recorder.rolled_back({"by": "ada"}, 20)
    assert states() == ["healthy", "written", "written"]


def test_a_dead_supervisor_of_a_silent_job_is_remembered_by_time(recorder, clock):
    limits = policy.RestartLimits()
    for number, lived_s in enumerate((5, limits.blind_gain_s + 1, 5), 1):
        recorder.attempt_began(number)
        clock.advance(lived_s)
        recorder.incident(incident(clock, step=None, attempt=number))
    roots = recorder.remembered(limits).roots_since_gain
    assert roots == (("f", False), ("f", False)), "the second attempt lived for long"


def test_a_dead_supervisor_s_failures_are_remembered_with_whether_a_step_was_made(recorder, clock):
    for number in (1, 2):
        recorder.attempt_began(number)
        if number == 1:
            recorder.first_step(0, clock.now_s())
        clock.advance(5)
        recorder.incident(incident(clock, step=7, attempt=number))
    assert recorder.remembered(policy.RestartLimits()).roots_since_gain == (
        ("f", True),
        ("f", False),
    )


def test_a_new_recorder_goes_on_where_the_last_one_was(recorder, tmp_path, ledger, clock):
    recorder.attempt_began(1)
    recorder.first_step(0, 1.0)
    recorder.step(step(1))
    recorder.close()
    other = Recorder(RunPaths(tmp_path, "r"), ledger, clock, print)
    assert (other.attempt, other.any_step) == (1, True)
    other.step(step(2))
    other.close()
    assert [one.step for one in read_steps(RunPaths(tmp_path, "r").steps)] == [1, 2]


def test_a_record_that_cannot_be_written_is_complained_about_and_given_up(
    recorder, ledger, clock, complaints
):
    recorder.attempt_began(1)
    ledger.remove_run("r")
    recorder.event("note", {})
    assert recorder.incident(incident(clock)) is None
    recorder.run_ended(state="completed", exit_code=0, outcome="")
    assert len(complaints) == 3
    recorder.close()
    recorder.step(step(1))
    assert len(complaints) == 4, "a journal that is gone is complained about as well"


def test_the_failures_of_a_run_are_counted_over_the_time_that_it_trained(recorder, ledger, clock):
    for number in (1, 2):
        recorder.attempt_began(number)
        clock.advance(10.0)
        if number == 1:
            recorder.first_step(0, clock.now_s())
        clock.advance(30.0)
        recorder.attempt_ended(outcome="failed", last_step=3)
        now_s = clock.now_s()
        recorder.incident(
            Incident(
                run_id="r",
                attempt=number,
                kind="exit",
                rank=0,
                step=3,
                fault_at_s=now_s,
                detected_at_s=now_s,
                diagnosis={},
            )
        )
    assert recorder.failures() == FailureHistory(failures=1, trained_s=30.0)


def saved(step):
    return {"step": step, "path": f"/c/step-{step}", "size_bytes": 1, "stall_s": 0.0}


def made(step):
    return StepRecord(attempt=1, rank=0, step=step, at_s=1.0, step_s=0.1, loss=None, metrics={})


def test_what_agents_send_once_more_to_the_next_supervisor_is_recorded_once(
    tmp_path, ledger, clock, complaints
):
    paths = RunPaths(tmp_path, "r")
    first = Recorder(paths, ledger, clock, complaints.append)
    first.attempt_began(1)
    first.launched({"n1-1": "n1"})
    for step in (1, 2, 3):
        first.step(made(step))
    first.checkpoint(saved(3))
    first.first_step(0, 1.0)
    first.close()
    after = Recorder(paths, ledger, clock, complaints.append)
    assert (after.running_launch().attempt, after.running_launch().nodes) == (1, {"n1-1": "n1"})
    assert (after.checkpoint_step, after.start_step, after.any_step) == (3, 0, True)
    for step in (2, 3, 4, 5):
        after.step(made(step))
    after.checkpoint(saved(3))
    after.checkpoint(saved(5))
    after.close()
    assert [one.step for one in read_steps(paths.steps)] == [1, 2, 3, 4, 5]
    assert [one.step for one in ledger.checkpoints("r")] == [3, 5]
    assert complaints == []


def test_a_person_who_starts_the_run_again_begins_with_a_clean_slate(recorder, ledger, clock):
    recorder.attempt_began(1)
    recorder.incident(incident(clock))
    assert recorder.open_incident() is not None
    assert recorder.remembered(policy.RestartLimits()).roots_since_gain != ()
    clock.advance(1.0)
    recorder.event("begun", {})
    assert recorder.open_incident() is None
    assert recorder.remembered(policy.RestartLimits()) == policy.State()


def test_why_a_job_was_being_ended_is_known_to_the_next_supervisor(recorder, clock):
    recorder.attempt_began(1)
    assert recorder.ending() == (None, None)
    frozen = Frozen(waited_s=3.0, limit_s=2.0, rank=1, state="T")
    recorder.ends(frozen, None)
    assert recorder.ending() == (frozen, None)
    broken = Anomaly(kind="not finite", first_step=4, step=5, value=math.inf)
    recorder.ends(None, broken)
    assert recorder.ending() == (None, broken)
    recorder.incident(incident(clock))
    assert recorder.ending() == (None, None), "it was diagnosed"


def test_a_recorded_end_is_the_runs_end(recorder, ledger):
    assert recorder.recorded_end() is None
    recorder.run_ended(state="stopped", exit_code=4, outcome="Stopped.")
    assert recorder.recorded_end() == ("stopped", 4, "Stopped.")


def test_what_is_left_out_is_known_to_every_later_supervisor(
    tmp_path, recorder, ledger, clock, complaints
):
    recorder.event("begun", {})
    recorder.attempt_began(1)
    recorder.first_step(0, 1.0)
    recorder.incident(incident(clock))
    recorder.leave_out(Skip(first=120, last=124))
    recorder.attempt_began(2)
    recorder.first_step(0, 1.0)
    recorder.incident(incident(clock, attempt=2))
    recorder.leave_out(Skip(first=120, last=129, doublings=1))
    ledger.add_event(Event(run_id="r", attempt=3, at_s=1.0, kind="leave_out", data={"first": "x"}))
    paths = RunPaths(tmp_path, "r")
    later = Recorder(paths, ledger, clock, complaints.append)
    assert later.skipping.left_out.ranges == ((120, 129),)
    assert "is ignored" in complaints[0]
    state = later.remembered(policy.RestartLimits())
    assert state.skipping.skips == (Skip(first=120, last=129, doublings=1),)
    assert (state.skipping.in_vain, len(state.roots_since_gain)) == (2, 1)
    clock.advance(1.0)
    later.event("begun", {})
    state = later.remembered(policy.RestartLimits())
    assert state.skipping.left_out.ranges == ((120, 129),), "also after a resume by hand"
    later.close()


def test_the_batches_that_broke_a_loss_are_known_to_the_next_supervisor(recorder):
    anomaly = Anomaly(kind="not finite", first_step=3, step=4, value=math.inf, batches=(2, 4))
    recorder.attempt_began(1)
    recorder.ends(None, anomaly)
    assert recorder.ending() == (None, anomaly)


def test_a_ledger_that_does_not_answer_holds_up_no_report_of_a_healthy_job(
    recorder, ledger, monkeypatch, complaints
):
    answers = threading.Event()
    for name in ("add_events", "add_checkpoint", "set_attempt"):
        real = getattr(ledger, name)
        monkeypatch.setattr(
            ledger, name, lambda *args, real=real, **kw: answers.wait(60) and real(*args, **kw)
        )
    recorder.attempt_began(1)
    recorder.start_thread()
    recorder.event_soon("restored", {"step": 4})
    recorder.flush()
    recorder.first_step(4, 1.0)
    saved = {"step": 5, "path": "/c/5", "size_bytes": 1, "stall_s": 0.1}
    for _ in range(2):  # the second one is repeated to a new supervisor
        recorder.checkpoint(saved)
    assert recorder.checkpoint_step == 5
    assert (ledger.events("r"), ledger.checkpoints("r")) == ([], [])
    answers.set()
    assert recorder.events("restored") == [("restored", 1, {"step": 4})]
    assert recorder.start_step == 4
    assert [one.step for one in ledger.checkpoints("r")] == [5]
    assert complaints == []


def test_an_incident_of_an_outage_has_its_action_and_its_end_afterwards(
    recorder, ledger, clock, monkeypatch, complaints
):
    is_back, repeating = threading.Event(), ledger.repeating

    def away(_incident):
        raise LedgerUnreachable("The server is away.")

    monkeypatch.setattr(ledger, "add_incident", away)
    monkeypatch.setattr(ledger, "repeating", lambda: is_back.wait(60) and repeating())
    monkeypatch.setattr(ledger_thread, "REPEAT_S", 0.0)
    recorder.attempt_began(1)
    recorder.start_thread()
    monkeypatch.setattr(recorder._thread, "_wait_s", 0.0)
    for step in (7, 9):
        assert recorder.incident(incident(clock, step=step)) is None
        recorder.resolved(None, policy.Resolve(action="restart", explanation=f"At {step}."))
        recorder.resumed(None, float(step), step - 1)
    is_back.set()
    recorder.close()
    assert [
        (one.step, one.action, one.explanation, one.resumed_at_s, one.restored_step)
        for one in ledger.incidents("r")
    ] == [(7, "restart", "At 7.", 7.0, 6), (9, "restart", "At 9.", 9.0, 8)]
    assert "The server is away. The run goes on, and its records wait." in complaints


def test_an_event_that_waits_is_read_all_the_same(recorder):
    recorder.start_thread()
    recorder.event_soon("k", {"a": 1})
    assert recorder.events("k") == [("k", 0, {"a": 1})]


def test_a_record_that_fails_at_the_end_is_reported(recorder, complaints):
    recorder.start_thread()
    recorder.event_soon("odd", {"value": object()})
    recorder.close()
    assert any("JSON" in one for one in complaints)


def test_the_wait_for_the_last_records_is_not_taken_for_a_frozen_supervisor():
    assert ledger_thread.CLOSE_S + ledger_thread.WAIT_S < child.PING_S * child.UNANSWERED
