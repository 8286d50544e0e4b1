"""The supervisor's side of the nodes, with agents that are connections of the test."""

import asyncio
import contextlib

import pytest
from connected_agents import TOKEN, launched, until, with_nodes

from holdfast.recover.agent.held_connection import HeldConnection, send_connection
from holdfast.recover.agent.stream import Stream, proof
from holdfast.recover.channel import Peer
from holdfast.recover.connected_node import (
    AWAY_TICKS,
    AWAY_TICKS_WITH_SPARE,
    DEAF_TICKS,
    ENDING_TICKS,
    HEARD_TICKS,
    PROBE_TICKS,
    SILENT_TICKS,
)

IS_ACKNOWLEDGED = Stream.is_acknowledged


@pytest.fixture(autouse=True)
def acknowledging(monkeypatch):
    """Have each kernel acknowledge at once: the ticks of a test take less time than that."""
    monkeypatch.setattr(Stream, "is_acknowledged", True)


def test_without_the_token_nobody_is_admitted_and_a_supervisor_proves_that_it_has_it():
    async def scenario(nodes, listener, agent):
        assert (await agent("n1").connect(token="wrong"))["kind"] == "refused"
        welcome = await agent("n1").connect()
        assert welcome["proof"] == proof(TOKEN, "supervisor", "n")
        assert (welcome["run_id"], welcome["generation"]) == ("r", 3)

    with_nodes(scenario)


def test_the_first_node_has_rank_0_even_if_another_one_connects_before():
    async def scenario(nodes, listener, agent):
        others, first = [agent("n2"), agent("n3")], agent("n1")
        for one in (*others, first):
            await one.connect()
        choosing = asyncio.create_task(nodes.choose(2))
        assert (await first.order())["kind"] == "port"
        first.stream.send({"kind": "port", "port": 4000})
        chosen, port = await choosing
        assert ([node.name for node in chosen], port) == (["n1", "n2"], 4000)

    with_nodes(scenario, own_node="n1")


def test_a_launch_waits_for_the_supervisors_own_node_though_others_are_enough():
    async def scenario(nodes, listener, agent):
        others, own = [agent("n2"), agent("n3")], agent("n1")
        for one in others:
            await one.connect()
        gathering = asyncio.create_task(nodes.gather(2, asyncio.Event(), timeout_s=20.0))
        done, _ = await asyncio.wait([gathering], timeout=0.2)
        assert not done
        await own.connect()
        assert await gathering

    with_nodes(scenario, own_node="n1")


def test_a_launch_does_without_the_own_node_if_its_agent_does_not_come():
    async def scenario(nodes, listener, agent):
        await agent("n2").connect()
        assert await nodes.gather(1, asyncio.Event(), timeout_s=0.05)

    with_nodes(scenario, own_node="n1")


def test_nothing_is_lost_or_doubled_by_a_cut():
    async def scenario(nodes, listener, agent):
        one = agent("n1")
        await one.connect()
        one.forward(1, {"kind": "hello", "again": False})
        one.forward(2, {"kind": "watch"})
        await until(lambda: len(listener.heard) == 2)
        nodes.send({"kind": "warm"}, to="shim")
        one.stream.close()
        nodes.send({"kind": "leave"}, to="shim")
        assert (await one.connect())["seen"] == 2
        one.forward(2, {"kind": "watch"})
        one.forward(3, {"kind": "step"})
        orders = [await one.order(), await one.order()]
        assert [order["message"]["kind"] for order in orders] == ["warm", "leave"]
        await until(lambda: len(listener.heard) == 3)
        assert listener.heard[-1] == ("step", False)
        one.stream.send({"kind": "ack", "seq": orders[1]["seq"]})
        await until(lambda: not nodes._nodes["n1"].orders)

    with_nodes(scenario)


@pytest.mark.parametrize(("spare", "ticks"), [(True, AWAY_TICKS_WITH_SPARE), (False, AWAY_TICKS)])
def test_a_node_whose_agent_stays_away_is_lost(spare, ticks):
    async def scenario(nodes, listener, agent):
        one = agent("n1")
        await launched(nodes, one)
        if spare:
            await agent("n2").connect()
        one.stream.close()
        await until(lambda: nodes._nodes["n1"].stream is None)
        for _ in range(ticks):
            await nodes.tick()
        assert listener.lost == []
        await nodes.tick()
        assert listener.lost == ["n1"]
        assert await nodes.all_launchers_ended() == -9
        await one.connect()  # it was only cut off: what still runs there must end
        assert (await one.order())["kind"] == "kill"

    with_nodes(scenario)


