"""Properties of the nodes of a run over random losses, failed launches, cordons and new nodes."""

import asyncio
import random

import pytest
from connected_agents import launched, until, with_nodes

from holdfast.recover.agent.stream import Stream
from holdfast.recover.connected_node import AWAY_TICKS_WITH_SPARE

SIZE = 3
ROUNDS = 4


@pytest.fixture(autouse=True)
def acknowledging(monkeypatch):
    monkeypatch.setattr(Stream, "is_acknowledged", True)


async def chosen(nodes, agents):
    """Choose nodes for a launch; the agents answer the request for a free port."""

    async def answer(agent):
        while (await agent.order())["kind"] != "port":
            pass
        agent.stream.send({"kind": "port", "port": 4242})

    answering = [asyncio.create_task(answer(agent)) for agent in agents]
    try:
        return await nodes.choose(SIZE)
    finally:
        for task in answering:
            task.cancel()


@pytest.mark.parametrize("seed", range(40))
def test_a_spare_that_is_alive_at_a_restart_always_lets_the_run_go_on(seed):
    """And one node's lost connection or failed launch ends no launcher of the others by itself."""
    rng = random.Random(seed)

    async def scenario(nodes, listener, agent):
        present = {f"n{number}": agent(f"n{number}") for number in range(SIZE)}
        await launched(nodes, *present.values())
        for number in range(SIZE, SIZE + rng.randrange(1, 4)):
            present[f"n{number}"] = agent(f"n{number}")
            await present[f"n{number}"].connect()
        for attempt in range(2, ROUNDS + 2):
            in_launch = {node.name for node in nodes.launched}
            gone, orders = set(), {name: len(nodes._nodes[name].orders) for name in present}
            for name in rng.sample(sorted(present), rng.randrange(0, 3)):
                one = present[name]
                if rng.random() < 0.5 and name in in_launch:  # its launcher could not be started
                    one.stream.send(
                        {"kind": "launcher_ended", "attempt": attempt - 1, "returncode": 1}
                    )
                    await until(lambda name=name: nodes._nodes[name].launched is None)
                else:
                    one.stream.close()
                    await until(lambda name=name: nodes._nodes[name].stream is None)
                    gone.add(name)
                    del present[name]
            if rng.random() < 0.3:
                nodes.cordoned |= {rng.choice(sorted(present))}
            if rng.random() < 0.5:
                new = f"n{10 * attempt}"
                present[new] = agent(new)
                await present[new].connect()
            for _ in range(AWAY_TICKS_WITH_SPARE + 1):
                await nodes.tick()
            for name, count in orders.items():
                if name in present:
                    assert len(nodes._nodes[name].orders) == count, "only a decision ends others"
            for name, one in present.items():
                if nodes._nodes[name].launched is not None:
                    one.stream.send(
                        {"kind": "launcher_ended", "attempt": attempt - 1, "returncode": -9}
                    )
            ending = asyncio.create_task(nodes.end_launchers())
            while not ending.done():  # without a spare, a node is given up later
                await nodes.tick()
                await asyncio.sleep(0.002)
            usable = sorted(present.keys() - nodes.cordoned)
            if len(usable) < SIZE:
                assert await chosen(nodes, present.values()) is None
                for number in range(SIZE - len(usable)):
                    new = f"m{10 * attempt + number}"
                    present[new] = agent(new)
                    await present[new].connect()
                usable = sorted(present.keys() - nodes.cordoned)
            places = await chosen(nodes, present.values())
            assert places is not None, "enough nodes are alive"
            names = [node.name for node in places[0]]
            assert len(set(names)) == SIZE
            assert set(names) <= set(usable)
            assert not set(names) & gone
            nodes.launch(attempt, *places, {})
            for name in names:
                present[name].launched = attempt

    with_nodes(scenario)


@pytest.mark.parametrize("seed", range(5))
def test_a_new_node_that_connects_meanwhile_sends_nothing_to_the_others(seed):
    rng = random.Random(seed)

    async def scenario(nodes, listener, agent):
        agents = [agent(f"n{number}") for number in range(SIZE)]
        await launched(nodes, *agents)
        before = {name: list(node.orders) for name, node in nodes._nodes.items()}
        for number in range(rng.randrange(1, 4)):
            await agent(f"m{number}").connect()
            await nodes.tick()
        assert listener.lost == listener.ends == listener.stops == []
        for name, orders in before.items():
            assert list(nodes._nodes[name].orders) == orders

    with_nodes(scenario)
