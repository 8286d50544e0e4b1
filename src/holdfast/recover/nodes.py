"""The supervisor's side of the nodes: which agents are connected, and which of them run the job's launchers.

An agent forwards what its ranks and shims send, and passes on what the supervisor sends to them. An agent that is gone
for a moment comes back, since its node starts it again; its ranks go on meanwhile, and what is meant for them waits.
A node whose agent stays away is lost. Time is counted in ticks of the supervisor: a machine that stands still makes no
ticks, so that its agents are not lost by that.

| from | `kind` | fields |
|---|---|---|
| agent | `hello` | `token`, `node_id`, `name`, `incarnation`, `preferred_rank`, `launched`, `last_end` |
| agent | `peer` | `seq`, `peer`, `age_s`, `message`, `again`: of a rank or shim; `again` to a new supervisor |
| agent | `states` | `states`: the kernel's states of the ranks' processes, as far as they have changed |
| agent | `looked` | `look`, `used`: what the ranks' processes have used |
| agent | `port` | `port`: free on its node |
| agent | `launcher_ended` | `attempt`, `returncode` |
| agent | `stop` | `by`, `count`: somebody on its node wants the run to stop, for so many times |
| agent | `ping` | |
| supervisor | `welcome` | `run_id`, `generation`, `seen`: the last `seq` that was received from the agent |
| supervisor | `ack` | `seq` |
| supervisor | `port` | : answer with a port |
| supervisor | `launch` | `attempt`, `environment`, `nnodes`, `node_rank`, `address`, `port` |
| supervisor | `kill` | : end the launcher, with all below it |
| supervisor | `pass` | `to`, `rank`, `only`, `message` |
| supervisor | `look` | `look`, `pids` |
| supervisor | `end` | `exit_code`, `outcome`: the run is over |
"""

import asyncio
import contextlib
import itertools
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from holdfast.core.channel import is_token, notice_loss
from holdfast.core.clock import Clock
from holdfast.recover.agent.stream import MAX_BYTES, Stream
from holdfast.recover.channel import Peer

AWAY_TICKS = 100
"""After so many ticks without its agent a node is lost …"""
AWAY_TICKS_WITH_SPARE = 20
"""… and after so many where a spare can take its place."""
SILENT_TICKS = 300
"""After so many ticks without a word from it, the connection to an agent is ended; agents send each second."""
ACK_S = 0.2
HELLO_TIMEOUT_S = 10.0
PORT_TIMEOUT_S = 10.0
LOOK_TIMEOUT_S = 10.0
STRANGERS = 256
"""Connections that may be open without having said hello."""


@dataclass(eq=False, kw_only=True)
class Node:
    """One node, as its agent has described it."""

    node_id: str
    name: str
    incarnation: str
    address: str
    preferred_rank: int | None
    launched: int | None
    """The attempt whose launcher runs there."""
    stream: Stream | None
    node_rank: int | None = None
    """Its place in the present launch; None of a spare."""
    returncode: int | None = None
    """How its launcher of the present launch ended."""
    seen: int = 0
    """The `seq` of its last message."""
    is_known: bool = False
    """Whether its agent has sent all that it knows of the present attempt."""
    peers: dict[Peer, None] = field(default_factory=dict)
    waiting: deque[dict[str, Any]] = field(default_factory=deque)
    """Messages for when its agent is back."""
    away_ticks: int = 0
    silent_ticks: int = 0

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, once the agent is there."""
        if self.stream is None:
            self.waiting.append(message)
        else:
            self.stream.send(message)


class Listener(Protocol):
    """Receives what happens on the nodes, in the event loop."""

    def received(
        self, peer: Peer, message: dict[str, Any], at_monotonic_s: float, *, again: bool
    ) -> None:
        """Take in a message of a rank or shim, sent at a moment of the supervisor's clock."""

    def states(self, states: Mapping[int, str | None]) -> None:
        """Take in the kernel's states of ranks' processes."""

    def launcher_ended(self, returncode: int) -> None:
        """Take in that a launcher of the present launch has ended."""

    def node_lost(self, node: Node) -> None:
        """Take in that a node of the present launch is lost."""

    def stop_asked(self, by: str, where: str, count: int) -> None:
        """Take in that `by` wants the run to stop, and has said so `count` times on the node `where`."""


