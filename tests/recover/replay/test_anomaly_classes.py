"""The class of a broken loss, from what the attempts have reported."""

import math
from dataclasses import replace

import pytest

from holdfast.core.ledger import Attempt
from holdfast.core.telemetry import StepRecord
from holdfast.recover.detectors.anomaly import Anomaly
from holdfast.recover.replay.classes import Finding, of_failure, of_passed
from holdfast.recover.replay.replays import without_an_older_file
from holdfast.recover.replay.traces import Trace, traces_of

NAN = math.nan


def loss(step):
    return 1.0 + 1.0 / step


def trace(attempt, start, end, *, breaks=None, nodes=("a", "b"), values=None, scale=1.0, **more):
    """Return an attempt from one step's file (None: no file) to a step, with a broken loss."""
    numbers = {step: (loss(step) * scale,) for step in range((start or 0) + 1, end + 1)}
    anomaly = None
    if breaks is not None:
        numbers |= {
            step: (value,) for step, value in (values or {breaks: NAN, breaks + 1: NAN}).items()
        }
        anomaly = Anomaly(kind="not finite", first_step=breaks, step=breaks + 1, value=NAN)
    return Trace(
        attempt=attempt, numbers=numbers, restored_step=start, anomaly=anomaly, nodes=nodes, **more
    )


def kinds(now, *earlier):
    found = of_failure(now, earlier)
    return found.kind, found.before_step


def test_a_loss_that_breaks_for_the_first_time_is_replayed():
    first = trace(1, None, 111, breaks=110)
    assert of_failure(first, []) == Finding()
    assert of_failure(first, []).replays


def test_what_breaks_again_with_the_same_numbers_comes_from_the_data():
    first = trace(1, None, 111, breaks=110)
    again = trace(2, 80, 111, breaks=110, nodes=("b", "a"))
    assert kinds(again, first) == ("data_or_model", None)
    assert "on other nodes, with the same numbers" in of_failure(again, [first]).evidence


@pytest.mark.parametrize(
    "again",
    [
        trace(2, 80, 100, breaks=99),
        trace(2, 80, 121, breaks=120),
        trace(2, 80, 111, breaks=110, values={110: 7.5, 111: NAN}),
    ],
)
def test_what_breaks_elsewhere_or_with_other_numbers_comes_from_the_hardware(again):
    first = trace(1, None, 111, breaks=110, nodes=("a", "b"))
    again = replace(again, nodes=("b", "c"))
    assert kinds(again, first) == ("hardware", None)
    assert of_failure(again, [first]).suspects == ("b",), "the node that took part both times"


def test_what_a_replay_passes_comes_from_the_hardware():
    first, replay = trace(1, None, 111, breaks=110), trace(2, 80, 112, nodes=("b", "a"))
    found = of_passed(first, replay, [first])
    assert (found.kind, found.suspects) == ("hardware", ("a", "b"))
    assert "with the ranks on other nodes" in found.evidence
    on_one = of_passed(replace(first, nodes=("a",)), replace(replay, nodes=("a",)), [first])
    assert "a lasting fault and a passing one look the same" in on_one.evidence


def test_steps_that_an_earlier_attempt_has_passed_need_no_replay():
    before = trace(1, None, 130)
    assert kinds(trace(2, 80, 111, breaks=110), before) == ("hardware", None)


def test_a_file_after_which_the_loss_breaks_is_left_for_an_older_one():
    live = trace(1, None, 102)  # it has saved at 100, and has failed
    from_file = trace(2, 100, 103, breaks=102)
    assert kinds(from_file, live) == (None, None), "nobody has passed these steps"
    clean = trace(3, 80, 110)
    found = of_passed(from_file, clean, [live, from_file])
    assert found.kind == "checkpoint"
    assert "the checkpoint of step 100" in found.evidence


def test_a_file_that_was_trained_past_well_is_suspected_at_once():
    live = trace(1, None, 130)
    from_file = trace(2, 100, 103, breaks=102)
    assert kinds(from_file, live) == (None, 100), "go back to before the file"
    twice = trace(3, 100, 103, breaks=102)
    assert kinds(twice, live, from_file) == ("checkpoint", 100)


def test_a_fault_well_after_a_good_file_is_the_hardware():
    live, from_file = trace(1, None, 103), trace(2, 100, 121, breaks=120)
    assert of_passed(from_file, trace(3, 80, 122), [live, from_file]).kind == "hardware"


def test_data_is_told_from_a_file_where_both_attempts_began_from_it():
    first, again = trace(1, 100, 121, breaks=120), trace(2, 100, 121, breaks=120)
    assert kinds(again, first) == (None, 100), "the file may be why: an older one is to show that"
    older = trace(3, 80, 121, breaks=120)
    assert kinds(older, first, again) == ("data_or_model", None)
    live = trace(0, None, 110)
    assert kinds(again, live, first) == ("data_or_model", None), "the live state gave the same"
    found = without_an_older_file(of_failure(again, [first]), 100)
    assert found.kind == "cannot_tell"
    assert without_an_older_file(of_failure(again, [first]), 80).replays


def test_a_training_that_does_not_repeat_itself_shows_nothing():
    first = trace(1, None, 111, breaks=110)
    assert of_passed(first, trace(2, 80, 112, scale=1.05), [first]).kind == "cannot_tell"
    assert kinds(trace(2, 80, 100, breaks=99, scale=1.05), first)[0] == "cannot_tell"


def test_roughly_the_same_numbers_suffice_where_the_training_repeats_itself_roughly():
    spike = {110: 40.0, 111: 400.0}
    first = trace(1, None, 111, breaks=110, values=spike)
    near = trace(2, 80, 111, breaks=110, values={110: 40.8, 111: 600.0}, scale=1 + 1e-6)
    assert kinds(near, first)[0] == "data_or_model"
    other = trace(2, 80, 111, breaks=110, values={110: 90.0, 111: 600.0}, scale=1 + 1e-6)
    assert kinds(other, first)[0] == "hardware"


def test_attempts_that_left_out_other_batches_are_not_compared():
    first = trace(1, None, 111, breaks=110)
    again = trace(3, 80, 111, breaks=110, left_out=frozenset({(108, 111)}))
    assert of_failure(again, [first]).replays


def test_traces_are_read_from_the_records_since_a_person_looked():
    attempts = [
        Attempt(run_id="r", number=number, started_at_s=0.0, start_step=start)
        for number, start in ((1, 0), (2, 0), (3, 5))
    ]
    anomaly = Anomaly(kind="spike", first_step=7, step=9, value=9.0, batches=(6, 9))
    events = [
        ("begun", 1, {}),
        ("launched", 2, {"nodes": {"x": "a", "y": "b"}}),
        ("ending", 2, {"frozen": None, "anomaly": anomaly.to_json()}),
        ("leave_out", 2, {"first": 6, "last": 9, "doublings": 0}),
        ("restored", 3, {"step": 5}),
    ]
    record = {"rank": 0, "at_s": 0.0, "step_s": 0.1}
    steps = [
        StepRecord(attempt=2, step=1, loss=2.0, metrics={"grad_norm": 0.5}, **record),
        StepRecord(attempt=2, step=2, loss=None, **record),
        StepRecord(attempt=3, step=6, loss=1.5, **record),
    ]
    second, third = traces_of(attempts, events, steps)
    assert second == Trace(attempt=2, numbers={1: (2.0, 0.5)}, anomaly=anomaly, nodes=("a", "b"))
    assert third == Trace(
        attempt=3,
        numbers={6: (1.5,)},
        restored_step=5,
        left_out=frozenset({(6, 9)}),
        nodes=("a", "b"),
    )
