"""Check the orders to fetch models, above all for nodes that fail: retries are bounded."""

from types import SimpleNamespace

import pytest
from cluster_of_fakes import config

from holdfast.evaluate.coordinator.dealing import Dealing
from holdfast.evaluate.coordinator.engine_slots import Node
from holdfast.evaluate.coordinator.models import Models
from holdfast.evaluate.types.model_manifest import Chunk, ModelFile, ModelManifest
from holdfast.evaluate.wire import messages

MANIFEST = ModelManifest(
    source="/nowhere",
    form="huggingface",
    files=[ModelFile(path="a", size_bytes=40)],
    chunks=[Chunk(file=0, offset=10 * number, size_bytes=10) for number in range(4)],
)


class Cluster:
    """Nodes that only record their orders."""

    def __init__(self, folder, *nodes, **changes):
        self.models = Models(folder / "models")
        self.nodes, self.said = {}, {number: [] for number in nodes}
        self.dealing = Dealing(
            config(folder, [], nodes=len(nodes), gather_s=10.0, **changes), self.models, self.nodes
        )
        for number in nodes:
            self.join(number)

    def join(self, number):
        peer = SimpleNamespace(send=self.said[number].append)
        report = messages.NodeReport(
            host="here", cores=1, memory_bytes=1, gpus=0, store=f"here:{number}"
        )
        self.nodes[f"node-{number}"] = Node(
            number=number, name=f"node-{number}", peer=peer, joined_s=0.0, report=report
        )

    def leave(self, number, now_s):
        self.dealing.node_left(self.nodes.pop(f"node-{number}"), now_s)
        self.dealing.deal()

    def add(self, *numbers):
        for number in numbers:
            self.models.add(
                messages.AddModel(model=number, name=f"model {number}", manifest=MANIFEST)
            )

    def fetched(self, node, model):
        self.dealing.fetched(self.nodes[f"node-{node}"], self.models.get(model), "/there")

    def failed(self, node, model, why="it does not work", **more):
        failure = messages.FetchFailed(model=model, why=why, **more)
        ended_by = self.dealing.failed(self.nodes[f"node-{node}"], self.models.get(model), failure)
        self.told()
        self.dealing.deal()
        return ended_by

    def end(self, number):
        model = self.models.get(number)
        self.models.end(model, messages.ModelOutcome(model=number))
        self.dealing.release(model)
        self.dealing.deal()

    def tick(self, now_s=0.0):
        self.dealing.gather(now_s)
        self.dealing.deal()

    def rates(self, node):
        """Return a node's orders since the last call: (model, MiB/s)."""
        found = [
            (one.model, one.max_read_mib_s)
            for one in self.said[node]
            if isinstance(one, messages.FetchModel)
        ]
        self.said[node].clear()
        return found

    def told(self):
        """Return each node's orders since the last call: (model, owners), or -model for a release."""
        found = {}
        for number, said in self.said.items():
            found[number] = [
                (one.model, one.owners) if isinstance(one, messages.FetchModel) else -one.model
                for one in said
            ]
            said.clear()
        return found


@pytest.fixture
def one(tmp_path):
    """Make one node that has model 0 and an order for model 1."""
    cluster = Cluster(tmp_path, 0)
    cluster.add(0, 1)
    cluster.tick()
    cluster.fetched(0, 0)
    cluster.told()
    return cluster


@pytest.fixture
def two(tmp_path):
    """Make two nodes with orders for model 0."""
    cluster = Cluster(tmp_path, 0, 1)
    cluster.add(0)
    cluster.tick()
    assert cluster.told() == {0: [(0, [0, 1, 0, 1])], 1: [(0, [0, 1, 0, 1])]}
    return cluster


def test_a_damaged_model_fails_at_once_for_all(two):
    assert two.failed(1, 0, "It is damaged.", final=True) == "It is damaged."


def test_a_model_that_does_not_fit_beside_another_waits_for_the_end_of_that(one):
    assert one.failed(0, 1, beside=[0]) == ""
    for _ in range(5):
        one.tick()
    assert one.told() == {0: []}
    one.end(0)
    assert one.told() == {0: [0, (1, [0] * 4)]}


def test_a_model_that_does_not_fit_with_nothing_beside_it_fails(one):
    assert one.failed(0, 1, "It is full.") == "It is full."


