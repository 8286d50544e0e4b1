"""Manage the nodes in the supervisor: the connections of their agents, and their launchers.

An agent forwards messages between the supervisor and the ranks and shims of its node. Both sides
number their messages, and keep each message until the other side has acknowledged it. So if an
agent is gone for a moment, or a connection is cut, the ranks continue and no message is lost. If an
agent stays away, its node counts as lost. Time is counted in ticks of the supervisor. This is
because a supervisor that stands still makes no ticks, and so cannot wrongly count nodes as lost.

| from | `kind` | fields |
|---|---|---|
| supervisor | `challenge` | `nonce` |
| agent | `hello` | `nonce`, `proof`, `node_id`, `name`, `incarnation`, `preferred_rank`, `launched`, `last_end`, |
| | | `generation`, `orders_seen` |
| supervisor | `welcome` | `proof`, `run_id`, `generation`, `seen`: the agent's last `seq` |
| agent | `peer` | `seq`, `peer` (a rank or shim), `age_s`, `message`, `again`: to a new supervisor |
| supervisor | `ack`, `pong` | `seq` |
| agent | `steps` | `peers`, `reports`: each a `seq`, the place of its peer, `age_s`, `message` |
| agent | `states` | `states`: the changed kernel states of the ranks' processes |
| agent | `looked` | `look`, `used`: the usage of the ranks' processes |
| agent | `node_signal`, `notice`, `cannot_see` | `fact`, `age_s`, `is_over`; `sources`: see `signals` |
| agent | `port` | `port`: free on its node |
| agent | `launcher_ended` | `attempt`, `returncode` |
| agent | `checked` | `check`, `answer`: the result of a test of its node, see `localise.tester` |
| agent | `stop` | `by`, `count`: the author and the number of the requests to stop on its node |
| agent | `ping` | |
| agent | `ack` | `seq`: the number of an order, one of the next five |
| supervisor | `launch` | `seq`, `attempt`, `environment`, `nnodes`, `node_rank`, `address`, `port` |
| supervisor | `kill` | `seq`: end the launcher, with all below it |
| supervisor | `pass` | `seq`, `to`, `rank`, `only`, `message` |
| supervisor | `port` | `seq`: answer with a port |
| supervisor | `check` | `seq`, `check`, `what`: test only the node (`solo`) or in a `group`; `end` |
| supervisor | `look` | `look`, `pids` |
| supervisor | `end` | `state`, `exit_code`, `outcome`: the run is over, at least for the node |
| supervisor | `lead` | the node must start the next supervisor |
"""

import asyncio
import contextlib
import ipaddress
import itertools
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Protocol

from holdfast.core.channel import is_token
from holdfast.core.clock import Clock
from holdfast.core.sockets import plain_address
from holdfast.recover.agent.rendezvous import LISTEN_BACKLOG
from holdfast.recover.agent.stream import MAX_BYTES, Stream, proof
from holdfast.recover.channel import Peer
from holdfast.recover.connected_node import LEFT, Node, Pace, reached_by

FAREWELL_S = 2.0
ACK_S = 0.2
HELLO_TIMEOUT_S = 10.0
PORT_TIMEOUT_S = 10.0
LOOK_TIMEOUT_S = 10.0
STRANGERS = 256
"""The largest number of open connections without a hello."""


class Listener(Protocol):
    """Receives the events of the nodes, in the event loop."""

    def received(
        self, peer: Peer, message: dict[str, Any], at_monotonic_s: float, *, again: bool
    ) -> None:
        """Handle a message of a rank or shim, sent at `at_monotonic_s` by the supervisor's clock."""

    def states(self, states: Mapping[int, str | None]) -> None:
        """Handle changed kernel states of the ranks' processes."""

    def launcher_ended(self, returncode: int) -> None:
        """Handle the end of a launcher of the present launch."""

    def node_lost(self, node: Node) -> None:
        """Handle the loss of a node of the present launch."""

    def request_stop(self, by: str, where: str, count: int) -> None:
        """Handle a request to stop the run: the `count`-th one at `where`, made by `by`."""


