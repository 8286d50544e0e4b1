"""One record of each decision, the signals beside it, and proposals that outlive a supervisor."""

from dataclasses import replace

import pytest

from holdfast.core.explanation.plain_words import RULES
from holdfast.core.ledger import Ledger, Run
from holdfast.core.paths import RunPaths, ledger_url
from holdfast.recover import policy
from holdfast.recover.attempt import AttemptView
from holdfast.recover.channel import Peer
from holdfast.recover.detectors.anomaly import Anomaly
from holdfast.recover.detectors.hang import Frozen, HangLimits
from holdfast.recover.people import modes
from holdfast.recover.people.decisions import PROPOSALS, Decisions, open_proposal
from holdfast.recover.people.signals import signals_of
from holdfast.recover.policy import Phase
from holdfast.recover.recorder import Recorder
from holdfast.recover.spec import RunSpec
from holdfast.testing import FakeClock

RUNNING = policy.State(phase=Phase.RUNNING)
SPIKE = Anomaly(kind="spike", first_step=5, step=7, value=9.0, usual=1.0, limit=2.0)
FROZEN = Frozen(waited_s=61.0, limit_s=60.0, rank=1, state="T")


@pytest.fixture
def world(tmp_path):
    """Return the decider of a run in a mode, its recorder, its observations, and its folder."""
    paths = RunPaths(tmp_path, "r")
    paths.logs.mkdir(parents=True)
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
        recorder = Recorder(paths, ledger, FakeClock(), pytest.fail)
        observed = []

        def begin(mode):
            spec = RunSpec(command=("true",), cwd=str(tmp_path), mode=mode)
            return Decisions(
                spec, recorder, paths.approved, lambda kind, data: observed.append((kind, data))
            )

        yield begin, recorder, observed, paths
        recorder.close()


def view_of(ranks=2):
    view = AttemptView.begin(1, HangLimits())
    for rank in range(ranks):
        peer = Peer(
            role="rank", attempt=1, rank=rank, local_rank=rank, world_size=ranks, pid=100 + rank
        )
        shim = Peer(
            role="shim", attempt=1, rank=rank, local_rank=rank, world_size=ranks, pid=200 + rank
        )
        view.on_message(shim, {"kind": "started", "pid": 100 + rank, "starts_again": True}, 0.0)
        for message in ({"kind": "hello"}, {"kind": "watch"}):
            view.on_message(peer, message, 0.0)
    return view


def tell(decisions, view, event, state=RUNNING, now_s=9.0):
    verdict = decisions.decide(view, state, event, now_s)
    decisions.record(view, state, event, verdict, now_s)
    return verdict


def recorded(recorder, *kinds):
    return [(kind, data) for kind, _, data in recorder.events(*kinds)]


def approve(recorder, paths):
    """Write the number of the last proposal as `holdfast runs approve` does."""
    _, proposal = recorded(recorder, "proposal")[-1]
    paths.approved.write_text(f"{proposal['number']}\n")


def test_each_decision_has_one_record_with_state_finding_plan_and_mode(world):
    begin, recorder, _, _ = world
    decisions, view = begin("act"), view_of()
    failing = tell(decisions, view, policy.RankFailed()).state
    tell(decisions, view, policy.Tick(), failing)
    diagnosing = tell(decisions, view, policy.JobExited(1), failing).state
    failure = policy.Diagnosed(
        fingerprint="f", step=3, has_stepped=True, summary="S.", mitigation="M.", restart_helps=True
    )
    tell(decisions, view, failure, diagnosing)
    (_, first), (_, second) = recorded(recorder, "decision")
    assert (first["mode"], first["finding"]["kind"]) == ("act", "rank_failed")
    assert first["plan"]["rule"] == "await-teardown"
    assert "the steps of all ranks" in first["signals"]["looked_at"]
    assert second["finding"]["kind"] == "diagnosed"
    assert second["finding"]["fingerprint"] == "f"
    assert second["state"]["phase"] == "diagnosing"
    assert (second["plan"]["action"], second["plan"]["rule"]) == ("restart", "restart")


