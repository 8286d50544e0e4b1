"""The moments at which a run tests its nodes, and the use of cordoned nodes."""

import asyncio
from types import SimpleNamespace

import pytest

from holdfast.core.errors import LedgerError
from holdfast.core.ledger import Incident, Ledger, Verdict
from holdfast.core.paths import RunPaths, ledger_url
from holdfast.recover import policy
from holdfast.recover.attempt import AttemptView
from holdfast.recover.connected_node import Node
from holdfast.recover.detectors.hang import Frozen, HangLimits
from holdfast.recover.launching import launches
from holdfast.recover.localise.in_run import NodeTests, is_due
from holdfast.recover.localise.pairing import BASE_PRIOR, Pairing
from holdfast.recover.localise.session import Report
from holdfast.recover.localise.solo import CheckResult
from holdfast.recover.nodes import Nodes
from holdfast.recover.spec import RunSpec
from holdfast.testing import FakeClock

ECC = {"category": "Infrastructure", "decided_by": ["gpu-ecc"]}
KILLED = {"category": "Infrastructure", "decided_by": ["observer-killed"]}
SCRIPT = {"category": "Script", "decided_by": ["python-key-error"]}


def incident(diagnosis):
    return Incident(
        run_id="r",
        attempt=1,
        kind="exit",
        rank=0,
        step=1,
        fault_at_s=1.0,
        detected_at_s=1.0,
        diagnosis=diagnosis,
    )


def view(*, lost=None, hang_of=(), state=None, is_locked=False):
    seen = AttemptView.begin(1, HangLimits())
    seen.lost_node = lost
    if hang_of != ():
        seen.frozen = Frozen(
            rank=hang_of, state=state, waited_s=1.0, limit_s=1.0, is_locked=is_locked
        )
    return seen


@pytest.mark.parametrize(
    ("mode", "seen", "diagnosis", "several", "due"),
    [
        ("auto", view(), ECC, True, True),
        ("auto", view(), ECC, False, True),
        ("auto", view(), KILLED, True, False),
        ("auto", view(), SCRIPT, True, False),
        ("auto", view(lost="n2"), ECC, True, False),
        ("auto", view(hang_of=None), SCRIPT, True, True),
        ("auto", view(hang_of=None), SCRIPT, False, False),
        ("auto", view(hang_of=1), SCRIPT, True, False),
        ("auto", view(hang_of=1, state="D"), ECC, True, True),
        ("auto", view(hang_of=1, state="T"), ECC, True, False),
        ("auto", view(hang_of=1, is_locked=True), ECC, True, False),
        ("always", view(), SCRIPT, True, True),
        ("never", view(), ECC, True, False),
    ],
)
def test_nodes_are_tested_where_one_may_have_caused_the_failure(
    mode, seen, diagnosis, several, due
):
    assert is_due(mode, seen, incident(diagnosis), several=several) is due


class Place:
    """A run's nodes that are connected and free, with a ledger."""

    def __init__(self, tmp_path, names, *, nnodes=2, mode="auto"):
        self.home = tmp_path
        self.ledger = Ledger.open(ledger_url(tmp_path))
        self.said, self.recorded = [], []
        self.nodes = Nodes(None, FakeClock(), run_id="r", token="t", generation=1)
        for name in names:
            node = Node(node_id=name, name=name, stream=SimpleNamespace(send=lambda _: None))
            self.nodes._nodes[name] = node
        spec = RunSpec(command=("true",), cwd=str(tmp_path), nnodes=nnodes, test_nodes=mode)
        self.tests = NodeTests(
            "r",
            spec,
            self.nodes,
            self.ledger,
            self,
            FakeClock(1000.0),
            lambda _, data: self.said.append(data["text"]),
        )

    def event(self, kind, data, rank=None):
        self.recorded.append(kind)

    def complain(self, text):
        raise AssertionError(text)

    def judged(self, name, probability, *, is_hard=False):
        verdict = Verdict(
            name=name, outcome="bad", probability=probability, evidence="e", is_hard=is_hard
        )
        self.ledger.add_verdicts([verdict], at_s=1.0, by="r0", cordons=[name])


@pytest.fixture
def make(tmp_path):
    places = []

    def made(*names, **options):
        places.append(Place(tmp_path, names, **options))
        return places[-1]

    yield made
    for place in places:
        place.ledger.close()


