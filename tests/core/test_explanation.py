"""Test the chain of a run in plain words: each kind of incident, notes, and runs that go on."""

import pytest

from holdfast.core.accounting.summary import account
from holdfast.core.errors import NotFound
from holdfast.core.explanation import explain, observed_failure, story_lines, story_of
from holdfast.core.explanation.plain_words import RULES, cause
from holdfast.core.ledger import Attempt, Event, Incident, Ledger, Run
from holdfast.core.paths import ledger_url
from holdfast.core.telemetry import StepRecord

DIAGNOSIS = {
    "reason": "Others",
    "confidence": 0.9,
    "decided_by": ["observer-killed"],
    "root_line": {
        "file": "/h/runs/r/logs/attempt-001/observer.log",
        "line": 1,
        "text": "2026-11-26T23:58:31.050Z holdfast: rank 2 (pid 7) was killed by SIGKILL after step 9",
    },
    "evidence": [
        {
            "role": "root",
            "file": "/h/runs/r/logs/attempt-001/observer.log",
            "line": 1,
            "text": "was \x1b[31mkilled\x1b[0m by SIGKILL\u202e",
        }
    ],
    "mitigation": "Look in dmesg.",
}


def incident(kind="exit", rank=2, **more):
    usual = {
        "incident_id": 5,
        "attempt": 1,
        "step": 9,
        "fault_at_s": 20.0,
        "detected_at_s": 20.5,
        "diagnosis": DIAGNOSIS,
        "action": "restart",
        "resumed_at_s": 24.5,
        "restored_step": 6,
    }
    return Incident(run_id="r", kind=kind, rank=rank, **(usual | more))


def event(kind, at_s=20.0, attempt=1, rank=None, **data):
    return Event(run_id="r", attempt=attempt, at_s=at_s, kind=kind, rank=rank, data=data)


def decided(by):
    return {**DIAGNOSIS, "decided_by": [by]}


def ended(rank, **how):
    return event("rank_exited", rank=rank, **({"pid": 7, "exit_code": None, "signal": None} | how))


@pytest.mark.parametrize(
    ("found", "events", "said"),
    [
        (incident(), [ended(2, signal=9)], "Rank 2 was killed (SIGKILL)"),
        (incident(), [ended(1, signal=9), ended(2, signal=11)], "Rank 2 crashed (SIGSEGV)"),
        (incident(), [ended(2, signal=15)], "Rank 2 was ended by SIGTERM"),
        (incident(), [ended(2, signal=99)], "Rank 2 crashed (signal 99)"),
        (incident(), [ended(2, exit_code=1)], "Rank 2 ended with an error (exit code 1)"),
        (incident(), [], "Rank 2 failed"),
        (
            incident(diagnosis=decided("observer-left")),
            [],
            "Rank 2 ended before the others, with code 0",
        ),
        (incident(kind="hang", rank=1), [], "Rank 1 froze"),
        (incident(kind="hang", rank=None), [], "The job stood still"),
        (incident(rank=None), [event("node_lost", node="n3")], "Node n3 was lost"),
        (
            incident(rank=None, diagnosis=decided("observer-launcher")),
            [],
            "The launcher of the ranks was killed or crashed",
        ),
        (incident(rank=None, diagnosis={}), [], "The job failed"),
        (
            incident(kind="anomaly", rank=None),
            [event("ending", anomaly={"kind": "spike", "first_step": 8})],
            "The loss spiked at step 8",
        ),
        (
            incident(kind="anomaly", rank=None),
            [event("ending", anomaly={"kind": "not finite", "first_step": 8, "value": "nan"})],
            "The loss became NaN at step 8",
        ),
        (incident(kind="anomaly", rank=None), [], "The loss was broken"),
    ],
)
def test_what_happened_is_said_in_plain_words(found, events, said):
    assert observed_failure(found, events) == said


def test_the_cause_is_the_line_that_states_the_root_without_stamps():
    assert cause(DIAGNOSIS) == "rank 2 (pid 7) was killed by SIGKILL after step 9."
    assert cause({"reason": "NodeFailure", "root_line": None}) == "NodeFailure."
    named = {"reason": "ValueError", "root_line": {"text": "ValueError: bad batch"}}
    assert cause(named) == "ValueError: bad batch."
    assert cause({}) == "No cause was found."


SIGNALS = {"looked_at": ["the steps of all ranks"], "not_seen": ["losses: no rank reports any"]}
DECISIONS = [
    event(
        "decision",
        20.5,
        mode="act",
        state={"phase": "running"},
        finding={"kind": "rank_failed", "rank": 2},
        plan={"action": "end the attempt", "rule": "await-teardown"},
        signals=SIGNALS,
    ),
    event(
        "decision",
        21.0,
        mode="act",
        state={"phase": "diagnosing"},
        finding={"kind": "diagnosed"},
        plan={
            "action": "restart",
            "rule": "restart",
            "explanation": "A restart helps here.",
            "wait_s": 0.0,
        },
    ),
]


