"""The records of a run's conduct for the next supervisor."""

import asyncio
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from holdfast.recover import policy
from holdfast.recover.channel import Peer
from holdfast.recover.conduct import HERE
from holdfast.recover.connected_node import Node
from holdfast.recover.leadership import HandedOver
from holdfast.recover.people.rollback import Rollback
from holdfast.recover.policy import NodesBack, NodeToLeave, Phase, RestartLimits, StopRequested

LEAVE = NodeToLeave(node="n2", why="a notice")
FAILED = policy.Diagnosed(
    fingerprint="f", step=5, summary="StateMismatch.", mitigation="m", restart_helps=False
)


def moved(supervisor, *events):
    """Have a supervisor begin a move, which dies after `events`.

    Return the phase in which the next one goes on.
    """
    conduct = supervisor()._conduct
    conduct.state = replace(conduct.state, phase=Phase.RUNNING)
    conduct.stopping.ask_ranks = lambda _view: None
    for event in events:
        conduct.decide_on(event)
    following = supervisor()._conduct
    following.adopted(in_place=False)
    return following.state.phase


@pytest.mark.parametrize("move", [LEAVE, NodesBack()])
def test_ranks_that_left_for_a_move_do_not_complete_the_run_below_the_next_supervisor(
    supervisor, move
):
    assert moved(supervisor, move) is Phase.LEAVING


@pytest.mark.parametrize(
    "events",
    [
        (NodesBack(), policy.CannotSave()),
        (LEAVE, policy.RankFailed()),
        (LEAVE, StopRequested("me")),
    ],
)
def test_the_next_supervisor_ends_no_attempt_for_a_move_that_was_given_up(supervisor, events):
    async def play():
        return moved(supervisor, *events)

    assert asyncio.run(play()) is Phase.RUNNING


def test_the_seconds_of_a_save_are_learned_and_known_to_the_next_supervisor(supervisor):
    one = supervisor()
    one._conduct.state = replace(one._conduct.state, phase=Phase.RUNNING)
    one._conduct.stopping.ask_ranks = lambda _view: None
    rank = Peer(role="rank", attempt=0, rank=0, local_rank=0, world_size=1, pid=1)
    saved = {"step": 3, "path": "/c/3", "size_bytes": 1, "stall_s": 0.1, "durable_s": 90.0}
    one._event(rank, "checkpoint", saved)
    one._conduct.decide_on(LEAVE)
    following = supervisor()._conduct
    following.adopted(in_place=False)
    for conduct in (one._conduct, following):
        left_s = conduct.state.deadline_s - conduct._clock.monotonic_s()
        assert left_s == policy.move_grace_s(RestartLimits(), 90.0)


def test_a_job_that_cannot_start_on_fewer_nodes_waits_for_all_nodes(supervisor):
    first = supervisor()
    first._recorder.event("begun", {})
    launches = first._conduct.launches
    first._nodes._launch = [SimpleNamespace()] * 2
    assert launches._size_for(lambda size: max(0, size - 2)) == 2
    stepped = replace(FAILED, has_stepped=True)
    assert launches.failed(stepped) == stepped
    failure = launches.failed(FAILED)
    assert failure.restart_helps
    assert "does not start on 2 of 4 nodes, so the run waits for all nodes" in failure.because
    for one in (launches, following := supervisor()._conduct.launches):
        if one is following:
            one.remember()
        assert one._size_for(lambda size: max(0, size - 2)) is None
        assert one._size_for(lambda _size: 0) == 4
    first._nodes._launch = [SimpleNamespace()] * 4
    assert launches.failed(FAILED) == FAILED
    first._recorder.event("begun", {})
    following.remember()
    assert following._size_for(lambda size: max(0, size - 2)) == 2, "the script may be mended"


def test_a_launch_that_needs_other_launchers_is_not_taken_for_one_below_those_that_were_kept(
    supervisor,
):
    """Otherwise the launchers are blamed for its failed start, and the job starts again in vain."""

    async def play():
        conduct = supervisor()._conduct
        conduct.begin()
        conduct.state = replace(conduct.state, phase=Phase.WAITING, has_stepped=True)
        conduct.decide_on(policy.Tick())
        assert conduct.state.phase is Phase.RUNNING
        return conduct.state.in_place

    assert not asyncio.run(play()), "no launcher is there"