class Nodes:
    """The nodes of one run. Call all methods from one event loop."""

    def __init__(
        self,
        listener: Listener,
        clock: Clock,
        *,
        run_id: str,
        token: str,
        generation: int,
        own_node: str = "",
    ) -> None:
        """Store the collaborators; `start` begins to serve agents.

        Args:
            listener: receives the events of the nodes.
            clock: the clock of this host.
            run_id: the id of the run.
            token: the token of the run.
            generation: the number of this supervisor.
            own_node: the id of this supervisor's node, which is never lost while it runs.
        """
        self._listener = listener
        self._clock = clock
        self._run_id = run_id
        self._token = token
        self._own_node = own_node
        self.generation = generation
        self._nodes: dict[str, Node] = {}
        self._pace = Pace()
        self._launch: list[Node] = []
        """The nodes of the present launch, by their rank."""
        self._adopting: int | None = None
        """The attempt whose launchers can be taken over."""
        self._changed = asyncio.Condition()
        self._ports: asyncio.Queue[tuple[Node, int]] = asyncio.Queue()
        self._looks: dict[int, asyncio.Queue[dict[int, tuple[float, int] | None]]] = {}
        self._look_numbers = itertools.count(1)
        self._strangers = 0
        self._server: asyncio.Server | None = None
        self._acks: set[str] = set()
        self.cordoned: Set[str] = frozenset()
        """Names of nodes on which no job is launched."""
        self.signalled: Callable[[str, dict[str, Any]], None] = lambda _node, _message: None
        self.is_testing = False
        """True while nodes are tested; then spares do not shorten the wait for an agent."""
        self._reached_at: str | None = None
        """The address of this host to which an agent on another host has connected."""

    async def start(self, listening: socket.socket, *, adopting: int | None) -> None:
        """Serve agents on a listening socket; launchers of the attempt `adopting` may keep running."""
        self._adopting = adopting
        self._server = await asyncio.start_server(
            self._serve, sock=listening, limit=MAX_BYTES, backlog=LISTEN_BACKLOG
        )

    async def close(self, farewell: dict[str, Any] | None) -> None:
        """Send a last message to every agent, and close the connections."""
        if self._server is not None:
            self._server.close()
        streams = [node.stream for node in self._nodes.values() if node.stream is not None]
        for stream in streams:
            if farewell is not None:
                stream.send(farewell)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await asyncio.gather(*(stream.flushed() for stream in streams))
        for stream in streams:
            stream.close()
        await asyncio.sleep(0)

    # What is sent

    def send(
        self,
        message: dict[str, Any],
        *,
        to: str | None = None,
        rank: int | None = None,
        only: Peer | None = None,
    ) -> int:
        """Send to all peers with the role `to`, to those of one `rank`, or only to the peer `only`.

        Returns:
            The number of peers to which the message was sent.
        """
        count = 0
        order = {"kind": "pass", "to": to, "rank": rank, "message": message}
        order["only"] = None if only is None else vars(only)
        for node in self._nodes.values():
            meant = [
                peer
                for peer in (node.peers if rank is None or rank in node.ranks else ())
                if to in (None, peer.role) and rank in (None, peer.rank) and only in (None, peer)
            ]
            # The peers of an agent that was just started will soon connect to it.
            are_coming = node.launched is not None and not node.peers and only is None
            if meant or are_coming:
                node.order(order)
                count += len(meant)
        return count

    def kill(self) -> None:
        """End every launcher of the present launch, with all processes below it."""
        for node in self._launch:
            node.end_launcher()

    async def look(self, pids: Mapping[int, int]) -> dict[int, tuple[float, int] | None]:
        """Return the usage of ranks' processes (see `core.processes.activity`); request stacks."""
        number = next(self._look_numbers)
        used: dict[int, tuple[float, int] | None] = dict.fromkeys(pids)
        answers: asyncio.Queue[dict[int, tuple[float, int] | None]] = asyncio.Queue()
        self._looks[number] = answers
        requests = 0
        for node in self._launch:
            ranks = {peer.rank for peer in node.peers}
            mine = {str(rank): pid for rank, pid in pids.items() if rank in ranks}
            if node.stream is not None and mine:
                node.stream.send({"kind": "look", "look": number, "pids": mine})
                requests += 1
        with contextlib.suppress(TimeoutError):  # a process without an answer keeps None
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                for _ in range(requests):
                    used |= await answers.get()
        del self._looks[number]
        return used

    # Launches

    @property
    def launched(self) -> Sequence[Node]:
        """The nodes of the present launch."""
        return self._launch

    @property
    def launcher_failed(self) -> bool:
        """True if a launcher of the present launch has ended with an error."""
        ends = [node.last_end for node in self._launch if node.launched is None]
        return any(end is not None and end[1] != 0 for end in ends)

    def names(self) -> dict[int, str]:
        """Return, for each rank, the name of the node on which it runs."""
        return {peer.rank: node.name for node in self._nodes.values() for peer in node.peers}

    async def gather(self, count: int, given_up: asyncio.Event, *, timeout_s: float) -> bool:
        """Wait for `count` nodes without a launcher; return True if there are enough.

        The wait ends after `timeout_s` seconds at the latest, or when `given_up` is set.
        """

        async def enough() -> None:
            async with self._changed:
                # The own node must not become a spare because its agent is slow to connect.
                await self._changed.wait_for(
                    lambda: not (self.missing(count) or (self._own_node and self.own is None))
                )

        waits = [asyncio.create_task(work) for work in (enough(), given_up.wait())]
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        return self.missing(count) == 0 and not given_up.is_set()

    def missing(self, count: int) -> int:
        """Return how many nodes are missing for a launch on `count` nodes."""
        return max(0, count - len(self._free()))

    async def choose(self, count: int, *, turn: int = 0) -> tuple[list[Node], int] | None:
        """Return the nodes for a launch, by rank, and a free port of the first.

        None if any node is missing. Nodes of the last launch keep their ranks, shifted by `turn`.
        """
        if self.missing(count):
            return None
        nodes = (self._places(count) * 2)[turn : turn + count]
        port = 0 if count == 1 else await self._free_port(nodes[0])
        if port is None or any(node.stream is None or node.launched is not None for node in nodes):
            return None
        return nodes, port

    def launch(
        self, attempt: int, nodes: list[Node], port: int, environment: Mapping[str, str]
    ) -> None:
        """Start a launcher on each of the nodes that were chosen."""
        self._launch = nodes
        head = self.address_of(nodes[0])
        for node_rank, node in enumerate(nodes):
            node.node_rank, node.launched, node.ending_ticks = node_rank, attempt, None
            node.order(
                {
                    "kind": "launch",
                    "attempt": attempt,
                    "environment": dict(environment),
                    "nnodes": len(nodes),
                    "node_rank": node_rank,
                    "address": head,
                    "port": port,
                }
            )

    async def end_launchers(self) -> None:
        """End all launchers and wait for their ends, except on lost and stuck nodes.

        These ends are not reported to the present attempt.
        """
        self._launch, self._adopting = [], None
        for node in self._nodes.values():
            node.end_launcher()
        async with self._changed:
            await self._changed.wait_for(
                lambda: all(node.has_ended for node in self._nodes.values())
            )
        for node in self._nodes.values():
            if node.is_leaving and node.stream is not None:
                node.stream.send(LEFT)

    async def all_launchers_ended(self) -> int:
        """Wait until all launchers of the present launch end; return 0, or the code of a failed one."""
        async with self._changed:
            await self._changed.wait_for(lambda: all(node.has_ended for node in self._launch))
        codes = [
            -9 if node.is_stuck or node.last_end is None else node.last_end[1]
            for node in self._launch
        ]
        return next((code for code in codes if code != 0), 0)

    def left_of(self, attempt: int, node_ids: Sequence[str]) -> list[Node]:
        """Return the connected nodes of a launch that run its launcher, or have reported its end."""
        known = [self._nodes.get(node_id) for node_id in node_ids]
        return [
            node
            for node in known
            if node is not None
            and node.is_known
            and (
                node.launched == attempt
                or (node.last_end is not None and node.last_end[0] == attempt)
            )
        ]

    def adopt(self, nodes: Sequence[Node], node_ids: Sequence[str]) -> None:
        """Take over the launch of an earlier supervisor on its connected nodes."""
        for node in nodes:
            node.node_rank = node_ids.index(node.node_id)
        self._launch, self._adopting = list(nodes), None

    def _free(self) -> list[Node]:
        return [
            node
            for node in self._nodes.values()
            if node.stream is not None
            and node.launched is None
            and not node.is_leaving
            and node.name not in self.cordoned
        ]

    @property
    def spares(self) -> list[Node]:
        """The free nodes that are not part of the present launch."""
        return [node for node in self._free() if node not in self._launch]

    def _places(self, count: int) -> list[Node]:
        """Choose the last launch's nodes for their old ranks; for others, this node comes first."""
        free = sorted(self._free(), key=lambda node: node is not self.own)
        kept = {
            node.node_rank: node
            for node in free
            if node.node_rank is not None and node.node_rank < count
        }
        others = [node for node in free if node not in kept.values()]
        others.sort(key=lambda one: count if one.preferred_rank is None else one.preferred_rank)
        return [kept.get(place) or others.pop(0) for place in range(count)]

    async def _free_port(self, head: Node) -> int | None:
        """Request a free port for the launcher's store from a node; return None without an answer."""
        while not self._ports.empty():
            self._ports.get_nowait()
        head.order({"kind": "port"})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PORT_TIMEOUT_S):
                while True:
                    node, port = await self._ports.get()
                    if node is head:
                        return port
        return None

    @property
    def own(self) -> Node | None:
        """The node of this supervisor, once its agent has connected."""
        return self._nodes.get(self._own_node)

    def hand_over(self) -> str | None:
        """Order the first node of the launch to start the next supervisor; return its name, or None."""
        if any(node.orders or node.stream is None for node in self._launch):
            return None  # an order is not acknowledged, or an agent is not connected
        successor = self._launch[0]
        assert successor.stream is not None
        successor.stream.send({"kind": "lead"})
        return successor.name

    @property
    def stuck(self) -> list[str]:
        """The names of the nodes on which SIGKILL does not end the processes."""
        return [node.name for node in self._nodes.values() if node.is_stuck]

    @property
    def connected(self) -> list[Node]:
        """The nodes whose agents are connected, in the order of their first connection."""
        return [node for node in self._nodes.values() if node.stream is not None]

    def address_of(self, node: Node) -> str:
        """Return a node's address for other nodes; an agent on this host may use loopback."""
        is_loopback = ipaddress.ip_address(node.address).is_loopback
        return self._reached_at or node.address if is_loopback else node.address

    # What the agents send

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = Stream(reader, writer)
        node = None
        try:
            node = await self._greet(stream)
            if node is None:
                return
            await self._changes()
            while (message := await stream.receive()) is not None and node.stream is stream:
                node.silent_ticks = 0
                try:
                    await self._take(node, message)
                except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
                    continue  # the agent has another version of Holdfast
        finally:
            stream.close()
            if node is not None and node.stream is stream:
                node.stream = None
                await self._changes()

    async def _greet(self, stream: Stream) -> Node | None:
        if self._strangers >= STRANGERS:
            return None
        self._strangers += 1
        nonce = secrets.token_hex(16)
        stream.send({"kind": "challenge", "nonce": nonce})
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = await stream.receive()
            if hello is None or hello["kind"] != "hello":
                return None
            expected = proof(self._token, "agent", nonce)
            if not is_token(str(hello["proof"]).encode(), expected.encode()):
                stream.send({"kind": "refused", "why": "wrong token"})
                return None
            return self._admit(stream, hello)
        except (TimeoutError, KeyError, TypeError, ValueError):
            return None
        finally:
            self._strangers -= 1

    def _admit(self, stream: Stream, hello: Mapping[str, Any]) -> Node:
        node_id, incarnation = str(hello["node_id"]), str(hello["incarnation"])
        launched = None if hello["launched"] is None else int(hello["launched"])
        last_end = None if hello["last_end"] is None else tuple(map(int, hello["last_end"]))
        orders_seen = int(hello["orders_seen"]) if hello["generation"] == self.generation else 0
        node = self._nodes.get(node_id)
        if node is None:
            node = self._nodes[node_id] = Node(node_id=node_id, name=str(hello["name"]))
            preferred = hello["preferred_rank"]
            node.preferred_rank = None if preferred is None else int(preferred)
            node.launched = launched
            # If this supervisor gave the node up before, the agent has already received orders.
            node.order_numbers = itertools.count(orders_seen + 1)
        if node.stream is not None:
            node.stream.close()
        if node.incarnation != incarnation:
            node.incarnation, node.seen = incarnation, 0
            node.peers.clear()  # each peer will connect again
            node.checks.end()
        node.stream, node.away_ticks, node.silent_ticks, node.deaf_ticks = stream, 0, 0, 0
        node.address = plain_address(stream.remote_host)
        local = plain_address(stream.local_host)
        if local != node.address and not ipaddress.ip_address(local).is_loopback:
            self._reached_at = local
        welcome = {"run_id": self._run_id, "generation": self.generation, "seen": node.seen}
        welcome["proof"] = proof(self._token, "supervisor", str(hello["nonce"]))
        stream.send({"kind": "welcome", **welcome})
        node.acknowledged(orders_seen)
        for order in node.orders:
            stream.send(order)
        is_ordered = any(order["kind"] == "launch" for order in node.orders)
        if last_end is not None and len(last_end) == 2:
            node.last_end = last_end
        if launched is None and node.launched is not None and not is_ordered:
            if node.last_end is None or node.last_end[0] != node.launched:
                node.last_end = node.launched, -9
            self._launcher_ended(node)  # the launcher ended while the agent was gone
        elif launched is not None and launched != self._adopting and node not in self._launch:
            node.launched = launched  # the launch continued without this node
            node.end_launcher()
        return node

    async def _take(self, node: Node, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "peer":
                self._take_peer(node, message)
            case "steps":
                self._take_steps(node, message)
            case "ack":
                node.acknowledged(int(message["seq"]))
            case "ping" if node.stream is not None:
                node.stream.send({"kind": "pong"})
            case "states":
                node.is_known = True  # the agent sends `states` after all facts
                self._listener.states(
                    {int(rank): state for rank, state in message["states"].items()}
                )
                await self._changes()
            case "node_signal" | "notice" | "cannot_see":
                self.signalled(node.name, message)
            case "looked":
                self._take_look(message)
            case "port":
                self._ports.put_nowait((node, int(message["port"])))
            case "checked":
                node.checks.answered(int(message["check"]), dict(message["answer"]))
            case "launcher_ended":
                if node.launched == int(message["attempt"]):
                    node.last_end = node.launched, int(message["returncode"])
                    self._launcher_ended(node)
                    await self._changes()
            case "stop":
                self._listener.request_stop(str(message["by"]), node.node_id, int(message["count"]))

    def _take_look(self, message: Mapping[str, Any]) -> None:
        answers = self._looks.get(int(message["look"]))
        if answers is not None:
            used = {int(rank): one for rank, one in message["used"].items()}
            read = {rank: (float(one[0]), int(one[1])) for rank, one in used.items() if one}
            answers.put_nowait(dict.fromkeys(used) | read)

    def _take_peer(self, node: Node, envelope: Mapping[str, Any]) -> None:
        again = bool(envelope["again"])
        if not again and not self._is_new(node, int(envelope["seq"])):
            return
        peer, message = Peer(**envelope["peer"]), dict(envelope["message"])
        if message["kind"] == "gone":
            node.peers.pop(peer, None)
        elif message["kind"] == "hello":
            node.peers[peer] = None
            node.ranks.add(peer.rank)
        at_monotonic_s = self._clock.monotonic_s() - max(0.0, float(envelope["age_s"]))
        node.stepped(peer, message)
        # A message that a rank or shim repeats for a new agent was received before.
        again |= message.get("again") is True
        self._listener.received(peer, message, at_monotonic_s, again=again)

    def _take_steps(self, node: Node, summed: Mapping[str, Any]) -> None:
        peers, now_s = [Peer(**peer) for peer in summed["peers"]], self._clock.monotonic_s()
        for seq, place, age_s, message in summed["reports"]:
            if self._is_new(node, int(seq)):
                at_monotonic_s = now_s - max(0.0, float(age_s))
                node.stepped(peers[place], message)
                self._listener.received(peers[place], message, at_monotonic_s, again=False)

    def _is_new(self, node: Node, seq: int) -> bool:
        """Record the number of a message; return False for a repetition, for example after a cut."""
        if seq <= node.seen:
            return False
        node.seen = seq
        if not self._acks:
            asyncio.get_running_loop().call_later(ACK_S, self._acknowledge)
        self._acks.add(node.node_id)
        return True

    def _acknowledge(self) -> None:
        for node_id in self._acks:
            node = self._nodes.get(node_id)
            if node is not None and node.stream is not None:
                node.stream.send({"kind": "ack", "seq": node.seen})
        self._acks.clear()

    def _launcher_ended(self, node: Node) -> None:
        node.launched = node.ending_ticks = None
        node.peers.clear()
        if node in self._launch:
            assert node.last_end is not None
            self._listener.launcher_ended(node.last_end[1])

    async def tick(self) -> None:
        """Count a tick; give up nodes whose agents have been gone for too long."""
        lost, were_stuck = [], self.stuck
        has_spare = bool(self.spares) and not self.is_testing
        reached = reached_by(self._launch)
        self._pace.tick(reached)
        for node in self._nodes.values():
            node.tick(reached)
        others = [node for node in self._nodes.values() if node.node_id != self._own_node]
        # If several nodes stop answering at the same time, the supervisor itself may be cut off.
        is_cut_off = len(others) > 1 and all(node.deaf_ticks for node in others)
        for node in others:
            if node.is_lost(has_spare=has_spare, is_cut_off=is_cut_off, pace=self._pace):
                lost.append(node)
        for node in lost:
            del self._nodes[node.node_id]
            node.checks.end(is_lost=True)
            if node.stream is not None:
                node.stream.close()
            attempt, node.launched = node.launched, None
            if node in self._launch and attempt is not None:
                node.last_end = attempt, -9
                self._listener.node_lost(node)
        if lost or self.stuck != were_stuck:
            await self._changes()

    async def _changes(self) -> None:
        async with self._changed:
            self._changed.notify_all()