def test_a_short_cut_during_tests_loses_no_node_though_others_are_free():
    async def scenario(nodes, _, agent):
        one = agent("n1")
        await one.connect()
        await agent("n2").connect()
        tested = nodes._nodes["n1"]
        nodes.is_testing = True
        one.stream.close()
        await until(lambda: tested.stream is None)
        for _ in range(AWAY_TICKS):
            await nodes.tick()
        await one.connect()
        assert nodes._nodes["n1"] is tested
        nodes.is_testing = False
        one.stream.close()
        await until(lambda: tested.stream is None)
        for _ in range(AWAY_TICKS_WITH_SPARE + 1):
            await nodes.tick()
        assert await tested.checks.ask(tested.order, {"what": "solo"}, 1e9) is None

    with_nodes(scenario)


def test_an_agent_that_returns_has_lost_nothing_and_the_own_node_is_never_lost():
    async def scenario(nodes, listener, agent):
        one, own = agent("n1"), agent("own")
        await launched(nodes, one, own)
        for each in (one, own):
            each.stream.close()
        await until(lambda: not any(node.stream for node in nodes._nodes.values()))
        for _ in range(AWAY_TICKS):
            await nodes.tick()
        one.incarnation = "2"
        await one.connect()
        for _ in range(AWAY_TICKS):
            await nodes.tick()
        assert (listener.lost, listener.ends) == ([], [])

    with_nodes(scenario, own_node="own")


def test_a_silent_connection_is_a_lost_node_only_after_a_long_time():
    async def scenario(nodes, listener, agent):
        one = agent("n1")
        await launched(nodes, one)
        for _ in range(SILENT_TICKS):
            await nodes.tick()
        one.stream.send({"kind": "ping"})
        await until(lambda: nodes._nodes["n1"].silent_ticks == 0)
        for _ in range(SILENT_TICKS):
            await nodes.tick()
        assert listener.lost == []
        await nodes.tick()
        assert listener.lost == ["n1"]

    with_nodes(scenario)


class Deaf:
    """The stream of a node without power: nothing arrives, and nothing is acknowledged."""

    is_acknowledged = False

    def __init__(self, stream):
        self._stream = stream

    def __getattr__(self, name):
        return getattr(self._stream, name)


def without_power(nodes, name):
    node = nodes._nodes[name]
    node.stream = Deaf(node.stream)


def step(agent, seq, number):
    rank = Peer(role="rank", attempt=1, rank=int(agent.name[1:]), local_rank=0, world_size=2, pid=9)
    reports = [[seq, 0, 0.0, {"kind": "step", "step": number}]]
    agent.stream.send({"kind": "steps", "peers": [vars(rank)], "reports": reports})


async def ping(nodes, *agents):
    for agent in agents:
        agent.stream.send({"kind": "ping"})
    await until(lambda: all(nodes._nodes[agent.name].silent_ticks == 0 for agent in agents))


async def let_pass(nodes, ticks, *agents):
    """Let ticks pass in which some agents send each second, as they do."""
    for number in range(ticks):
        if number % PROBE_TICKS == 0:
            await ping(nodes, *agents)
        await nodes.tick()


LOST_WITHOUT_POWER = PROBE_TICKS + DEAF_TICKS + 1


def test_a_node_without_power_is_lost_after_ten_seconds_and_not_before():
    async def scenario(nodes, listener, agent):
        one, other = agent("n1"), agent("n2")
        await launched(nodes, one, other)
        await ping(nodes, one)
        without_power(nodes, "n1")
        await let_pass(nodes, LOST_WITHOUT_POWER - 1, other)
        assert listener.lost == [], "a machine may stand still for some seconds"
        await let_pass(nodes, 1, other)
        assert listener.lost == ["n1"]
        assert LOST_WITHOUT_POWER <= 101, "in tenths of a second"

    with_nodes(scenario)


def test_a_machine_that_stood_still_for_eight_seconds_is_not_lost():
    async def scenario(nodes, listener, agent):
        one, other = agent("n1"), agent("n2")
        await launched(nodes, one, other)
        await agent("n3").connect()  # a spare
        for _ in range(5):
            stream = nodes._nodes["n1"].stream
            without_power(nodes, "n1")
            await let_pass(nodes, 80, other)
            nodes._nodes["n1"].stream = stream
            await let_pass(nodes, PROBE_TICKS, one, other)
        assert listener.lost == []

    with_nodes(scenario)