def test_where_the_other_has_ended_meanwhile_it_is_told_again_after_the_release(one):
    one.end(0)
    one.told()
    assert one.failed(0, 1, beside=[0]) == ""
    assert one.told() == {0: [(1, [0] * 4)]}


def test_what_a_node_still_holds_of_a_model_that_ended_is_released_once_more(one):
    one.end(0)
    one.dealing.failed(
        one.nodes["node-0"], one.models.get(1), messages.FetchFailed(model=1, why="", beside=[0])
    )
    assert one.told()[0][-1] == 0


def test_another_node_reads_for_one_that_waits_for_memory(two):
    two.add(1)
    two.tick()
    two.told()
    two.failed(0, 1, beside=[0])
    assert two.told() == {0: [], 1: [(1, [1] * 4)]}
    two.failed(1, 1, beside=[0])
    two.end(0)
    assert two.told() == {0: [0, (1, [0, 1, 0, 1])], 1: [0, (1, [0, 1, 0, 1])]}, (
        "and if all waited, all read"
    )


def test_a_node_that_failed_reads_no_more_and_may_have_it_from_the_others(two):
    assert two.failed(0, 0) == ""
    assert two.told() == {0: [(0, [1] * 4)], 1: [(0, [1] * 4)]}
    assert two.failed(0, 0) == ""
    for _ in range(5):
        two.tick()
    assert two.told() == {0: [], 1: []}, "nobody is told the same without end"


def test_it_fails_with_all_reasons_when_all_nodes_failed(two):
    two.failed(0, 0, "No route.")
    assert (
        two.failed(1, 0, "No key.") == "No node can hold model 0. Node 0: No route. Node 1: No key."
    )


def test_one_reason_of_all_nodes_is_said_once(two):
    two.failed(0, 0, "No key.")
    assert two.failed(1, 0, "No key.") == "No key."


def test_a_node_that_has_it_in_the_end_has_not_failed(two):
    two.failed(0, 0)
    two.fetched(0, 0)
    assert two.failed(1, 0) == ""


def test_those_that_failed_read_after_all_when_the_others_left_for_long(two):
    two.failed(0, 0)
    two.told()
    two.leave(1, now_s=1.0)
    two.tick(now_s=10.0)
    assert two.told() == {0: [], 1: []}, "it may come back"
    two.tick(now_s=11.0)
    assert two.told() == {0: [(0, [0] * 4)], 1: []}
    assert two.failed(0, 0, "No route.") == "No route."


def test_a_failure_while_another_node_is_away_ends_nothing_yet(two):
    two.leave(1, now_s=1.0)
    assert two.failed(0, 0) == ""
    two.told()
    two.tick(now_s=11.0)
    assert two.told()[0] == [(0, [0] * 4)]


def test_a_node_that_comes_back_is_what_it_was_not_before(two):
    two.failed(0, 0)
    two.leave(0, now_s=1.0)
    two.told()
    two.join(0)
    two.tick(now_s=2.0)
    assert two.told() == {0: [(0, [1] * 4)], 1: []}


def test_what_was_read_ahead_is_read_at_full_speed_when_it_is_waited_for(tmp_path):
    ahead = Cluster(tmp_path, 0, 1, max_read_mib_s=5.0)
    ahead.add(0, 1)
    ahead.tick()
    assert ahead.rates(0) == ahead.rates(1) == [(0, 0.0), (1, 5.0)]
    ahead.fetched(0, 0)
    ahead.fetched(1, 0)
    ahead.fetched(0, 1)
    ahead.tick()
    assert ahead.rates(0) == ahead.rates(1) == []
    ahead.end(0)
    assert ahead.rates(0) == [], "it has it"
    assert ahead.rates(1) == [(1, 0.0)]
    for _ in range(3):
        ahead.tick()
    assert ahead.rates(1) == [], "once"


def test_a_node_that_failed_ahead_tries_once_more_when_it_is_waited_for(tmp_path):
    ahead = Cluster(tmp_path, 0, 1, max_read_mib_s=5.0)
    ahead.add(0, 1)
    ahead.tick()
    ahead.failed(0, 1)
    ahead.rates(0)
    ahead.end(0)
    assert ahead.rates(0) == [(1, 0.0)]
    ahead.failed(0, 1)
    for _ in range(3):
        ahead.tick()
    assert ahead.rates(0) == []
