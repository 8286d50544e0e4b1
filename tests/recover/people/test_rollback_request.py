"""A person has a run go back: the request in the run's folder, and real runs that go back once."""

import json
import os
import signal
import socket
import threading
import time

import pytest
from test_broken_loss import NAN_ONCE, training

from holdfast.checkpoint import newest_healthy
from holdfast.core.errors import BadUse, HoldfastError, NotFound
from holdfast.core.ledger import Attempt, Event, Ledger, Run
from holdfast.core.paths import RunPaths, ledger_url
from holdfast.recover import policy
from holdfast.recover.people import rollback
from holdfast.recover.people.rollback import Rollback, healthy_steps, requested, roll_back_run
from holdfast.recover.run_lock import RunLock

PATIENCE_S = 120.0


def play(*events, state=None):
    """Return the policy's state after events, and all its actions."""
    state, done = state or policy.State(), []
    for at_s, event in enumerate(events):
        state, actions = policy.decide(policy.RestartLimits(), state, event, float(at_s))
        done += actions
    return state, done


def failed(step):
    cause = policy.Diagnosed(
        fingerprint=f"f{step}", step=step, has_stepped=True, checkpoint_step=step - 10,
        summary="s", mitigation="m", restart_helps=True,
    )  # fmt: skip
    return policy.RankFailed(), policy.JobExited(1), cause


def test_a_job_goes_back_without_an_incident():
    state, _ = play(policy.Begin(), *failed(90))
    back = policy.RollbackRequested(40), policy.RankFailed(), policy.JobExited(-9)
    state, actions = play(*back, state=state)
    assert actions == [policy.Kill(), policy.Launch(in_place=True)]
    assert (state.phase, state.goes_back_to) == (policy.Phase.RUNNING, None)
    state, _ = play(*failed(60), state=state)
    assert state.phase is policy.Phase.RUNNING
    assert state.vain_at_s == (), "steps after the older checkpoint are a gain"


def test_a_stop_ends_a_job_that_goes_back():
    asked = policy.RollbackRequested(40), policy.StopRequested("Ctrl-C"), policy.JobExited(-9)
    state, actions = play(policy.Begin(), *asked)
    end = policy.End(state="stopped", exit_code=4, outcome="Stopped by Ctrl-C.")
    assert actions[1:] == [policy.Kill(), end]
    assert state.goes_back_to is None


