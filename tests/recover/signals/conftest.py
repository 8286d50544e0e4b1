"""A run's nodes with their health, without processes."""

from types import SimpleNamespace

import pytest

from holdfast.core.ledger import Incident, Ledger
from holdfast.core.paths import ledger_url
from holdfast.recover import policy
from holdfast.recover.attempt import AttemptView
from holdfast.recover.detectors.hang import HangLimits
from holdfast.recover.localise.in_run import NodeTests
from holdfast.recover.nodes import Node, Nodes
from holdfast.recover.signals.in_run import LOOK_TICKS, NodeHealth
from holdfast.recover.spec import RunSpec
from holdfast.testing.clock import FakeClock

RUNNING = policy.State(phase=policy.Phase.RUNNING)
KILLED = policy.Diagnosed(
    fingerprint="f", step=5, summary="Killed.", mitigation="m", restart_helps=True
)


class Place:
    """A run on two nodes, with a spare or without, and the health of its nodes."""

    def __init__(
        self, folder, *, spare=True, mode="act", nnodes=2, category="Infrastructure", states=None
    ):
        self.clock = FakeClock()
        self.ledger = Ledger.open(ledger_url(folder))
        self.recorded, self.told, self.said, self.added = [], [], [], []
        self.nodes = Nodes(None, self.clock, run_id="r", token="t", generation=1)
        names = [f"n{number + 1}" for number in range(nnodes + spare)]
        for name in names:
            one = Node(node_id=name, name=name, stream=SimpleNamespace(send=lambda _: None))
            self.nodes._nodes[name] = one
        launched = list(self.nodes._nodes.values())[:nnodes]
        self.nodes._launch = launched
        for one in launched:
            one.launched = 1
        spec = RunSpec(command=("true",), cwd=str(folder), nnodes=nnodes, mode=mode)
        self.tests = NodeTests("r", spec, self.nodes, self.ledger, self, self.clock, self._observe)
        self.health = NodeHealth(
            "r",
            spec,
            self.nodes,
            self.tests,
            self,
            self.clock,
            self._observe,
            self.told.append,
            states,
        )
        self.incident = Incident(
            run_id="r",
            attempt=1,
            kind="exit",
            rank=None,
            step=5,
            fault_at_s=0.0,
            detected_at_s=0.0,
            diagnosis={"category": category},
        )
        self.view = AttemptView.begin(1, HangLimits())

    def _observe(self, _kind, data):
        self.said.append(data["text"])

    def event(self, kind, data, rank=None):
        self.recorded.append((kind, data))

    event_soon = event

    def events(self, *kinds):
        return [(kind, 1, data) for kind, data in self.recorded if kind in kinds]

    def complain(self, text):
        self.said.append(text)

    def add(self, sentences):
        self.added += sentences

    def signal(self, name, signal, *, is_over=False, age_s=0.0):
        message = {
            "kind": "node_signal",
            "fact": signal.to_json(),
            "age_s": age_s,
            "is_over": is_over,
        }
        self.health.signalled(name, message)

    def notice(self, name, left_s, *, is_over=False):
        fact = {"source": "s", "kind": "maintenance", "text": "reboot is planned", "left_s": left_s}
        message = {"kind": "notice", "fact": fact, "age_s": 0.0, "is_over": is_over}
        self.health.signalled(name, message)

    def sources(self, name, **sources):
        self.health.signalled(name, {"kind": "cannot_see", "sources": sources})

    def look(self, state=RUNNING):
        for _ in range(LOOK_TICKS):
            self.health.tick(self.view, state)

    def fail(self, failure=KILLED):
        for one in self.nodes.launched:
            if one.last_end is None:
                one.last_end = (1, 1)
            one.launched = None
        failure = self.health.failed(failure, self)
        self.health.explain(self)
        return failure

    def kinds(self):
        return [kind for kind, _ in self.recorded]

    def chosen(self):
        self.tests.leave_out()
        return [one.name for one in self.nodes._places(2)]


@pytest.fixture
def make(tmp_path):
    places = []

    def made(**options):
        places.append(Place(tmp_path, **options))
        return places[-1]

    yield made
    for place in places:
        place.ledger.close()