def nested(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("value", [math.nan, nested(400)])
def test_an_event_that_the_database_refuses_costs_no_other_event(supervisor, value):
    one, peer = (
        supervisor(),
        Peer(role="rank", attempt=0, rank=3, local_rank=3, world_size=4, pid=1),
    )
    for data in ({"good": 1}, {"odd": value}):
        one.received(peer, {"kind": "event", "event": "k", "data": data}, 0.0, again=False)
    one._recorder.event("after", {})
    kinds = [kind for kind, _, _ in one._recorder.events("k", "malformed_message", "after")]
    assert kinds == ["k", "malformed_message", "after"]


class Sent:
    """The stream of a node."""

    def __init__(self):
        self.messages = []

    def send(self, message):
        self.messages.append(message)


@pytest.fixture
def leading_pod(supervisor, monkeypatch):
    """Return a supervisor in a pod, its node, another node, and the requests to the run."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    one, asked = supervisor(), []
    nodes, conduct = one._nodes, one._conduct
    own, other = (Node(node_id=name, name=name, stream=Sent(), launched=1) for name in "ab")
    nodes._nodes, nodes._own_node, nodes._launch = {"a": own, "b": other}, "a", [other]
    conduct.state = replace(conduct.state, phase=Phase.RUNNING)
    conduct.stopping.ask = lambda *words: asked.append(words)
    return one, own, other, asked


def test_a_pod_that_only_leads_hands_over_once_the_other_nodes_have_their_orders(leading_pod):
    one, own, other, asked = leading_pod
    own.launched = None
    other.order({"kind": "launch"})
    one.request_stop("SIGTERM", HERE, 1)
    one._conduct.hand_over_if_due()
    other.acknowledged(1)
    with pytest.raises(HandedOver):
        one._conduct.hand_over_if_due()
    assert [message["kind"] for message in other.stream.messages] == ["launch", "lead"]
    assert asked == []


def test_a_leading_pod_whose_ranks_no_spare_takes_stops_the_run(leading_pod):
    one, own, _, asked = leading_pod
    one._nodes._launch.append(own)
    one.request_stop("SIGTERM", HERE, 1)
    one._conduct.hand_over_if_due()
    assert (own.is_leaving, asked) == (False, [("SIGTERM", HERE, 1)])


def test_the_run_stops_if_all_pods_end(leading_pod):
    one, own, other, asked = leading_pod
    own.launched = None
    one.request_stop("SIGTERM", HERE, 1)
    other.is_leaving = True
    one._conduct.hand_over_if_due()
    assert asked == [("SIGTERM", HERE, 1)]


def test_a_node_without_a_connection_for_a_moment_is_no_reason_to_stop_the_run(leading_pod):
    one, own, other, asked = leading_pod
    own.launched = None
    one.request_stop("SIGTERM", HERE, 1)
    other.stream = None
    one._conduct.hand_over_if_due()
    assert (own.is_leaving, asked) == (True, [])


def test_a_person_who_stops_the_leading_pod_stops_the_run(leading_pod):
    one, own, _, asked = leading_pod
    own.launched = None
    one.request_stop("Ctrl-C", HERE, 1)
    assert (own.is_leaving, asked) == (False, [("Ctrl-C", HERE, 1)])


def trains(supervisor):
    """Return the conduct of the next supervisor, whose job has made a step, and its run's folder."""
    conduct = supervisor()._conduct
    conduct.state = replace(conduct.state, phase=Phase.RUNNING)
    conduct.view.start_step = 0
    conduct._kill = lambda: None
    return conduct


def test_a_rollback_that_is_not_possible_is_recorded_and_not_tried_again(supervisor):
    conduct = trains(supervisor)
    file = conduct._paths.rollback_request
    text = json.dumps(Rollback(number=7, to_step=20, by="ada").to_json())
    file.write_text(text)
    conduct.view.start_step = None
    conduct.roll_back_if_requested()
    assert conduct.state.phase is Phase.RUNNING, "the ranks may still restore"
    conduct.view.start_step = 0
    conduct.roll_back_if_requested()
    assert (conduct.state.phase, conduct.state.goes_back_to) == (Phase.LEAVING, 20)
    asyncio.run(conduct._go_back(conduct._rollback))
    assert not file.exists()
    file.write_text(text)  # as if the disk had refused
    for one in (conduct, trains(supervisor)):
        one.state = replace(one.state, phase=Phase.RUNNING)
        one.roll_back_if_requested()
        assert one.state.phase is Phase.RUNNING
    found = conduct._recorder.events("rollback_asked", "not_rolled_back")
    assert [(kind, data["number"], data["by"]) for kind, _, data in found] == [
        ("rollback_asked", 7, "ada"),
        ("not_rolled_back", 7, "ada"),
    ]


@pytest.mark.parametrize("every", [1, 100], ids=["each-step", "each-100-steps"])
def test_a_loss_that_stays_broken_over_a_takeover_is_proposed_once(supervisor, every):
    """No supervisor looks at the losses in between; a loss that breaks later is proposed anew."""
    rank, broken = Peer(role="rank", attempt=0, rank=0, local_rank=0, world_size=1, pid=1), math.nan

    def begin():
        one = supervisor(mode="propose")
        one._conduct.state = replace(one._conduct.state, phase=Phase.RUNNING)
        for kind in ("hello", "watch"):
            one.received(rank, {"kind": kind}, 0.0, again=False)
        return one

    def train(one, first_step, loss):
        for number in range(30):
            step = first_step + number * every
            report = {"step": step, "step_s": 0.1, "loss": loss, "metrics": {}, "at_s": 0.0}
            one.received(rank, {"kind": "step", **report}, 0.0, again=False)

    def proposals(one):
        return [data["anomaly"]["first_step"] for _, _, data in one._recorder.events("proposal")]

    former = begin()
    train(former, 1, 1.0)
    train(former, 10_000, broken)
    assert proposals(former) == [10_000]
    following = begin()
    following._conduct.decisions.take_up()
    train(following, 100_000, broken)
    assert proposals(following) == [10_000]
    train(following, 200_000, 1.0)
    train(following, 300_000, broken)
    assert proposals(following) == [10_000, 300_000]
