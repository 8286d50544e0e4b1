"""Check that every swap gets its certificate, even if the certifying engine fails."""

import asyncio
from types import SimpleNamespace

import pytest
from cluster_of_fakes import MANIFEST, World, answer_to, config, entry, samples_of

from holdfast.evaluate.coordinator.certifying import _BLOCKED_S, SPARE, Certifying
from holdfast.evaluate.coordinator.engine_slots import EngineSlot, Node
from holdfast.evaluate.coordinator.models import Model
from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.wire import messages

ENTRIES = [entry("choices", 20, requests=4), entry("generated", 10, kind="generate")]


def model(number):
    return messages.AddModel(model=number, name=f"model {number}", manifest=MANIFEST)


def slot(name, node, **more):
    return EngineSlot(name=name, place=0, node=node, ordered_s=0.0, is_spare=name == SPARE, **more)


def node(number):
    return Node(number=number, name=f"node-{number}", peer=None, joined_s=0.0)


class Small:
    """Two nodes, an engine on each that serves model 0, and model 1 to come."""

    def __init__(self, tmp_path, spare_on=None, has_model=(0, 1)):
        self.nodes = {f"node-{number}": node(number) for number in (0, 1)}
        self.slots = {
            f"node-{one}/0": slot(f"node-{one}/0", one, serving=0, number=one) for one in (0, 1)
        }
        if spare_on is not None:
            self.slots[SPARE] = slot(SPARE, spare_on)
        folders = dict.fromkeys(has_model, "/there")
        self.models = [
            Model(added=model(0), canary=[0.0], folders={0: "/there", 1: "/there"}),
            Model(added=model(1), folders=folders),
        ]
        self.certifying = Certifying(
            config(tmp_path, []),
            self.nodes,
            self.slots,
            SimpleNamespace(wanted=lambda: self.models),
        )

    def home_at(self, now_s):
        home = self.certifying.new_home(now_s)
        return None if home is None else home.number


@pytest.mark.parametrize(("has_model", "home"), [((0, 1), 0), ((1,), 1), ((), None)])
def test_the_spare_begins_on_a_node_that_has_what_it_is_to_load(tmp_path, has_model, home):
    assert Small(tmp_path, has_model=has_model).home_at(0.0) == home


def test_it_stays_where_it_can_load(tmp_path):
    small = Small(tmp_path, spare_on=1)
    assert small.home_at(0.0) is None
    assert small.home_at(10 * _BLOCKED_S) is None


def test_it_moves_when_its_node_stays_away(tmp_path):
    small = Small(tmp_path, spare_on=0)
    del small.nodes["node-0"]
    assert small.home_at(5.0) is None, "a line that was cut is back soon"
    assert small.home_at(5.0 + _BLOCKED_S) == 1


def test_it_moves_when_its_node_does_not_get_the_model(tmp_path):
    small = Small(tmp_path, spare_on=0, has_model=(1,))
    assert small.home_at(0.0) is None
    assert small.home_at(_BLOCKED_S) == 1


def test_the_wait_begins_anew_after_it_was_well(tmp_path):
    small = Small(tmp_path, spare_on=0)
    away = small.nodes.pop("node-0")
    assert small.home_at(0.0) is None
    small.nodes["node-0"] = away
    assert small.home_at(_BLOCKED_S / 2) is None
    del small.nodes["node-0"]
    assert small.home_at(_BLOCKED_S) is None


def test_nothing_is_certified_beside_once_it_was_given_up(tmp_path):
    small = Small(tmp_path)
    small.certifying.give_up()
    assert not small.certifying.is_beside()
    assert small.home_at(0.0) is None


def test_those_that_wait_are_engines_that_swapped_and_do_not_answer(tmp_path):
    small = Small(tmp_path)
    waits = small.slots["node-0/0"]
    waits.peer, waits.number, waits.serving = SimpleNamespace(), None, 1
    assert small.certifying.waiting() == small.certifying.waiting(small.models[1]) == [waits]
    assert small.certifying.waiting(small.models[0]) == []


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr("holdfast.evaluate.wire.client._BACK_OFF_S", (0.05, 0.1))
    monkeypatch.setattr("holdfast.evaluate.coordinator.tasks._ABSENCE_S", 0.2)
    monkeypatch.setattr("holdfast.evaluate.coordinator.engine_pool._CUT_GRACE_S", 0.2)
    monkeypatch.setattr("holdfast.evaluate.coordinator.certifying._BLOCKED_S", 0.2)


def check_scores(world, numbers):
    for number in numbers:
        for place, task in enumerate(ENTRIES):
            expected = [
                [answer_to(request.key, f"weights {number}").logprob for request in sample.requests]
                for sample in samples_of(task)
            ]
            assert world.outcomes[number, place].result.results["score"] == expected


async def until(condition, within_s=240.0):
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


def test_swaps_are_certified_after_the_node_of_the_spare_engine_is_gone_for_good(tmp_path, soon):
    async def scenario():
        world = World(config(tmp_path, ENTRIES, nodes=2, engines_per_node=1, is_stream=True))
        await world.start()
        world.spawn(world.command(model(0), finish=False))
        world.spawn(world.node(0))
        await until(lambda: SPARE in world.engines)
        world.spawn(world.node(1))
        await until(lambda: 0 in world.models and world.engines["node-1/0"].model() == 0)
        assert world.engines[SPARE].place == 0
        world.kill_node(0)
        world.command_line.send(model(1))
        world.command_line.send(messages.Finish())
        await world.finish()
        with pytest.raises(EvaluationError, match="given to another node"):
            await anext(world.line("engine", SPARE, node=0, pid=1).messages())
        agent = world.line("node", "node-0", node=0)
        async for message in agent.messages():
            if isinstance(message, messages.Welcome):
                agent.send(
                    messages.NodeReport(
                        host="here", cores=2, memory_bytes=1, gpus=0, store="here:1"
                    )
                )
            elif message == messages.StopEngine(name=SPARE):
                break
        await world.end()
        return world

    world = asyncio.run(asyncio.wait_for(scenario(), 240.0))
    check_scores(world, (0, 1))
    assert world.engines[SPARE].place == 1, "and what came back of the other node has no say"


def test_a_spare_engine_that_never_comes_up_is_given_up_and_engines_start_anew(tmp_path, soon):
    async def scenario():
        world = World(config(tmp_path, ENTRIES, engines_per_node=2))
        world.stillborn = {SPARE}
        await world.start()
        world.spawn(world.command(model(0), model(1)))
        world.spawn(world.node(0))
        await world.finish()
        slots = set(world.live._pool.slots)
        await world.end()
        return world, slots

    world, slots = asyncio.run(asyncio.wait_for(scenario(), 240.0))
    check_scores(world, (0, 1))
    assert slots == {"node-0/0", "node-0/1"}
