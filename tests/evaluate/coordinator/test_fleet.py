"""Which model an engine is given, when it was started anew for one."""

from types import SimpleNamespace

import pytest
from cluster_of_fakes import CURVE, MANIFEST, config

from holdfast.evaluate.coordinator import wire
from holdfast.evaluate.coordinator.chronicle import Chronicle
from holdfast.evaluate.coordinator.config import CoordinatorFiles
from holdfast.evaluate.coordinator.fleet import Fleet
from holdfast.evaluate.coordinator.models import Models
from holdfast.evaluate.policy.events import EngineReady
from holdfast.testing import FakeClock


class Peer:
    def __init__(self, role, name, **more):
        self.hello = wire.Hello(token="", role=role, name=name, node=0, **more)
        self.said = []
        self.send = self.said.append

    def close(self):
        pass


class Small:
    """A node with one engine that serves model 0; model 1 lies there, too."""

    def __init__(self, folder, certify):
        self.models, self.events, self.clock = Models(folder / "models"), [], FakeClock()
        CoordinatorFiles(folder).folder.mkdir()
        silent = SimpleNamespace(append=lambda _line: None)
        self.fleet = Fleet(
            config(folder, [], engines_per_node=1, certify=certify),
            self.clock,
            self.models,
            emit=self.events.append,
            known=lambda _model: None,
            lost=lambda _seat: None,
            failed=None,
            chronicle=Chronicle(silent, self.clock, 0.0),
        )
        for number in (0, 1):
            self.models.add(wire.AddModel(model=number, name=str(number), manifest=MANIFEST))
        self.node = Peer("node", "node-0")
        self.fleet.node_joined(self.node)
        report = wire.NodeReport(host="here", cores=1, memory_bytes=1, gpus=0, store="here:1")
        self.fleet.node_reported(self.node, report)
        for number in (0, 1):
            fetched = wire.ModelFetched(
                model=number, folder="/there", digest=str(number), remote_bytes=1, peer_bytes=0, seconds=0.0
            )
            self.fleet.fetched(self.node, fetched)
        self.start_engine()

    def start_engine(self):
        self.engine = Peer("engine", "node-0/0", pid=len(self.events) + 1)
        self.fleet.engine_joined(self.engine)

    def asked(self):
        return [one.model for one in self.engine.said if isinstance(one, wire.Serve)]

    def serving(self, number, how, canary=0.0):
        said = wire.Serving(
            model=number, how=how, seconds=0.0, numerics="n", max_length=8, curve=CURVE, canary=[canary]
        )
        self.fleet.serving(self.engine, said)

    def swap_to(self, number):
        (ready,) = (event.engine for event in self.events if isinstance(event, EngineReady))
        self.fleet.swap(ready, number)


@pytest.fixture
def small(tmp_path):
    def make(certify):
        small = Small(tmp_path, certify)
        assert small.asked() == [0], "the oldest"
        small.serving(0, "load")
        return small

    return make


def test_an_engine_that_starts_anew_to_certify_a_model_loads_that_one(small):
    small = small("first")
    small.swap_to(1)
    assert wire.StopEngine(name="node-0/0") in small.node.said
    small.start_engine()
    assert small.asked() == [1], "though the one before is still evaluated"
    small.serving(1, "load")
    assert [event.model for event in small.events if isinstance(event, EngineReady)] == [0, 1]


def test_an_engine_whose_swap_went_wrong_loads_what_it_was_to_swap_to(small):
    small = small("beside")
    small.models.certify(small.models.get(1), [0.0])
    small.swap_to(1)
    small.serving(1, "swap", canary=0.5)
    small.start_engine()
    assert small.asked() == [1]


def test_an_engine_that_was_loading_what_ended_meanwhile_goes_on(small):
    small = small("beside")
    small.swap_to(1)
    ended = small.models.get(1)
    small.models.end(ended, wire.ModelOutcome(model=1, error="a newer checkpoint came", is_stale=True))
    small.fleet.serve_failed(small.engine, wire.ServeFailed(model=1, why="its files are gone", restart=False))
    assert small.asked() == [0, 1, 0]


def test_the_spare_engine_loads_what_others_serve_so_that_the_next_is_quick(small):
    small = small("beside")
    small.models.certify(small.models.get(1), [0.0])
    small.fleet._orders.seat("spare/0", small.fleet.nodes["node-0"])
    small.engine = Peer("engine", "spare/0", pid=99)
    small.fleet.engine_joined(small.engine)
    assert small.asked() == [0]
    small.serving(0, "load")
    assert small.asked() == [0], "once"