def test_a_cut_of_the_control_connection_loses_no_node_whose_ranks_train_with_the_others():
    """Ranks that wait for each other make no step without a dead rank."""

    async def scenario(nodes, listener, agent):
        one, other = agent("n1"), agent("n2")
        await launched(nodes, one, other)
        await agent("n3").connect()  # a spare, which would take the place at once
        stream = nodes._nodes["n1"].stream
        without_power(nodes, "n1")
        for seconds in range(30):
            step(other, seconds + 1, seconds + 1)
            await let_pass(nodes, PROBE_TICKS, other)
        assert listener.lost == []
        # The connection of before ends first, the next one comes within the agent's longest wait.
        nodes._nodes["n1"].stream = stream
        one.stream.close()
        await until(lambda: nodes._nodes["n1"].stream is None)
        await let_pass(nodes, 20, other)
        await one.connect()
        await let_pass(nodes, 10, other, one)
        assert listener.lost == []

    with_nodes(scenario)


def test_a_cut_loses_no_node_of_a_job_with_long_steps():
    async def scenario(nodes, listener, agent):
        one, other = agent("n1"), agent("n2")
        await launched(nodes, one, other)
        for number in range(1, 9):
            step(other, number, number)
            await let_pass(nodes, 60, *((one, other) if number < 4 else (other,)))
            if number == 3:
                without_power(nodes, "n1")
        assert listener.lost == [], "the next but one step came after twelve seconds"
        await let_pass(nodes, 3 * 60, other)
        assert listener.lost == ["n1"], "a node without power is lost all the same"

    with_nodes(scenario)


def test_the_step_that_was_going_on_does_not_prove_that_a_node_without_power_lives():
    async def scenario(nodes, listener, agent):
        one, other = agent("n1"), agent("n2")
        await launched(nodes, one, other)
        step(other, 1, 7)
        await ping(nodes, one, other)
        without_power(nodes, "n1")
        await let_pass(nodes, HEARD_TICKS + 1, other)
        step(other, 2, 8)
        await let_pass(nodes, LOST_WITHOUT_POWER - HEARD_TICKS, other)
        assert listener.lost == ["n1"]

    with_nodes(scenario)


def test_a_supervisor_that_all_nodes_stop_answering_at_once_does_not_give_them_up():
    async def scenario(nodes, listener, agent):
        own, *others = (agent(name) for name in ("n0", "n1", "n2"))
        await launched(nodes, own, *others)
        await ping(nodes, *others)
        for one in others:
            without_power(nodes, one.name)
        await let_pass(nodes, 300, own)
        assert listener.lost == []
        await let_pass(nodes, SILENT_TICKS, own)
        assert listener.lost == ["n1", "n2"]

    with_nodes(scenario, own_node="n0")


def test_the_kernel_of_a_host_acknowledges_what_a_frozen_agent_does_not_read():
    async def scenario(nodes, listener, agent):
        one = agent("n1")
        await one.connect()
        stream = nodes._nodes["n1"].stream
        for _ in range(20):
            stream.send({"kind": "pong"})
        await until(lambda: IS_ACKNOWLEDGED.__get__(stream))

    with_nodes(scenario)


def test_a_launcher_that_does_not_end_holds_up_neither_its_attempt_nor_the_next_one():
    async def scenario(nodes, listener, agent):
        one, other = agent("n1"), agent("n2")
        await launched(nodes, one, other)
        spare = agent("n3")
        await spare.connect()
        nodes.kill()
        other.stream.send({"kind": "launcher_ended", "attempt": 1, "returncode": 0})
        over = asyncio.create_task(nodes.all_launchers_ended())
        await until(lambda: nodes._nodes["n2"].launched is None)
        await let_pass(nodes, ENDING_TICKS, one, other, spare)
        assert not over.done()
        await let_pass(nodes, 1, one, other, spare)
        assert await over == -9
        assert nodes.stuck == ["n1"]
        await nodes.end_launchers()
        assert (nodes.missing(2), nodes.missing(3)) == (0, 1), "a spare takes its place"
        one.stream.send({"kind": "launcher_ended", "attempt": 1, "returncode": -9})
        await until(lambda: nodes.missing(3) == 0)
        assert nodes.stuck == []
        assert listener.lost == []

    with_nodes(scenario)


def test_the_end_of_a_launcher_while_its_agent_was_away_is_known():
    async def scenario(nodes, listener, agent):
        one = agent("n1")
        await launched(nodes, one)
        one.stream.close()
        one.launched, one.last_end = None, [1, 7]
        await one.connect()
        assert listener.ends == [7]
        assert await nodes.all_launchers_ended() == 7
        assert nodes.launcher_failed

    with_nodes(scenario)


def test_a_kept_launcher_that_is_ended_says_nothing_of_the_next_attempt():
    async def scenario(nodes, listener, agent):
        one = agent("n1")
        await launched(nodes, one)
        ending = asyncio.create_task(nodes.end_launchers())
        assert (await one.order())["kind"] == "kill"
        one.stream.send({"kind": "launcher_ended", "attempt": 1, "returncode": -9})
        await ending
        assert listener.ends == []
        assert nodes.missing(1) == 0

    with_nodes(scenario)