def story(incidents=(), events=(), state="completed", **more):
    run = Run(
        run_id="r",
        state=state,
        command=["python"],
        options={"nproc": 4},
        cwd="/",
        host="h",
        pid=1,
        started_at_s=0.0,
        ended_at_s=None if state == "running" else 60.0,
        outcome="" if state == "running" else "It ended.",
    )
    attempts = [
        Attempt(run_id="r", number=1, started_at_s=0.5, start_step=0, ended_at_s=20.8),
        Attempt(run_id="r", number=2, started_at_s=21.5, start_step=6),
    ]
    steps = [
        StepRecord(attempt=number, rank=0, step=step, at_s=at_s, step_s=1.0, loss=None, metrics={})
        for number, step, at_s in [
            *((1, step, 10.0 + step) for step in range(1, 10)),
            *((2, step, 24.5 + step - 7) for step in range(7, 20)),
        ]
    ]
    fields = {"attempts": attempts, "checkpoints": (), "steps": steps} | more
    return story_of(account(run=run, events=events, incidents=incidents, **fields), events)


def test_tests_of_nodes_are_told_with_the_incident_and_without_one_by_themselves():
    bad = {"node": "n2", "outcome": "bad", "evidence": "fails its check of memory (bytes)"}
    good = {"node": "n1", "outcome": "good", "evidence": "failed 0 of 7 tests"}
    found = event("nodes_tested", 21.2, nodes=[good, bad], cordoned=["n2"], can_tell=True)
    again = event("nodes_readmitted", 21.3, nodes=["n2"])
    (one,) = story([incident()], [*DECISIONS, found, again]).chain
    assert one.done.endswith(
        "Tested 2 nodes. Node n2 fails its check of memory (bytes) and was cordoned. "
        "There were too few other nodes: the run went on with n2, though cordoned."
    )
    first = event("nodes_tested", 0.3, attempt=0, nodes=[good], cordoned=[], can_tell=True)
    odd = event("nodes_tested", 0.4, attempt=0, nodes=7, cordoned=7)
    broken_off = event("nodes_not_tested", 0.5, attempt=0, why="they were broken off.")
    assert [note.text for note in story([], [first, odd, broken_off]).chain] == [
        "Tested 1 node. None was found to be bad.",
        "Tested 0 nodes. The tests cannot tell which one is bad.",
        "The tests of the nodes ended without a result: they were broken off.",
    ]


def test_an_incident_is_told_from_its_signals_to_its_cost():
    launched = event("launched", 0.5, nodes={"a-1": "n1", "b-2": "n2"})
    events = [launched, ended(2, signal=9), *DECISIONS]
    told = story([incident()], events)
    (one,) = told.incidents
    assert (one.what, one.node, one.step, one.rank) == ("Rank 2 was killed (SIGKILL)", "n2", 9, 2)
    assert one.signals.looked_at == tuple(SIGNALS["looked_at"])
    assert one.signals.not_seen == tuple(SIGNALS["not_seen"])
    assert [decision.rule for decision in one.decisions] == [
        RULES["await-teardown"],
        RULES["restart"],
    ]
    assert one.done.endswith("the job went on from step 6.")
    assert (
        one.check
        == "Training resumed at step 7, 4.0 s after the detection, with 3 steps to make again."
    )
    assert one.is_settled
    assert one.lost_s == pytest.approx(
        4.5 - 1.0 + 4.0
    )  # to the next step's begin, and 3 steps and a part
    assert one.lost_gpu_hours == pytest.approx(4 * one.lost_s / 3600)
    text = "\n".join(story_lines(told))
    for said in (
        "on node n2, after step 9 (incident 5).",
        "looked at the steps of all ranks",
        "not seen  losses: no rank reports any",
        "evidence  root: logs/attempt-001/observer.log:1: was killed by SIGKILL\\u202e",
        "restart. A restart helps here. Rule: a restart helps, and comes at once after progress.",
        "The end: It ended.",
    ):
        assert said in text
    assert "\x1b" not in text
    assert "Others" not in text


def test_a_broken_loss_is_found_at_a_later_step_than_its_first():
    found = {"kind": "nan", "value": "nan", "first_step": 8, "step": 9}
    broken = event("ending", anomaly=found)
    (one,) = story([incident("anomaly", rank=None)], [broken]).incidents
    assert (one.what, one.place) == ("The loss became NaN at step 8", "found at step 9")


