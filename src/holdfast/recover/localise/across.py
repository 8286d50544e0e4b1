"""Check nodes for `holdfast nodes check`: this host, or all nodes that started the command.

The nodes meet in the same way as the nodes of a run. The first node leads: like a supervisor, it
orders tests from the other nodes.
"""

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.core.clock import Clock, SystemClock
from holdfast.core.errors import HoldfastError
from holdfast.recover.agent.agent import Agent
from holdfast.recover.agent.board import board_of
from holdfast.recover.agent.rendezvous import Meeting, loopback_listener, node_name
from holdfast.recover.agent.stream import Stream
from holdfast.recover.channel import Peer
from holdfast.recover.connected_node import Node
from holdfast.recover.localise.session import Report, localise
from holdfast.recover.localise.tester import NodeTester
from holdfast.recover.nodes import Nodes

MEET_S = 120.0
"""The seconds that the nodes wait for each other."""
TICK_S = 0.1

Past = Callable[[Sequence[str]], tuple[Mapping[str, float], Set[str]]]
"""A function that returns, for the nodes that have connected, the prior probability of a fault of
each node, and the names of those that are cordoned."""


@dataclass(frozen=True)
class Joined:
    """The result on a node that does not lead, which it received from the leading node."""

    exit_code: int
    sentence: str


class NodeHosts:
    """Let the agents of `Nodes` carry out the orders of a session (see `session.Hosts`)."""

    def __init__(self, nodes: Nodes, members: Mapping[str, Node]) -> None:
        self._nodes = nodes
        self._members = members

    async def ask(
        self, name: str, order: Mapping[str, Any], timeout_s: float
    ) -> dict[str, Any] | None:
        """See `session.Hosts`."""
        node = self._members[name]
        return await node.checks.ask(node.order, order, timeout_s)

    def address_of(self, name: str) -> str:
        """See `session.Hosts`."""
        return self._nodes.address_of(self._members[name])


class _ThisHost:
    """Let this process carry out the orders of a session as its only host."""

    def __init__(self, tester: NodeTester) -> None:
        self._tester = tester

    async def ask(
        self, _name: str, order: Mapping[str, Any], timeout_s: float
    ) -> dict[str, Any] | None:
        async with asyncio.timeout(timeout_s):
            return await self._tester.carry_out(order)

    def address_of(self, _name: str) -> str:
        return "127.0.0.1"


def check_this_host(past: Past, clock: Clock | None = None) -> Report:
    """Run the solo checks on this host."""

    async def check() -> Report:
        tester = NodeTester()
        try:
            priors, cordoned = past([node_name()])
            host = _ThisHost(tester)
            return await localise(host, priors, clock or SystemClock(), cordoned=cordoned)
        finally:
            await tester.ended()

    return asyncio.run(check())


def check_nodes(
    meeting: Meeting,
    home: Path,
    past: Past,
    finish: Callable[[Report, int], Joined],
    clock: Clock | None = None,
) -> tuple[Report, int] | Joined:
    """Check all nodes that meet. This function must be called on each node.

    Args:
        meeting: the place where the nodes meet.
        home: the folder shared by all nodes.
        past: a function that returns the results of earlier tests; called on the leading node.
        finish: a function that is called on the leading node, with the report and the number of
            missing nodes, before the other nodes end. It returns the result to send to the other
            nodes.
        clock: the clock of this host.

    Returns:
        On the leading node, the report and the number of missing nodes; on another node, the result
        that the node received.

    Raises:
        HoldfastError: the nodes did not meet.
    """
    # The key is different from the key of a run, so that a check and a run with the same address do
    # not meet.
    meeting = replace(meeting, key=f"check-{meeting.key}")
    listening = meeting.listen()
    if listening is None:
        return asyncio.run(_join(meeting, home))
    return asyncio.run(_lead(meeting, home, listening, past, finish, clock or SystemClock()))


