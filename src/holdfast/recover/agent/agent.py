"""Pass messages between the ranks and shims of one node and the supervisor.

The agent numbers the messages of the ranks, forwards them, and keeps each until the supervisor has
acknowledged it. While there is no supervisor, the ranks continue to train, and the agent tries to
connect until a supervisor answers. A new supervisor first receives all messages that the ranks and
shims have sent in the present attempt. The agent itself makes no decisions. If the agent ends, the
node's process starts a new agent; the ranks and shims connect again, and repeat their messages of
the present attempt.
"""

import asyncio
import contextlib
import json
import os
import secrets
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.core.channel import is_token
from holdfast.core.clock import SystemClock
from holdfast.core.paths import RunPaths
from holdfast.core.processes import activity, die_with_parent, parent_of, process_state
from holdfast.core.sockets import free_ports
from holdfast.recover.agent.board import board_of
from holdfast.recover.agent.held_connection import send_connection
from holdfast.recover.agent.outbox import SUM_S, Envelope, Outbox
from holdfast.recover.agent.sampling import Sampling
from holdfast.recover.agent.stream import Stream, proof
from holdfast.recover.agent.trust import Trust, why_not
from holdfast.recover.channel import ChannelServer, Peer
from holdfast.recover.localise.tester import NodeTester
from holdfast.recover.signals.watch import SignalWatch, sources_of_this_host

RECONNECT_S = 0.1
RECONNECT_MAX_S = 2.0
PING_S = 1.0
STATES_S = 0.1
KEPT_ORDERS = 64
RETURN_S = 30.0
"""The seconds after the start of an agent in which ranks and shims of the previous agent may
connect again.
"""
WAITING_BYTES = 64 * 1024 * 1024
"""The largest number of bytes that wait for a supervisor that does not read."""
SUPERVISOR_SILENT_S = 8.0
"""The agent cuts a connection after this number of seconds without a message. A living supervisor
answers each ping.
"""
REMEMBERED = ("hello", "watch", "section", "step", "restored", "gone", "started", "exited", "swept")
"""The kinds of messages that a new supervisor receives first: for each peer and kind, the last one.
"""


def main() -> None:
    """Run the command `agent CONTROL_FD CHANNEL_FD HOLDING_FD PARENT_PID`, which a node starts."""
    *fds, parent_pid = map(int, sys.argv[1:5])
    die_with_parent(parent_pid)
    asyncio.run(_run(*(socket.socket(fileno=fd) for fd in fds)))


async def _run(control: socket.socket, listening: socket.socket, holding: socket.socket) -> None:
    node = await Stream.of_socket(control)
    begin = await node.receive()
    if begin is not None:
        await Agent(begin, node, holding).run(listening)