def test_what_the_ledger_has_cordoned_is_launched_on_no_more(make):
    place = make("n1", "n2", "n3")
    place.ledger.cordon("n1", at_s=1.0, by="me", why="fan")
    place.tests.leave_out()
    assert place.nodes.missing(2) == 0
    assert place.nodes.missing(3) == 1
    assert [node.name for node in place.nodes._places(2)] == ["n2", "n3"]
    assert place.tests.left_out == ["n1"]
    place.ledger.return_node("n1", force=True)
    place.tests.leave_out()
    assert place.nodes.missing(3) == 0


def test_without_enough_others_the_least_bad_node_is_taken_and_said(make):
    place = make("n1", "n2", "n3")
    place.judged("n1", 0.999)
    place.judged("n2", 0.98)
    place.tests.leave_out()
    assert place.nodes.missing(2) == 1
    assert place.tests.readmit(2)
    assert place.nodes.missing(2) == 0
    assert place.tests.left_out == ["n1"]
    assert place.said == ["too few nodes without n2: the run goes on there, though cordoned"]
    assert place.recorded == ["nodes_readmitted"]
    place.tests.leave_out()
    assert place.nodes.missing(2) == 0, "until the next tests"


def test_a_hard_fault_and_a_persons_cordon_stay_out(make):
    place = make("n1", "n2", "n3")
    place.judged("n1", 1.0, is_hard=True)
    place.ledger.cordon("n2", at_s=1.0, by="me", why="fan")
    place.tests.leave_out()
    assert not place.tests.readmit(2)
    assert place.nodes.missing(2) == 1


def test_a_run_of_one_node_goes_on_where_it_was_started(make):
    place = make("n1", nnodes=1)
    place.ledger.cordon("n1", at_s=1.0, by="me", why="fan")
    place.tests.leave_out()
    assert place.tests.readmit(1)
    assert place.nodes.missing(1) == 0


def test_a_lost_node_is_tested_before_a_launch_on_it_alone(make):
    place = make("n1", "n2", "n3")
    case = SimpleNamespace(incident=incident(ECC), add=lambda _: None)
    place.tests.failed(view(lost="n2"), case)
    n1, n2, n3 = place.nodes.connected
    assert not place.tests.is_due_for([n1, n3])
    assert place.tests.is_due_for([n1, n2])


def launches_of(place, nnodes, monkeypatch, min_nodes=None):
    monkeypatch.setattr(launches, "SPARE_S", 0.01)
    monkeypatch.setattr(launches, "NODES_S", 0.02)
    observe = place.tests._observe
    paths, recorder = RunPaths(place.home, "r"), SimpleNamespace(any_step=True)
    spec = RunSpec(command=("true",), cwd="/", nnodes=nnodes, min_nodes=min_nodes)
    return launches.Launches(
        paths, place.nodes, recorder, observe, place.tests, spec, place.tests._clock
    )


def test_nodes_that_stay_out_are_named_where_a_launch_waited_for_too_long(make, monkeypatch):
    place = make("n1", "n2", "n3", nnodes=3)
    place.judged("n2", 1.0, is_hard=True)
    found = asyncio.run(launches_of(place, 3, monkeypatch).choose(asyncio.Event()))
    assert found.outcome.startswith("1 of 3 nodes are missing")
    assert "Cordoned: n2; after a repair: `holdfast nodes return NODE`." in found.outcome


def test_a_run_that_is_queued_again_waits_for_nodes_no_longer(make, monkeypatch):
    place = make("n1", "n2", nnodes=3)
    launching, looked = launches_of(place, 3, monkeypatch), []

    async def look(connected, cordoned, _given_up):
        looked.append((connected, cordoned))
        launching._requeue.queued = "The run is queued again."
        return True

    launching._requeue.look = look
    found = asyncio.run(launching.choose(asyncio.Event()))
    assert found == policy.NodesMissing("The run is queued again.", queued=True)
    assert looked == [(["n1", "n2"], frozenset())]


def test_a_launch_that_waits_goes_on_once_a_person_has_returned_the_node(make, monkeypatch):
    place = make("n1", nnodes=1)
    place.tests._several = True
    place.ledger.cordon("n1", at_s=1.0, by="me", why="fan")
    gather = place.nodes.gather

    async def meanwhile(*args, **options):
        place.ledger.return_node("n1", force=True)
        return await gather(*args, **options)

    place.nodes.gather = meanwhile
    nodes, _ = asyncio.run(launches_of(place, 1, monkeypatch).choose(asyncio.Event()))
    assert [node.name for node in nodes] == ["n1"]