class Nodes:
    """The nodes of one run. Call all of it from one event loop."""

    def __init__(
        self, listener: Listener, clock: Clock, *, run_id: str, token: str, generation: int
    ) -> None:
        self._listener = listener
        self._clock = clock
        self._run_id = run_id
        self._token = token
        self.generation = generation
        self._nodes: dict[str, Node] = {}
        self._launch: list[Node] = []
        """The nodes of the present launch, by their rank."""
        self._changed = asyncio.Condition()
        self._ports: asyncio.Queue[tuple[Node, int]] = asyncio.Queue()
        self._looks: dict[int, asyncio.Queue[dict[int, tuple[float, int] | None]]] = {}
        self._look_numbers = itertools.count(1)
        self._strangers = 0
        self._server: asyncio.Server | None = None
        self._acks: set[str] = set()
        self._reached_at: str | None = None
        """The address of this host by which an agent on another one has reached it."""

    async def start(self, listening: socket.socket) -> None:
        """Serve the agents that connect to a listening socket."""
        self._server = await asyncio.start_server(self._serve, sock=listening, limit=MAX_BYTES)

    async def close(self, farewell: dict[str, Any] | None) -> None:
        """Send a last message to every agent, and hang up."""
        if self._server is not None:
            self._server.close()
        streams = [node.stream for node in self._nodes.values() if node.stream is not None]
        for stream in streams:
            if farewell is not None:
                stream.send(farewell)
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
        """Send to every peer of the role `to` and of a `rank`, by default of each, or to `only` one.

        Returns:
            To how many.
        """
        count = 0
        order = {"kind": "pass", "to": to, "rank": rank, "message": message}
        order["only"] = None if only is None else vars(only)
        for node in self._nodes.values():
            meant = [
                peer
                for peer in node.peers
                if to in (None, peer.role) and rank in (None, peer.rank) and only in (None, peer)
            ]
            if meant:
                node.send(order)
                count += len(meant)
        return count

    def kill(self) -> None:
        """End every launcher of the present launch, with all below it."""
        for node in self._launch:
            if node.launched is not None:
                node.send({"kind": "kill"})

    async def look(self, pids: Mapping[int, int]) -> dict[int, tuple[float, int] | None]:
        """Return what the processes of ranks have used, see `core.processes.activity`; ask the ranks for stacks."""
        number = next(self._look_numbers)
        asked = [node for node in self._launch if node.stream is not None and node.peers]
        used: dict[int, tuple[float, int] | None] = dict.fromkeys(pids)
        answers: asyncio.Queue[dict[int, tuple[float, int] | None]] = asyncio.Queue()
        self._looks[number] = answers
        for node in asked:
            ranks = {peer.rank for peer in node.peers}
            mine = {str(rank): pid for rank, pid in pids.items() if rank in ranks}
            node.send({"kind": "look", "look": number, "pids": mine})
        with contextlib.suppress(TimeoutError):  # what is not known is None
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                for _ in asked:
                    used |= await answers.get()
        del self._looks[number]
        return used

    # Launches

    @property
    def launched(self) -> Sequence[Node]:
        """Return the nodes of the present launch."""
        return self._launch

    async def gather(self, count: int) -> None:
        """Wait until there are `count` nodes on which no launcher runs."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._free()) >= count)

    def missing(self, count: int) -> int:
        """Return how many nodes are missing for a launch on `count`."""
        return max(0, count - len(self._free()))

    async def launch(self, attempt: int, count: int, environment: Mapping[str, str]) -> None:
        """Start a launcher on each of `count` nodes; those of the last launch keep their places.

        Where a node is lost meanwhile, another one is waited for.
        """
        while True:
            await self.gather(count)
            places = self._places(count)
            port = 0 if count == 1 else await self._free_port(places[0])
            if port is not None and all(node.stream is not None for node in places):
                break
        self._launch = places
        head = self._address_of(places[0])
        for node_rank, node in enumerate(places):
            node.node_rank, node.launched, node.returncode = node_rank, attempt, None
            node.send(
                {
                    "kind": "launch",
                    "attempt": attempt,
                    "environment": dict(environment),
                    "nnodes": count,
                    "node_rank": node_rank,
                    "address": head,
                    "port": port,
                }
            )

    async def end_launchers(self) -> None:
        """End every launcher on any node, and wait until they are gone; a lost node is not waited for."""
        for node in self._nodes.values():
            if node.launched is not None:
                node.send({"kind": "kill"})
        async with self._changed:
            await self._changed.wait_for(
                lambda: all(node.launched is None for node in self._nodes.values())
            )

    async def all_launchers_ended(self) -> int:
        """Wait until no launcher of the present launch runs; return 0 if all ended well, else how one ended."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: all(node.launched is None for node in self._launch)
            )
        codes = [node.returncode for node in self._launch if node.returncode != 0]
        return next((code for code in codes if code is not None), 1 if codes else 0)

    def adopt(self, attempt: int, node_ids: Sequence[str]) -> set[str]:
        """Take over the launch of a supervisor that is gone; return those of its nodes that are there with it."""
        nodes = [self._nodes.get(node_id) for node_id in node_ids]
        launch = [
            node
            for node in nodes
            if node is not None and node.launched == attempt and node.is_known
        ]
        for node in launch:
            node.node_rank = node_ids.index(node.node_id)
        self._launch = launch
        return {node.node_id for node in launch}

    def _free(self) -> list[Node]:
        return [
            node
            for node in self._nodes.values()
            if node.stream is not None and node.launched is None
        ]

    def _places(self, count: int) -> list[Node]:
        """Choose nodes: those of the last launch in their places, and others where these are missing."""
        free = self._free()
        kept = {node.node_rank: node for node in free if node in self._launch}
        arrivals = {id(node): number for number, node in enumerate(free)}
        others = sorted(
            (node for node in free if node not in self._launch),
            key=lambda node: (
                count if node.preferred_rank is None else node.preferred_rank,
                arrivals[id(node)],
            ),
        )
        return [kept.get(place) or others.pop(0) for place in range(count)]

    async def _free_port(self, head: Node) -> int | None:
        """Have a node find a free port for the launcher's store; None if the node does not answer."""
        head.send({"kind": "port"})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PORT_TIMEOUT_S):
                while True:
                    node, port = await self._ports.get()
                    if node is head:
                        return port
        return None

    def _address_of(self, node: Node) -> str:
        """Return the address of a node for other nodes: an agent on this host may have come by the loopback one."""
        is_loopback = node.address.startswith("127.") or node.address == "::1"
        return self._reached_at or node.address if is_loopback else node.address

    # What the agents send

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = Stream(reader, writer)
        node = None
        try:
            node = await self._greet(stream)
            if node is None:
                return
            notice_loss(writer.get_extra_info("socket"))
            await self._changes()
            while (message := await stream.receive()) is not None:
                node.silent_ticks = 0
                try:
                    await self._take(node, message)
                except (KeyError, TypeError, ValueError, AttributeError):
                    continue  # of another version of Holdfast
        finally:
            stream.close()
            if node is not None and node.stream is stream:
                node.stream = None
                await self._changes()

    async def _greet(self, stream: Stream) -> Node | None:
        if self._strangers >= STRANGERS:
            return None
        self._strangers += 1
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = await stream.receive()
        except TimeoutError:
            return None
        finally:
            self._strangers -= 1
        if hello is None or hello["kind"] != "hello":
            return None
        if not is_token(str(hello.get("token", "")).encode(), self._token.encode()):
            stream.send({"kind": "refused", "why": "wrong token"})
            return None
        try:
            return self._admit(stream, hello)
        except (KeyError, TypeError, ValueError):
            return None

    def _admit(self, stream: Stream, hello: Mapping[str, Any]) -> Node:
        node_id, incarnation = str(hello["node_id"]), str(hello["incarnation"])
        launched = None if hello["launched"] is None else int(hello["launched"])
        preferred = hello["preferred_rank"]
        node = self._nodes.get(node_id)
        if node is None:
            node = self._nodes[node_id] = Node(
                node_id=node_id,
                name=str(hello["name"]),
                incarnation=incarnation,
                address="",
                preferred_rank=None if preferred is None else int(preferred),
                launched=launched,
                stream=None,
            )
        if node.stream is not None:
            node.stream.close()
        if node.incarnation != incarnation:
            node.incarnation, node.seen = incarnation, 0
            node.peers.clear()  # each of them will say hello again
        node.stream, node.away_ticks, node.silent_ticks = stream, 0, 0
        node.address = stream.remote_host
        if not stream.local_host.startswith("127.") and stream.local_host != stream.remote_host:
            self._reached_at = stream.local_host
        stream.send(
            {
                "kind": "welcome",
                "run_id": self._run_id,
                "generation": self.generation,
                "seen": node.seen,
            }
        )
        is_ordered = any(message["kind"] == "launch" for message in node.waiting)
        while node.waiting:
            stream.send(node.waiting.popleft())
        if launched is None and node.launched is not None and not is_ordered:
            last_end = hello["last_end"] or [None, None]  # it ended while the agent was away
            self._launcher_ended(node, int(last_end[1]) if last_end[0] == node.launched else -9)
        elif launched is not None and self._launch and node not in self._launch:
            node.launched = launched  # of a launch that went on without this node
            stream.send({"kind": "kill"})
        return node

    async def _take(self, node: Node, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "peer":
                self._take_peer(node, message)
            case "states":
                node.is_known = True  # it comes after the facts
                self._listener.states(
                    {int(rank): state for rank, state in message["states"].items()}
                )
            case "looked":
                answers = self._looks.get(int(message["look"]))
                if answers is not None:
                    answers.put_nowait(
                        {
                            int(rank): None if used is None else (float(used[0]), int(used[1]))
                            for rank, used in message["used"].items()
                        }
                    )
            case "port":
                self._ports.put_nowait((node, int(message["port"])))
            case "launcher_ended":
                if node.launched == int(message["attempt"]):
                    self._launcher_ended(node, int(message["returncode"]))
                    await self._changes()
            case "stop":
                self._listener.stop_asked(str(message["by"]), node.node_id, int(message["count"]))

    def _take_peer(self, node: Node, envelope: Mapping[str, Any]) -> None:
        seq, again = int(envelope["seq"]), bool(envelope["again"])
        if not again:
            if seq <= node.seen:
                return  # sent once more after a cut
            node.seen = seq
            if not self._acks:
                asyncio.get_running_loop().call_later(ACK_S, self._acknowledge)
            self._acks.add(node.node_id)
        peer, message = Peer(**envelope["peer"]), dict(envelope["message"])
        if message["kind"] == "gone":
            node.peers.pop(peer, None)
        elif message["kind"] == "hello":
            node.peers[peer] = None
        at_monotonic_s = self._clock.monotonic_s() - max(0.0, float(envelope["age_s"]))
        self._listener.received(peer, message, at_monotonic_s, again=again)

    def _acknowledge(self) -> None:
        for node_id in self._acks:
            node = self._nodes.get(node_id)
            if node is not None and node.stream is not None:
                node.stream.send({"kind": "ack", "seq": node.seen})
        self._acks.clear()

    def _launcher_ended(self, node: Node, returncode: int) -> None:
        node.launched, node.returncode = None, returncode
        node.peers.clear()
        if node in self._launch:
            self._listener.launcher_ended(returncode)

    async def tick(self) -> None:
        """Count a tick; give up the nodes whose agents have been away for too long."""
        lost = []
        has_spare = any(node not in self._launch for node in self._free())
        limit = AWAY_TICKS_WITH_SPARE if has_spare else AWAY_TICKS
        for node in self._nodes.values():
            if node.stream is not None:
                node.silent_ticks += 1
                if node.silent_ticks > SILENT_TICKS:
                    node.stream.close()
                continue
            node.away_ticks += 1
            if node.away_ticks > limit:
                lost.append(node)
        for node in lost:
            del self._nodes[node.node_id]
            was_launched, node.launched = node.launched is not None, None
            node.waiting.clear()
            if node in self._launch and was_launched:
                node.returncode = -9
                self._listener.node_lost(node)
        if lost:
            await self._changes()

    async def _changes(self) -> None:
        async with self._changed:
            self._changed.notify_all()
