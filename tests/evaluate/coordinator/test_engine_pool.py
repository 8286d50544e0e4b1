"""Check the choice of a restarted engine's model, and failures of the model itself."""

from types import SimpleNamespace

import msgspec
import pytest
from cluster_of_fakes import CURVE, MANIFEST, config

from holdfast.evaluate.coordinator.config import CoordinatorFiles
from holdfast.evaluate.coordinator.engine_pool import EnginePool
from holdfast.evaluate.coordinator.models import Models
from holdfast.evaluate.coordinator.timeline_writer import TimelineWriter
from holdfast.evaluate.policy.events import EngineReady
from holdfast.evaluate.types.engine import EngineSpec
from holdfast.evaluate.wire import messages
from holdfast.testing import FakeClock


class Peer:
    def __init__(self, role, name, **more):
        self.hello = messages.Hello(token="", role=role, name=name, node=0, **more)
        self.said = []
        self.send = self.said.append

    def close(self):
        pass


class Small:
    """A node with model 0 on its one engine, and with model 1; `digest` maps a model to its digest."""

    def __init__(self, folder, certify="beside", digest=str):
        self.models, self.events, self.clock = Models(folder / "models"), [], FakeClock()
        self.failures = []
        CoordinatorFiles(folder).folder.mkdir(exist_ok=True)
        silent = SimpleNamespace(append=lambda _line: None)
        self.fleet = EnginePool(
            config(folder, [], engines_per_node=1, certify=certify),
            self.clock,
            SimpleNamespace(put=self.events.append),
            self.models,
            resumed=SimpleNamespace(engine_lost=lambda _name: None),
            timeline=TimelineWriter(silent, self.clock, 0.0),
            listener=self,
        )
        for number in (0, 1):
            self.models.add(messages.AddModel(model=number, name=str(number), manifest=MANIFEST))
        self.node = Peer("node", "node-0")
        self.fleet.node_joined(self.node)
        report = messages.NodeReport(host="here", cores=1, memory_bytes=1, gpus=0, store="here:1")
        self.fleet.node_reported(self.node, report)
        for number in (0, 1):
            fetched = messages.ModelFetched(
                model=number,
                folder="/there",
                digest=digest(number),
                remote_bytes=1,
                peer_bytes=0,
                seconds=0.0,
            )
            self.fleet.fetched(self.node, fetched)
        self.start_engine()

    def model_known(self, model):
        """Ignore the journals."""

    def model_failed(self, model, why, *, wrong_use=False):
        """End a failed model, like the coordinator."""
        self.failures.append((model and model.number, why, wrong_use))
        if model:
            self.models.end(model, messages.ModelOutcome(model=model.number, error=why))
            self.fleet.release(model)

    def serve_failed(self, number, **more):
        self.fleet.serve_failed(
            self.engine, messages.ServeFailed(model=number, why="It is torn.", **more)
        )

    def start_engine(self):
        self.engine = Peer("engine", "node-0/0", pid=len(self.events) + 1)
        self.fleet.engine_joined(self.engine)

    def asked(self):
        return [one.model for one in self.engine.said if isinstance(one, messages.Serve)]

    def serving(self, number, how, canary=0.0):
        said = messages.Serving(
            model=number,
            how=how,
            seconds=0.0,
            numerics="n",
            max_length=8,
            curve=CURVE,
            canary=[canary],
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
    assert messages.StopEngine(name="node-0/0") in small.node.said
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
    small.models.end(
        ended, messages.ModelOutcome(model=1, error="a newer checkpoint came", is_stale=True)
    )
    small.fleet.serve_failed(
        small.engine, messages.ServeFailed(model=1, why="its files are gone", restart=False)
    )
    assert small.asked() == [0, 1, 0]


def test_the_spare_engine_loads_what_others_serve_so_that_the_next_is_quick(small):
    small = small("beside")
    small.models.certify(small.models.get(1), [0.0])
    small.fleet._orders.ensure("spare/0", small.fleet.nodes["node-0"])
    small.engine = Peer("engine", "spare/0", pid=99)
    small.fleet.engine_joined(small.engine)
    assert small.asked() == [0]
    small.serving(0, "load")
    assert small.asked() == [0], "once"


def test_a_model_that_no_new_process_can_load_fails_and_the_engine_has_the_next(tmp_path):
    small = Small(tmp_path)
    for _ in range(3):
        assert small.asked() == [0]
        assert small.failures == []
        small.serve_failed(0, restart=True)
        small.start_engine()
    ((number, why, wrong_use),) = small.failures
    assert (number, wrong_use) == (0, False)
    assert why.startswith("No engine can load 0 (It is torn). Check that its files are complete")
    assert small.asked() == [1]


def test_engines_that_refuse_to_swap_do_not_say_that_a_model_cannot_be_loaded(small):
    small = small("beside")
    small.swap_to(1)
    small.serve_failed(1, restart=True)
    assert small.models.get(1).failed_loads == 0
    small.start_engine()
    small.serve_failed(1, restart=True)
    assert small.models.get(1).failed_loads == 1


def test_what_only_a_model_is_to_blame_for_leaves_the_engine_to_the_next(tmp_path):
    small = Small(tmp_path)
    small.serve_failed(0)
    assert small.failures == [(0, "It is torn.", True)]
    assert small.asked() == [0, 1]


def test_where_there_is_no_such_engine_no_model_can_be_evaluated(tmp_path):
    small = Small(tmp_path)
    small.serve_failed(0, any_model=True)
    assert small.failures == [(None, "It is torn.", True)]


def test_weights_that_are_others_than_in_an_earlier_life_are_refused(tmp_path):
    """Earlier scores would belong to one checkpoint, later ones to another."""
    Small(tmp_path)
    again = Small(tmp_path)
    assert again.failures == []
    changed = Small(tmp_path, digest=lambda number: "other" if number == 0 else str(number))
    ((number, why, _),) = changed.failures
    assert number == 0
    assert why == (
        "The weights of 0 changed since this evaluation began: node node-0 has other bytes than "
        "were there first. "
        "Put the old ones back, or evaluate these under another --id."
    )
    assert changed.asked() == [1]


def test_weights_that_change_while_they_are_read_are_refused(small):
    small = small("beside")
    fetched = messages.ModelFetched(
        model=1, folder="/there", digest="x", remote_bytes=1, peer_bytes=0, seconds=0.0
    )
    small.fleet.fetched(small.node, fetched)
    ((number, why, _),) = small.failures
    assert number == 1
    assert "changed while they were read" in why


def test_what_an_engine_has_itself_is_of_one_evaluation_alone(tmp_path):
    small = Small(tmp_path)
    small.serving(0, "load")
    model = small.models.add(messages.AddModel(model=2, name="2"))
    small.swap_to(2)
    assert model.digest == "unknown, of evaluation test model 2"
    assert not (tmp_path / "models" / "000002.digest").exists()


def test_an_engine_that_hangs_before_it_dials_is_ended(small):
    small = small("beside")
    small.fleet.engine_left(small.engine)
    small.node.said.clear()
    for _ in range(10):
        small.clock.advance(31.0)
        small.fleet.tick()
    said = [type(one).__name__ for one in small.node.said if getattr(one, "name", "") == "node-0/0"]
    assert said == ["StartEngine"] * 9 + ["StopEngine", "StartEngine"]


def test_an_engine_that_spans_more_gpus_than_a_node_has_is_refused_in_a_sentence(tmp_path):
    failed = []
    fleet = EnginePool(
        msgspec.structs.replace(
            config(tmp_path, []), spec=EngineSpec(kind="vllm", tensor_parallel=4)
        ),
        FakeClock(),
        SimpleNamespace(put=lambda _event: None),
        Models(tmp_path / "models"),
        resumed=None,
        timeline=None,
        listener=SimpleNamespace(
            model_failed=lambda model, why, wrong_use: failed.append((model, why, wrong_use))
        ),
    )
    node = Peer("node", "node-0")
    fleet.node_joined(node)
    fleet.node_reported(
        node, messages.NodeReport(host="gpu-7", cores=1, memory_bytes=1, gpus=2, store="here:1")
    )
    why = "gpu-7 has 2 GPUs, and an engine needs 4. Give --tp 2 or less, or nodes with more."
    assert failed == [(None, why, True)]
    assert not fleet.slots