def test_an_approved_move_to_another_node_is_recorded_as_approved(world):
    begin, recorder, _, paths = world
    decisions, view = begin("propose"), view_of()
    tell(decisions, view, policy.NodeToLeave(node="n2", why="a notice"))
    approve(recorder, paths)
    assert decisions.is_approved()
    moving = tell(decisions, view, modes.Approved())
    assert (moving.state.phase, moving.state.leaving) == (Phase.STOPPING, "n2")
    assert open_proposal(recorder.events(*PROPOSALS), recorder.attempt) is None
    last = recorded(recorder, "decision")[-1][1]
    assert last["plan"]["action"] == "save the state, and go on without the node"
    assert last["plan"]["rule"] == "approved"


FAILURE = policy.Diagnosed(
    fingerprint="f", step=3, has_stepped=True, summary="S.", mitigation="M.", restart_helps=True
)
DIAGNOSING = policy.State(phase=Phase.DIAGNOSING)
AGAIN = replace(DIAGNOSING, roots_since_gain=(("f", True),), best_step=9)
RESOLVED = {
    "restart": (DIAGNOSING, FAILURE),
    "restart-after-wait": (DIAGNOSING, replace(FAILURE, waits_for_outside=True)),
    "work-done": (DIAGNOSING, replace(FAILURE, restart_helps=False, work_done=True)),
    "not-mended": (DIAGNOSING, replace(FAILURE, restart_helps=False)),
    "kept-launcher": (replace(DIAGNOSING, in_place=True), replace(FAILURE, has_stepped=False)),
    "stop-asked": (replace(DIAGNOSING, stop_by="me"), FAILURE),
    "same-root": (AGAIN, FAILURE),
    "budget-spent": (replace(AGAIN, vain_at_s=(1.0,) * 20), replace(FAILURE, fingerprint="g")),
}
ENDED = {
    "await-teardown": policy.RankFailed(),
    "exited": policy.JobExited(1),
    "kill-frozen": policy.JobFrozen(),
    "leave-broken-state": policy.LossBroken(step=1, is_spike=False),
    "go-on": policy.LossBroken(step=1, is_spike=True, can_go_back=False),
    "nodes-missing": policy.NodesMissing("None came."),
    "queued-again": policy.NodesMissing("It is queued again.", queued=True),
}


@pytest.mark.parametrize(
    ("rule", "state", "event"),
    [(rule, *one) for rule, one in RESOLVED.items()]
    + [(rule, RUNNING, event) for rule, event in ENDED.items()],
)
def test_the_record_names_the_rule_that_decided(world, rule, state, event):
    begin, recorder, _, _ = world
    tell(begin("act"), view_of(), event, state)
    ((_, decision),) = recorded(recorder, "decision")
    assert decision["plan"]["rule"] == rule
    assert rule in RULES


def test_the_wait_before_a_restart_is_in_the_record(world):
    begin, recorder, _, _ = world
    diagnosing = policy.State(phase=Phase.DIAGNOSING)
    failure = policy.Diagnosed(
        fingerprint="f",
        step=3,
        has_stepped=True,
        summary="S.",
        mitigation="M.",
        restart_helps=True,
        waits_for_outside=True,
    )
    tell(begin("act"), view_of(), failure, diagnosing)
    ((_, decision),) = recorded(recorder, "decision")
    assert decision["plan"]["wait_s"] == policy.RestartLimits().outside_wait_s
    assert decision["plan"]["rule"] == "restart-after-wait"