class Agent:
    """The agent of one node."""

    def __init__(
        self, begin: Mapping[str, Any], node: Stream, holding: socket.socket | None = None
    ) -> None:
        self._begin = begin
        self._node = node
        self._holding = holding
        home, key, ledger = begin["board"]
        self._board = board_of(Path(home), key, ledger)
        self._read: dict[str, Any] | None = None
        """The last publication that was read from the board."""
        self._launched: int | None = begin["launched"]
        self._last_end: list[int] | None = begin["last_end"]
        """The attempt and the return code of the launcher that ended last."""
        self._channel = ChannelServer(
            self._on_message,
            token=str(begin["channel_token"]),
            suspect=lambda peer: why_not(peer, self._shims, parent_of),
        )
        self._trust: dict[Peer, Trust] = {}
        self._shims: dict[int, Peer] = {}
        """The connected shims, by process id."""
        self._stop: dict[str, Any] | None = begin["stop"]
        self._incarnation = f"{os.getpid()}-{time.monotonic_ns()}"
        self._supervisor: Stream | None = None
        self._generation = 0
        self._outbox = Outbox(self._send)
        self._facts: dict[tuple[Peer, str], Envelope] = {}
        self._attempt = 0
        """The attempt to which the facts belong."""
        self._processes: dict[int, tuple[int, bool, int]] = {}
        """For each living rank, the attempt, True if the rank has attached, and its process id."""
        self._states: dict[int, str | None] = {}
        self._launcher: int | None = None
        self._last_step_s = time.monotonic()
        self._began_s = self._last_step_s
        self._orders_seen = 0
        self._reported_launched: int | None = None
        """The attempt that the last hello to the supervisor named as launched."""
        self._passed: deque[dict[str, Any]] = deque(maxlen=KEPT_ORDERS)
        """The messages that were passed on lately."""
        self._looking: set[asyncio.Task[None]] = set()
        self._tester = NodeTester()
        began_s = begin["began_s"]  # None if the node is only tested, and has no job
        sources = [] if began_s is None else sources_of_this_host(since_s=float(began_s))
        self._watch = SignalWatch(sources, self._send, SystemClock())
        self._home = Path(home)
        self._sampling = Sampling(str(begin["name"]), self._pids)
        self._checking: set[asyncio.Task[None]] = set()
        self._checked: dict[str, Any] | None = None
        """The last answer to an order `check`, which is sent again after the connection was cut."""

    async def run(self, listening: socket.socket) -> None:
        """Serve until the process of the node is gone, or this process is killed."""
        await self._channel.start(listening)
        self._watch.start()
        works = (
            self._obey_node(),
            self._keep_connected(),
            self._watch_states(),
            self._ping(),
            self._send_steps(),
            self._sampling.keep(),
        )
        tasks = [asyncio.create_task(work) for work in works]
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()  # raise its error: this process ends, and the node starts another one
        finally:
            # The ranks are still alive, so the end of their connections is no event to report.
            supervisor, self._supervisor = self._supervisor, None
            if supervisor is not None:
                supervisor.close()
            for task in tasks:
                task.cancel()
            self._watch.close()
            self._end_checks()
            await self._tester.ended()
            await self._channel.close()

    async def _obey_node(self) -> None:
        while (message := await self._node.receive()) is not None:
            match message["kind"]:
                case "launcher_ended":
                    self._launched = None
                    self._last_end = [message["attempt"], message["returncode"]]
                    self._processes.clear()
                    self._send(message)
                case "ping":
                    self._node.send({"kind": "pong"})
                case "stop":
                    self._stop = message
                    self._send(message)

    # The supervisor

    async def _keep_connected(self) -> None:
        wait_s = RECONNECT_S
        while True:
            stream, why = await self._connect()
            if stream is not None:
                wait_s = RECONNECT_S
                await self._obey_supervisor(stream)
                self._supervisor = None
                why = "its supervisor has ended"
            if self._supervisor is None:
                idle_s = time.monotonic() - self._last_step_s
                self._node.send({"kind": "away", "why": why, "idle_s": idle_s})
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, RECONNECT_MAX_S)

    async def _connect(self) -> tuple[Stream | None, str]:
        """Connect to the supervisor.

        Return the connection once the supervisor has accepted this agent; else None, and the
        reason.
        """
        known = self._begin["supervisor"]
        if known is None:
            # If a source cannot be read now, the facts that were read before may still hold.
            known = self._read = await asyncio.to_thread(self._board.read) or self._read
        if known is None:
            return None, "unpublished"
        stream, welcome = None, None
        for host in known["hosts"]:
            try:
                stream = await Stream.connect(host, known["port"])
            except OSError:
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SUPERVISOR_SILENT_S):
                    welcome = await self._greet(stream, known["token"])
            if welcome is not None:
                break
            stream.close()
        if stream is None:
            return None, "unreachable"
        if welcome is None:
            return None, "refused"
        generation = int(welcome["generation"])
        if generation < self._generation:
            stream.close()
            return None, "an older supervisor answers"
        if self._holding is not None:
            send_connection(self._holding, stream.fd)
        self._node.send({"kind": "joined", "run_id": str(welcome["run_id"])})
        if self._begin.get("is_profiled"):
            self._sampling.begin(RunPaths(self._home, str(welcome["run_id"])).profile)
        is_new = 0 < self._generation < generation
        if generation > self._generation:
            self._generation, self._orders_seen = generation, 0
        self._catch_up(stream, int(welcome["seen"]), is_new=is_new)
        return stream, ""

    async def _greet(self, stream: Stream, token: str) -> dict[str, Any] | None:
        """Send the hello; return the welcome of a supervisor with the token, else None."""
        nonce = secrets.token_hex(16)
        challenge = await stream.receive()
        if challenge is None or challenge["kind"] != "challenge":
            return None
        self._reported_launched = self._launched
        own = proof(token, "agent", str(challenge.get("nonce")))
        stream.send({"kind": "hello", "proof": own, "nonce": nonce, **self._description()})
        welcome = await stream.receive()
        if welcome is None or welcome["kind"] != "welcome":
            return None
        expected = proof(token, "supervisor", nonce).encode()
        return welcome if is_token(str(welcome.get("proof")).encode(), expected) else None

    def _description(self) -> dict[str, Any]:
        return {
            "generation": self._generation,
            "orders_seen": self._orders_seen,
            "node_id": self._begin["node_id"],
            "name": self._begin["name"],
            "incarnation": self._incarnation,
            "preferred_rank": self._begin["preferred_rank"],
            "launched": self._launched,
            "last_end": self._last_end,
        }

    def _catch_up(self, stream: Stream, seen: int, *, is_new: bool) -> None:
        """Send all messages that this supervisor has not received yet."""
        if is_new:
            self._end_checks()
            for envelope in list(self._facts.values()):
                stream.send(envelope.to_json(again=True))
        for message in (*self._outbox.unseen(seen), *self._watch.messages()):
            stream.send(message)
        stream.send({"kind": "states", "states": self._states})
        if self._stop is not None:
            stream.send(self._stop)
        if self._checked is not None:
            stream.send(self._checked)
        self._supervisor = stream
        if self._reported_launched is not None and self._launched is None:
            self._report_end()  # the launcher ended after the hello was sent

    def _report_end(self) -> None:
        if self._last_end is not None:
            attempt, returncode = self._last_end
            ended = {"kind": "launcher_ended", "attempt": attempt, "returncode": returncode}
            self._send(ended)

    def _send(self, message: dict[str, Any]) -> None:
        if self._supervisor is None:
            return
        self._supervisor.send(message)
        if self._supervisor.waiting_bytes > WAITING_BYTES:
            self._supervisor.close()  # supervisor does not read; unacknowledged messages are kept

    async def _obey_supervisor(self, stream: Stream) -> None:
        while True:
            try:
                async with asyncio.timeout(SUPERVISOR_SILENT_S):
                    message = await stream.receive()
            except TimeoutError:
                break  # this connection may be cut, but a new one may work
            if message is None:
                break
            if "seq" in message and message["kind"] != "ack":
                if message["seq"] > self._orders_seen:
                    self._carry_out(stream, message)
                    self._orders_seen = message["seq"]
                    stream.send({"kind": "ack", "seq": self._orders_seen})
            else:
                self._carry_out(stream, message)
        stream.close()

    def _carry_out(self, stream: Stream, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "ack":
                self._outbox.acknowledged(message["seq"])
            case "port":
                stream.send({"kind": "port", "port": free_ports(1)[0]})
            case "launch" if int(message["attempt"]) == self._launched:
                pass  # a repeated order: the launcher runs, but the acknowledgement was lost
            case "launch" if self._last_end and self._last_end[0] == int(message["attempt"]):
                self._report_end()
            case "check":
                self._begin_check(message)
            case "launch":
                self._end_checks()
                self._launched = int(message["attempt"])
                self._passed.clear()
                self._node.send(message)
            case "kill" if self._launched is None:
                self._report_end()
            case "kill" | "end" | "lead":
                self._node.send(message)
            case "pass":
                self._passed.append(message)
                self._pass_on(message)
            case "look":
                looking = asyncio.create_task(self._look(stream, message))
                self._looking.add(looking)
                looking.add_done_callback(self._looking.discard)

    def _pass_on(self, order: Mapping[str, Any], only: Peer | None = None) -> None:
        """Pass a message on to its receivers, or to one of them if `only` is given."""
        if order["only"] is not None:
            meant = Peer(**order["only"])
            if only not in (None, meant):
                return
            only = meant
        self._channel.send(order["message"], to=order["to"], rank=order["rank"], only=only)

    async def _look(self, stream: Stream, message: Mapping[str, Any]) -> None:
        self._channel.send({"kind": "look"}, to="rank")
        pids = {int(rank): int(pid) for rank, pid in message["pids"].items()}
        used = await asyncio.to_thread(activity, pids)
        stream.send({"kind": "looked", "look": message["look"], "used": used})

    def _begin_check(self, order: Mapping[str, Any]) -> None:
        if order["what"] == "end":
            self._end_checks()
            return
        checking = asyncio.create_task(self._check(order))
        self._checking.add(checking)
        checking.add_done_callback(self._checking.discard)

    async def _check(self, order: Mapping[str, Any]) -> None:
        try:
            answer = await self._tester.carry_out(order)
        except Exception as error:  # a node that cannot be tested is not a bad one
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        self._checked = {"kind": "checked", "check": order["check"], "answer": answer}
        self._send(self._checked)

    def _end_checks(self) -> None:
        for checking in self._checking:
            checking.cancel()
        self._checked = None
        self._tester.close()

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(PING_S)
            self._watch.look()
            self._send({"kind": "ping"})

    async def _send_steps(self) -> None:
        while True:
            await asyncio.sleep(SUM_S)
            self._outbox.flush()

    # Ranks and shims

    def _on_message(self, peer: Peer, message: dict[str, Any]) -> None:
        kind, at_s = message["kind"], time.monotonic()
        if kind == "gone":
            self._trust.pop(peer, None)
            self._shims.pop(peer.pid, None)
        elif peer.role == "shim":
            self._shims[peer.pid] = peer
        elif kind != "cut_off":
            why = self._trust.setdefault(peer, Trust()).judge(message, at_s, time.time())
            if why:
                self._channel.cut_off(peer, why)
                return
        if kind == "exited":
            with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
                at_s = min(at_s, float(message["at_monotonic_s"]))
        if kind == "gone" and peer.role == "shim":
            message = {**message, "launcher_lives": self._launcher_lives}
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
            self._note_process(peer, message)  # the ranks run the user's code
        if kind == "step":
            self._last_step_s = at_s
        try:
            size_bytes = len(json.dumps(message))
        except (TypeError, ValueError, RecursionError):
            return  # no valid message
        self._remember(self._outbox.put(peer, message, at_s, size_bytes))
        if kind == "hello" and message["again"] and time.monotonic() < self._began_s + RETURN_S:
            # Send the peer the messages that arrived for it before it connected to this agent.
            for order in self._passed:
                self._pass_on(order, peer)

    def _note_process(self, peer: Peer, message: Mapping[str, Any]) -> None:
        kind, rank = message["kind"], peer.rank
        if peer.role == "rank" and kind == "hello":
            self._note_rank(rank, peer.attempt, is_attached=True, pid=peer.pid)
        elif peer.role == "shim" and kind == "started":
            self._launcher = parent_of(peer.pid)
            attempt = int(message["attempt"])
            self._note_rank(rank, attempt, is_attached=False, pid=int(message["pid"]))
            if attempt > self._attempt:
                self._attempt = attempt
                self._facts = {key: one for key, one in self._facts.items() if self._is_known(one)}
        elif peer.role == "shim" and kind in ("exited", "gone"):
            self._processes.pop(rank, None)

    def _pids(self) -> dict[int, int]:
        return {rank: pid for rank, (_, _, pid) in self._processes.items()}

    def _note_rank(self, rank: int, attempt: int, *, is_attached: bool, pid: int) -> None:
        before = self._processes.get(rank)
        if pid > 0 and (before is None or before[:2] <= (attempt, is_attached)):
            self._processes[rank] = attempt, is_attached, pid

    def _is_known(self, fact: Envelope) -> bool:
        """Return True if a fact belongs to the present attempt.

        This must be checked, since a shim takes part in several attempts.
        """
        peer, message = fact.peer, fact.message
        if peer.role != "shim":
            return peer.attempt == self._attempt
        if message["kind"] == "hello":
            return (peer, "gone") not in self._facts
        return bool(message.get("attempt") == self._attempt)

    def _remember(self, envelope: Envelope) -> None:
        kind = envelope.message["kind"]
        if kind == "event" and envelope.message.get("event") == "restored":
            kind = "restored"
        if kind == "hello" and envelope.peer.role == "rank":
            # The facts about an earlier program of the same rank are obsolete.
            place = "rank", envelope.peer.rank
            self._facts = {
                key: fact
                for key, fact in self._facts.items()
                if (key[0].role, key[0].rank) != place or key[0] == envelope.peer
            }
        if kind in REMEMBERED:
            key = envelope.peer, kind
            if kind != "hello":
                self._facts.pop(key, None)  # move the fact to the end: facts are sent in this order
            self._facts[key] = envelope

    @property
    def _launcher_lives(self) -> bool:
        return self._launcher is not None and process_state(self._launcher) not in (
            None,
            "zombie",
            "dead",
        )

    async def _watch_states(self) -> None:
        while True:
            states = {rank: process_state(pid) for rank, (_, _, pid) in self._processes.items()}
            changed = {rank: state for rank, state in states.items() if self._is_news(rank, state)}
            self._states = states
            if changed:
                self._send({"kind": "states", "states": changed})
            await asyncio.sleep(STATES_S)

    def _is_news(self, rank: int, state: str | None) -> bool:
        before = self._states.get(rank, "running")
        # A healthy process alternates between these states, so a change between them is not
        # reported.
        return state != before and not {state, before} <= {"running", "sleeping", "idle"}


if __name__ == "__main__":
    main()