def test_an_incident_of_a_run_that_goes_on_is_not_settled_before_the_next_step():
    waiting = incident(resumed_at_s=None, restored_step=None)
    (one,) = story([waiting], state="running").incidents
    assert (one.check, one.is_settled) == ("Not yet: no step since then.", False)
    first, second = story(
        [waiting, incident(attempt=2, fault_at_s=30.0)], state="running"
    ).incidents
    assert first.check == "It had no effect: the next incident came before a step."
    assert first.is_settled
    assert second.is_settled
    (ended_with,) = story(
        [incident(action="stop", resumed_at_s=None, restored_step=None)]
    ).incidents
    assert ended_with.check == "The run ended: completed."
    assert ended_with.done.startswith("Every process of the job was ended, and the run with it.")


def test_notes_stand_between_the_incidents_in_the_order_of_time():
    events = [
        event("begun", 0.1, attempt=0),
        event("supervisor_followed", 5.0),
        event("handed_over", 5.1, node="n2"),
        event("rank_cut_off", 5.2, rank=3, why="it floods: 10001 messages in 0.4 s", pid=7),
        event("stop_asked", 40.0, attempt=2, by="Ctrl-C"),
        event("stop_asked", 41.0, attempt=2, by="the time limit of Slurm job 12"),
        event("leave_out", 37.0, attempt=2, first=3, last=5, doublings=0),
        event("slow_ranks", 37.1, attempt=2, shares={"3": 0.34}, node=None),
        event("slow_ranks", 37.2, attempt=2, shares={"2": 0.2, "3": 0.34}, node="n1"),
        event("slow_ranks", 37.3, attempt=2, shares={}, node=None),
        event("slow_ranks", 37.4, attempt=2, shares={"3": "x"}),
        event("step_time", 37.5, attempt=2, step_s=2.0, before_s=0.5, is_over=False),
        event("step_time", 37.6, attempt=2, step_s=0.5, before_s=0.5, is_over=True),
        event("step_time", 37.7, attempt=2),
        event("proposal", 30.0, attempt=2, number=1, text="Rank 1 is frozen."),
        event("withdrawn", 31.0, attempt=2, why="the job makes steps again."),
        event("loss_accepted", 33.0, attempt=2, first_step=12),
        event("observed", 34.0, attempt=2, text="Rank 1 is frozen."),
        event("notified", 35.0, attempt=2, incidents=[5], proposals=[]),
        event("notify_failed", 36.0, attempt=2, incidents=[5, 6], why="URL 1 (json://…)"),
    ]
    told = [getattr(one, "text", "INCIDENT") for one in story([incident()], events).chain]
    assert told == [
        "The supervisor ended; the next one took over, and training went on.",
        "The node of the supervisor was ending. Node n2 took over, and training went on.",
        "Rank 3 was cut off: it floods: 10001 messages in 0.4 s. Training went on, without a watch over this rank.",
        "INCIDENT",
        "Rank 1 is frozen. This waits for `holdfast runs approve r`.",
        "The proposal was withdrawn: the job makes steps again.",
        "The loss jumped at step 12, and a restart would not mend that: training went on from there.",
        "Rank 1 is frozen. Nothing was done, since the mode is observe.",
        "A message was sent about one incident.",
        "The message about 2 incidents could not be sent: URL 1 (json://…)",
        "Left out batches 3 to 5 of the data in all later attempts.",
        "Rank 3 was slow: the others waited for it for 34% of the time.",
        "Ranks 2 and 3 on node n1 were slow: the others waited for them for 34% of the time.",
        "No rank was slow any more.",
        "A step took 2 s; it had taken 0.5 s before.",
        "A step took 0.5 s again.",
        "Ctrl-C asked the run to stop.",
        "The run was to save its state and stop, since the time limit of Slurm job 12 was near.",
    ]


def test_records_of_other_versions_and_shapes_are_told_as_far_as_they_go():
    odd = incident(diagnosis={"evidence": [3, {"text": None}], "confidence": "high"})
    (one,) = story([odd], [event("decision"), event("launched", nodes=[1])]).incidents
    assert (one.confidence, one.signals, one.node) == (None, None, None)
    assert "\n".join(story_lines(story([odd])))


def test_a_run_that_has_only_begun_can_be_explained(tmp_path):
    with Ledger.open(ledger_url(tmp_path)) as ledger:
        with pytest.raises(NotFound):
            explain(ledger, tmp_path, "r")
        ledger.add_run(
            Run(
                run_id="r",
                state="running",
                command=["python"],
                options={},
                cwd="/",
                host="h",
                pid=1,
                started_at_s=5.0,
            )
        )
        told = "\n".join(story_lines(explain(ledger, tmp_path, "r")))
    assert "still going" in told
    assert "no incident so far" in told