def test_a_proposal_is_shown_recorded_and_carried_out_once_its_number_is_approved(world):
    begin, recorder, observed, paths = world
    decisions, view = begin("propose"), view_of()
    view.frozen = FROZEN
    assert tell(decisions, view, policy.JobFrozen()).state == RUNNING
    tell(decisions, view, policy.JobFrozen())  # at each tick
    ((_, proposal),) = recorded(recorder, "proposal")
    assert proposal["text"].startswith("Rank 1 is frozen: no step for 61 s. Proposed: ")
    assert [kind for kind, _ in observed] == ["proposal"]
    assert decisions.holds_hang
    for said in (b"", b"-7\n", b"garbage" * 1000, b"\xff"):
        paths.approved.write_bytes(said)
        assert not decisions.is_approved()
    approve(recorder, paths)
    assert decisions.is_approved()
    assert tell(decisions, view, modes.Approved()).actions == (policy.Kill(),)
    assert not decisions.is_approved()
    kinds = [kind for kind, _ in recorded(recorder, "proposal", "approved", "withdrawn")]
    assert kinds == ["proposal", "approved"]
    plans = [data["plan"]["rule"] for _, data in recorded(recorder, "decision")]
    assert plans == ["propose", "approved"]


@pytest.mark.parametrize(("mode", "kind"), [("propose", "proposal"), ("observe", "observed")])
def test_a_rank_that_left_the_others_is_named_and_the_others_go_on(world, mode, kind):
    begin, recorder, _, _ = world
    decisions, view = begin(mode), view_of()
    shim = Peer(role="shim", attempt=1, rank=1, local_rank=1, world_size=2, pid=201)
    ended = {"kind": "exited", "pid": 101, "returncode": 0, "at_monotonic_s": 1.0}
    view.on_message(shim, ended, 1.0)
    (view.left,) = view.exits
    for _ in range(3):  # at each tick
        assert tell(decisions, view, policy.RankFailed(others_run=True)).state == RUNNING
    ((_, held),) = recorded(recorder, kind)
    assert held["text"].startswith("Rank 1 has ended with code 0 in the middle of the training")
    ((_, decision),) = recorded(recorder, "decision")
    assert decision["finding"]["rank"] == 1


def test_a_decision_without_a_name_is_recorded_all_the_same(world, monkeypatch):
    begin, recorder, _, _ = world
    monkeypatch.setattr("holdfast.recover.people.decisions.KINDS", {})
    monkeypatch.setattr("holdfast.recover.policy.rule_of", lambda state, event: "new-rule")
    tell(begin("act"), view_of(), policy.RankFailed())
    ((_, decision),) = recorded(recorder, "decision")
    assert (decision["finding"]["kind"], decision["plan"]["rule"]) == ("RankFailed", "new-rule")


def test_an_approved_broken_loss_goes_back_to_before_its_first_step(world):
    begin, recorder, _, paths = world
    decisions, view = begin("propose"), view_of()
    view.anomaly = SPIKE
    tell(decisions, view, policy.LossBroken(step=7, is_spike=True))
    view.anomaly = None  # the training goes on
    assert decisions.holds_loss
    tell(decisions, view, policy.LossBroken(step=10, is_spike=True))
    approve(recorder, paths)
    assert decisions.is_approved()
    assert tell(decisions, view, modes.Approved()).state.phase is Phase.FAILING
    assert view.anomaly == SPIKE


def test_a_proposal_about_an_attempt_that_is_over_is_over_too(world):
    begin, recorder, _, _ = world
    view = view_of()
    view.frozen = FROZEN
    tell(begin("propose"), view, policy.JobFrozen())
    found = recorder.events(*PROPOSALS)
    assert open_proposal(found, recorder.attempt) is not None
    assert open_proposal(found, recorder.attempt + 1) is None