def test_tests_that_are_given_up_leave_nothing_due(make):
    async def scenario():
        place = make("n1", "n2", mode="always")
        assert place.tests.is_due
        given_up = asyncio.Event()
        given_up.set()
        assert not await place.tests.run(given_up)
        assert not place.tests.is_due
        assert place.recorded == ["nodes_test_began", "nodes_not_tested"]

    asyncio.run(scenario())


def report_of_bad(name):
    judgement = Pairing(
        priors=dict.fromkeys(("n1", "n2", "n3"), BASE_PRIOR), failed_solo=frozenset({name})
    ).judge()
    broken = CheckResult(name="memory", outcome="failed", evidence="other bytes")
    return Report(solo={name: [broken]}, judgement=judgement, seconds=1.0, is_complete=True)


def test_a_cordon_of_the_tests_is_marked_in_the_scheduler(make, tmp_path, monkeypatch):
    place = make("n1", "n2", "n3")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert asyncio.run(place.tests._take(report_of_bad("n2")))
    marked, verdict = place.said
    assert marked.startswith("n2 is not cordoned in Kubernetes: There are no credentials")
    assert marked.endswith("holdfast.dev/faulty=fails-its-check-of-memory-other-bytes:NoSchedule")
    assert verdict.startswith("Node n2 fails its check of memory")
    assert place.recorded == ["nodes_tested", "nodes_marked"]


def test_a_bad_node_is_left_out_also_where_the_ledger_cannot_be_written(make, monkeypatch):
    place, said = make("n1", "n2", "n3"), []
    place.complain = said.append
    found = report_of_bad("n2")

    def refuse(*_, **__):
        raise LedgerError("full")

    monkeypatch.setattr(place.ledger, "add_verdicts", refuse)
    place.tests.failed(view(), SimpleNamespace(incident=None, add=said.extend))
    assert asyncio.run(place.tests._take(found))
    assert said == ["full", "Node n2 fails its check of memory (other bytes) and is cordoned."]
    assert place.recorded == ["nodes_tested"]
    place.tests.leave_out()
    assert place.tests.left_out == ["n2"]
    assert not place.tests.readmit(3), "a wrong result by itself"


def test_nodes_on_which_a_loss_broke_are_tested_before_the_next_launch(make):
    place = make("n1", "n2")
    case = SimpleNamespace(incident=incident(SCRIPT), add=lambda _: None)
    place.tests.suspect(["n1"])
    place.tests.failed(view(), case)
    assert place.tests.is_due
    never = make("n1", "n2", mode="never")
    never.tests.suspect(["n1"])
    never.tests.failed(view(), case)
    assert not never.tests.is_due


def test_the_ranks_of_a_replay_move_by_one_node(make, monkeypatch):
    place = make("n1", "n2", "n3")
    launched = launches_of(place, 3, monkeypatch)
    place.nodes._launch = place.nodes.connected
    heads = []

    async def free_port(head):
        heads.append(head.name)
        return 4242

    monkeypatch.setattr(place.nodes, "_free_port", free_port)
    for moves, names in ((True, ["n2", "n3", "n1"]), (False, ["n1", "n2", "n3"])):
        assert launched.move_ranks(moves=moves) is moves, "a launcher cannot be kept for that"
        chosen, _ = asyncio.run(launched._choose(asyncio.Event()))
        assert [node.name for node in chosen] == names
        assert heads[-1] == names[0]
    place.nodes._launch = place.nodes.connected[:1]
    assert not launched.move_ranks(moves=True), "on one node the GPUs change below the launcher"


def test_a_job_goes_on_with_fewer_nodes_and_grows_once_there_are_more(make, monkeypatch):
    place = make("n1", "n2", "n3")
    launched = launches_of(place, 4, monkeypatch, min_nodes=2)
    never = asyncio.Event()
    assert asyncio.run(launched._gather(never)) == 2, "3 nodes do not divide the work of 4"
    n1, n2, n3 = place.nodes.connected
    place.nodes._launch = [n1, n2]
    n1.launched = n2.launched = 1
    assert not launched.can_grow
    n4 = Node(node_id="n4", name="n4", stream=n3.stream)
    place.nodes._nodes["n4"] = n4
    assert launched.can_grow
    place.nodes.cordoned = frozenset({"n3"})
    assert not launched.can_grow
    launched._recorder.any_step = False
    place.nodes._nodes.pop("n4")
    n1.launched = n2.launched = None
    assert asyncio.run(launched._gather(never)) is None, "at the start all nodes are waited for"