async def _lead(
    meeting: Meeting,
    home: Path,
    listening: socket.socket,
    past: Past,
    finish: Callable[[Report, int], Joined],
    clock: Clock,
) -> tuple[Report, int]:
    token, name = secrets.token_hex(16), node_name()
    run_id = f"check-{secrets.token_hex(4)}"
    board = board_of(home, meeting.key, None)
    meeting.publish(board, listening, token, run_id=run_id)
    known = {"hosts": ["127.0.0.1"], "port": listening.getsockname()[1], "token": token}
    own = _node_id(name)
    nodes = Nodes(_Deaf(), clock, run_id=run_id, token=token, generation=1, own_node=own)
    farewell: dict[str, Any] = {"kind": "end", "state": "failed", "exit_code": 1}
    farewell["outcome"] = f"The check failed on {name}; see its output there."
    await nodes.start(listening, adopting=None)
    try:
        async with _agent(name, own, meeting, home, known) as ended, _ticking(nodes):
            came = asyncio.create_task(
                nodes.gather(meeting.nnodes, asyncio.Event(), timeout_s=MEET_S)
            )
            await asyncio.wait((came, ended), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise HoldfastError(f"The check on {name} was interrupted. Start it again.")
            members = {node.name: node for node in nodes.connected}
            hosts = NodeHosts(nodes, members)
            nodes.is_testing = True
            priors, cordoned = await asyncio.to_thread(past, list(members))
            report = await localise(hosts, priors, clock, cordoned=cordoned)
            missing = max(0, meeting.nnodes - len(members))
            result = await asyncio.to_thread(finish, report, missing)
            farewell |= {"state": "completed", "exit_code": result.exit_code}
            farewell["outcome"] = result.sentence
            return report, missing
    finally:
        board.remove()
        await nodes.close(farewell)


async def _join(meeting: Meeting, home: Path) -> Joined:
    name = node_name()
    async with _agent(name, _node_id(name), meeting, home, None) as ended:
        result: Joined | None = await ended
    if result is None:
        place = "the first node" if meeting.host is None else f"{meeting.host}:{meeting.port}"
        raise HoldfastError(
            f"No node leads a check at {place}. Start `holdfast nodes check` there too; HOLDFAST_HOME must be one "
            "folder that all nodes share."
        )
    return result


def _node_id(name: str) -> str:
    return f"{name}-{os.getpid()}-{secrets.token_hex(3)}"


@contextlib.asynccontextmanager
async def _agent(
    name: str, node_id: str, meeting: Meeting, home: Path, known: Mapping[str, Any] | None
) -> Any:
    """Run the agent of this node; yield a future for the last result from the leading node, or None."""
    ours, theirs = socket.socketpair()
    node = await Stream.of_socket(ours)
    begin = {
        "node_id": node_id,
        "name": name,
        "channel_token": secrets.token_hex(16),
        "supervisor": known,
        "board": [str(home), meeting.key, None],
        "preferred_rank": meeting.preferred_rank,
        "launched": None,
        "last_end": None,
        "began_s": None,
        "stop": None,
    }
    agent = Agent(begin, await Stream.of_socket(theirs))
    running = asyncio.create_task(agent.run(loopback_listener()))
    ended = asyncio.create_task(_last_word(node))
    try:
        yield ended
    finally:
        for task in (ended, running):
            task.cancel()
        await asyncio.gather(ended, running, return_exceptions=True)
        node.close()


async def _last_word(agent: Stream) -> Joined | None:
    """Wait for the result of the check; return None if no node leads a check for `MEET_S`."""
    loop = asyncio.get_running_loop()
    alone_until_s = loop.time() + MEET_S
    while (message := await agent.receive()) is not None:
        match message["kind"]:
            case "joined":
                alone_until_s = float("inf")
            case "away":
                alone_until_s = min(alone_until_s, loop.time() + MEET_S)
            case "end":
                return Joined(int(message["exit_code"]), str(message["outcome"]))
        if loop.time() > alone_until_s:
            return None
    return None


@contextlib.asynccontextmanager
async def _ticking(nodes: Nodes) -> Any:
    async def tick() -> None:
        while True:
            await asyncio.sleep(TICK_S)
            await nodes.tick()

    ticking = asyncio.create_task(tick())
    try:
        yield
    finally:
        ticking.cancel()


class _Deaf:
    """A listener that ignores the events of a job, since a check has no job."""

    def received(
        self, peer: Peer, message: dict[str, Any], at_monotonic_s: float, *, again: bool
    ) -> None:
        pass

    def states(self, states: Mapping[int, str | None]) -> None:
        pass

    def launcher_ended(self, returncode: int) -> None:
        pass

    def node_lost(self, node: Node) -> None:
        pass

    def request_stop(self, by: str, where: str, count: int) -> None:
        pass