def test_what_is_only_observed_is_recorded_and_shown(world):
    begin, recorder, observed, paths = world
    decisions, view = begin("observe"), view_of()
    view.frozen = FROZEN
    tell(decisions, view, policy.JobFrozen())
    tell(decisions, view, modes.WentOn())
    assert [kind for kind, _ in recorded(recorder, "observed", "proposal", "withdrawn")] == [
        "observed"
    ]
    ((_, decision),) = recorded(recorder, "decision")
    assert (decision["mode"], decision["plan"]["rule"]) == ("observe", "note")
    ((kind, told),) = observed
    assert kind == "observed"
    assert told["text"].endswith("Nothing is done, since the mode is observe.")
    paths.approved.write_bytes(b"1\n")
    assert not decisions.is_approved()


def test_the_next_supervisor_takes_up_a_broken_loss_and_looks_anew_at_a_hang(world):
    begin, recorder, _, paths = world
    view = view_of()
    view.anomaly = SPIKE
    tell(begin("propose"), view, policy.LossBroken(step=7, is_spike=True))
    following, later = begin("propose"), view_of()
    following.take_up()
    approve(recorder, paths)
    assert following.is_approved()
    tell(following, later, modes.Approved())
    assert later.anomaly == SPIKE
    frozen = view_of()
    frozen.frozen = FROZEN
    tell(begin("propose"), frozen, policy.JobFrozen())
    last = begin("propose")
    last.take_up()
    assert not last.holds_hang
    assert open_proposal(recorder.events(*PROPOSALS), 0) is None


def test_a_broken_loss_that_is_only_observed_is_still_held_by_the_next_supervisor(world):
    begin, recorder, _, _ = world
    view = view_of()
    view.anomaly = SPIKE
    tell(begin("observe"), view, policy.LossBroken(step=7, is_spike=True))
    following = begin("observe")
    following.take_up()
    assert following.holds_loss
    recorder.attempt += 1
    later = begin("observe")
    later.take_up()
    assert not later.holds_loss


@pytest.mark.parametrize(
    ("broken_from", "found_at", "proposals"),
    [(500, 510, 1), (500, 1400, 1), (5000, 5010, 2)],
    ids=["at once", "losses-each-100-steps", "later"],
)
def test_a_loss_that_stays_broken_over_a_takeover_is_one_finding(
    world, broken_from, found_at, proposals
):
    """Nobody sees the losses in between; a loss that breaks later is another finding.

    The steps that the earlier supervisor has seen are reported again; nobody looks at their losses.
    """
    begin, recorder, _, _ = world
    view = view_of()
    view.anomaly = SPIKE
    tell(begin("propose"), view, policy.LossBroken(step=7, is_spike=False))
    following, later = begin("propose"), view_of()
    following.take_up()
    later.steps = {0: 100}
    tell(following, later, policy.Tick())
    for step in (500, 501):
        following.looked_at(step)
    later.steps = {0: found_at}
    later.anomaly = replace(SPIKE, kind="not finite", first_step=broken_from, step=found_at)
    tell(following, later, policy.LossBroken(step=found_at, is_spike=False, since=broken_from))
    assert len(recorder.events("proposal")) == proposals


def test_signals_that_cannot_be_seen_are_named_with_the_reason():
    view = view_of(ranks=3)
    view.watched.discard(2)
    view.states[1] = "hidden"
    view.detector.attached(2, 0.0)
    seen = signals_of(view, healthy_after=0)
    assert "the steps of ranks 0, 1" in seen["looked_at"]
    assert "the steps of rank 2: no holdfast.attach()" in seen["not_seen"]
    assert "the process states of rank 1: it may not be read" in seen["not_seen"]
    assert "losses: --healthy-after is 0" in seen["not_seen"]
    view.frozen = FROZEN
    assert (
        "the stacks of all ranks: the nodes do not answer"
        in signals_of(view, healthy_after=20)["not_seen"]
    )
    nothing = signals_of(AttemptView.begin(1, HangLimits()), healthy_after=20)
    assert "losses: no rank reports any" in nothing["not_seen"]
    assert any(one.startswith("the ends of all ranks") for one in nothing["not_seen"])