def test_a_new_supervisor_takes_over_launchers_and_ends_others():
    async def scenario(nodes, listener, agent):
        adopted, late, ended, other = (agent(name) for name in ("n1", "n2", "n3", "n4"))
        adopted.launched = late.launched = 1
        other.launched, ended.last_end = 4, [1, 0]
        for each in (adopted, ended, other):
            await each.connect()
        assert (await other.order())["kind"] == "kill"
        ids = ["n1", "n2", "n3"]
        await until(lambda: len(nodes.left_of(1, ids)) == 2)
        await late.connect()
        await until(lambda: len(nodes.left_of(1, ids)) == 3)
        nodes.adopt(nodes.left_of(1, ids), ids)
        assert [node.node_rank for node in nodes.launched] == [0, 1, 2]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                order = await late.order()
                raise AssertionError(order)

    with_nodes(scenario, adopting=1)


def test_steps_that_are_sent_together_are_received_one_by_one_and_once():
    rank = Peer(role="rank", attempt=1, rank=0, local_rank=0, world_size=1, pid=12)

    async def scenario(nodes, listener, agent):
        one = agent("n1")
        await one.connect()
        told = {"kind": "step", "step": 1}
        reports = [[seq, 0, 0.1, told] for seq in (1, 2)]
        one.stream.send({"kind": "steps", "peers": [vars(rank)], "reports": reports})
        reports = [[seq, 0, 0.1, told] for seq in (2, 3)]
        one.stream.send({"kind": "steps", "peers": [vars(rank)], "reports": reports})
        one.stream.send({"kind": "steps", "peers": [], "reports": [[9, 7, 0.1, told]]})
        one.forward(10, {"kind": "hello"}, rank)
        await until(lambda: ("hello", False) in listener.heard)
        assert listener.heard == [("step", False)] * 3 + [("hello", False)]

    with_nodes(scenario)


def test_while_the_node_holds_the_connection_a_killed_agent_has_not_hung_up():
    async def scenario(nodes, listener, agent):
        one = agent("n1")
        await launched(nodes, one)
        await agent("n2").connect()  # a spare
        held = HeldConnection()
        held.watch()
        try:
            send_connection(held.sending, one.stream.fd)
            await until(lambda: held.fd is not None)
            one.stream.close()
            one.incarnation = "2"
            for _ in range(AWAY_TICKS):
                await nodes.tick()
                await asyncio.sleep(0)
            assert nodes._nodes["n1"].stream is not None
            await one.connect()
            send_connection(held.sending, one.stream.fd)
            former = held.fd
            await until(lambda: held.fd != former)
            assert listener.lost == []
            one.stream.close()
        finally:
            held.close()
        await until(lambda: nodes._nodes["n1"].stream is None)
        for _ in range(AWAY_TICKS_WITH_SPARE + 1):
            await nodes.tick()
        assert listener.lost == ["n1"], "the node has died"

    with_nodes(scenario)


def test_lost_places_are_filled_and_the_others_kept():
    async def scenario(nodes, listener, agent):
        agents = [agent(f"n{number}") for number in range(3)]
        await launched(nodes, *agents)
        agents[1].stream.close()
        await agent("n9").connect()
        await until(lambda: nodes._nodes["n1"].stream is None)
        for _ in range(AWAY_TICKS_WITH_SPARE + 1):
            await nodes.tick()
        for each in (agents[0], agents[2]):
            each.stream.send({"kind": "launcher_ended", "attempt": 1, "returncode": -9})
        await nodes.end_launchers()
        choosing = asyncio.create_task(nodes.choose(3))
        while (order := await agents[0].order())["kind"] != "port":
            pass
        agents[0].stream.send({"kind": "port", "port": 4242})
        chosen, port = await choosing
        assert ([node.name for node in chosen], port) == (["n0", "n9", "n2"], 4242)
        assert order["seq"] > 0
        assert await nodes.gather(3, asyncio.Event(), timeout_s=1.0)
        given_up = asyncio.Event()
        given_up.set()
        assert not await nodes.gather(4, given_up, timeout_s=30.0)

    with_nodes(scenario)


def test_an_order_waits_for_the_peers_of_an_agent_that_was_just_started():
    async def scenario(nodes, listener, agent):
        one = agent("n1")
        await launched(nodes, one)
        one.forward(1, {"kind": "hello", "again": False})
        await until(lambda: listener.heard)
        one.incarnation = "2"
        await one.connect()
        nodes.send({"kind": "leave"}, to="shim")
        assert (await one.order())["message"] == {"kind": "leave"}

    with_nodes(scenario)