def test_only_a_running_job_goes_back():
    for event in (policy.RankFailed(), policy.StopRequested("Ctrl-C")):
        state, _ = play(policy.Begin(), event)
        assert play(policy.RollbackRequested(40), state=state) == (state, [])


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run that goes on, with healthy checkpoints of steps 10 and 20: its ledger and paths."""
    paths = RunPaths(tmp_path, "r")
    paths.logs.mkdir(parents=True)
    lock = RunLock.acquire(paths.lock)
    monkeypatch.setattr(rollback, "healthy_steps", lambda run_id, ledger: [20, 10])
    with Ledger.open(ledger_url(tmp_path)) as ledger:
        ledger.add_run(
            Run(
                run_id="r",
                state="running",
                command=["python"],
                options={},
                cwd="/",
                host=socket.gethostname(),
                pid=1,
                started_at_s=1.0,
            )
        )
        ledger.add_attempt(Attempt(run_id="r", number=1, started_at_s=1.0))
        yield ledger, paths
    lock.release()


def roll_back(run, *events, to_step=20, timeout_s=PATIENCE_S):
    """Ask for a rollback, upon which a supervisor records these events about the request."""
    ledger, paths = run

    def supervise():
        deadline_s = time.monotonic() + PATIENCE_S
        while (
            asked := requested(paths.rollback_request)
        ) is None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        for kind, data in events:
            told = {"number": asked.number, **data}
            ledger.add_event(Event(run_id="r", attempt=1, at_s=2.0, kind=kind, data=told))

    supervisor = threading.Thread(target=supervise)
    if events:
        supervisor.start()
    try:
        return roll_back_run(
            "r", ledger, paths.home, to_step=to_step, by="ada", timeout_s=timeout_s
        )
    finally:
        if events:
            supervisor.join()


def test_a_request_that_is_carried_out_returns_the_step(run):
    assert roll_back(run, ("rolled_back", {"to_step": 20})) == "The training goes on from step 20."
    asked = requested(run[1].rollback_request)
    assert (asked.to_step, asked.by) == (20, "ada")


def test_the_record_of_another_rollback_is_no_answer(run):
    others = ("rolled_back", {"number": -1, "to_step": 5})
    told = roll_back(run, others, ("rolled_back", {"to_step": 10}), to_step=10)
    assert told == "The training goes on from step 10."


def test_the_reason_of_a_refusal_is_raised(run):
    with pytest.raises(HoldfastError, match="no healthy checkpoint"):
        roll_back(run, ("not_rolled_back", {"why": "There is no healthy checkpoint."}))


def test_a_request_that_nobody_carries_out_is_taken_back(run):
    with pytest.raises(HoldfastError, match="was withdrawn"):
        roll_back(run, timeout_s=0.0)
    assert not run[1].rollback_request.exists()


def test_a_step_that_is_not_healthy_is_refused(run):
    with pytest.raises(BadUse, match="no healthy checkpoint of step 15"):
        roll_back(run, to_step=15)
    assert not run[1].rollback_request.exists()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"number": 1, "to_step": "x", "by": ""}', "{" * 500]
)
def test_a_file_without_a_request_asks_for_nothing(tmp_path, text):
    (tmp_path / "asked").write_text(text)
    assert requested(tmp_path / "asked") is None


def healthy(place):
    try:
        return newest_healthy(place.folder / "checkpoints", before_step=1_000_000)
    except NotFound:
        return None


def finishes_on_demand(fault):
    """Return a job with this fault that trains until the file `finish` is there."""
    # No checkpoint is pruned between a person's choice and the rollback.
    return training(fault, "pathlib.Path('finish').exists()", keep=10_000)


def events(place, *kinds):
    with place.ledger() as ledger:
        return ledger.events("r", kinds=kinds)


def attempt_with_steps(place, number):
    """Wait until an attempt has begun its training; return the attempt."""

    def attempts():
        with place.ledger() as ledger:
            return ledger.attempts("r")

    place.wait_until(lambda: len(attempts()) == number and attempts()[-1].start_step is not None)
    return attempts()[-1]


@pytest.fixture(scope="module")
def guided(shared_place):
    """A run whose loss breaks, and which goes back on an approval and on two requests.

    Of the proposal and of the last request, the supervisor is killed.
    """
    place = shared_place
    stale = RunPaths(place.home, "r").rollback_request  # of a person who asked long before
    stale.parent.mkdir(parents=True)
    stale.write_text(json.dumps(Rollback(number=5, to_step=1, by="ada").to_json()))
    job = place.ranks(1, place.job(finishes_on_demand(NAN_ONCE)))
    options = ["--name", "r", "--mode", "propose", "--healthy-after", "20"]
    with place.start("run", *options, "--", *job) as process:
        place.wait_until(lambda: events(place, "proposal"))
        place.child(process, "supervisor_process").kill()
        place.wait_until(lambda: events(place, "supervisor_followed"))
        approved = place.json("runs", "approve", "r")
        approved_step = attempt_with_steps(place, 2).start_step

        # Until a checkpoint has been followed by 20 steps, none is healthy.
        place.wait_until(lambda: (healthy(place) or 0) > approved_step)
        with place.ledger() as ledger:
            step = healthy_steps("r", ledger)[0]
            told = roll_back_run(
                "r", ledger, place.home, to_step=step, by="ada", timeout_s=PATIENCE_S
            )
        assert told == f"The training goes on from step {step}."
        assert attempt_with_steps(place, 3).start_step == step

        supervisor = place.child(process, "supervisor_process")
        os.kill(supervisor.pid, signal.SIGSTOP)
        last_step = healthy(place)
        asked = Rollback(number=7, to_step=last_step, by="ada")
        RunPaths(place.home, "r").rollback_request.write_text(json.dumps(asked.to_json()))
        supervisor.kill()
        attempt_with_steps(place, 4)
        (place.folder / "finish").touch()
        _, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    return place, approved, [approved_step, step, last_step]


@pytest.mark.slow
def test_a_broken_loss_waits_for_its_approval_also_where_the_supervisor_is_killed_meanwhile(guided):
    place, answer, (step, *_) = guided
    (proposal,) = events(place, "proposal")
    assert answer["proposal"].startswith("The loss is not finite since step ")
    (approved,) = events(place, "approved")
    assert approved.data["number"] == proposal.data["number"]
    rolled_back, *_ = events(place, "rolled_back")
    assert rolled_back.data["first_step"] == proposal.data["anomaly"]["first_step"]
    assert rolled_back.data["to_step"] == step < rolled_back.data["first_step"]
    with place.ledger() as ledger:
        (incident,) = ledger.incidents("r")
    assert (incident.kind, incident.action) == ("anomaly", "restart")
    assert incident.restored_step == step


@pytest.mark.slow
def test_a_run_goes_back_to_the_chosen_step_without_an_incident(guided):
    place, _, (*_, step, _) = guided
    with place.ledger() as ledger:
        assert [one.kind for one in ledger.incidents("r")] == ["anomaly"]
        assert [one.outcome for one in ledger.attempts("r")[1:]] == [
            "stopped",
            "stopped",
            "completed",
        ]
        states = {one.step: one.state for one in ledger.checkpoints("r") if one.attempt == 2}
    assert states[step] == "healthy"
    assert {state for at, state in states.items() if at > step} <= {"written"}
    note = f"ada had the training go back to the checkpoint of step {step}."
    assert note in [one.get("text") for one in place.json("explain")["chain"]]


@pytest.mark.slow
def test_each_request_is_carried_out_once_and_outlives_the_supervisor(guided):
    place, _, steps = guided
    assert [one.data["to_step"] for one in events(place, "rollback_asked")] == steps[1:]
    assert [one.data["to_step"] for one in events(place, "rolled_back")] == steps
    with place.ledger() as ledger:
        assert [one.start_step for one in ledger.attempts("r")] == [0, *steps]
    assert not RunPaths(place.home, "r").rollback_request.exists()
