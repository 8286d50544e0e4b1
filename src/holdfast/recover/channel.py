"""The channel between a node's agent and its ranks and shims: one JSON object a frame, over TCP on loopback.

The first frame of a connection must carry the node's token; anything else is closed unread. Every frame is bounded (see
`core.channel`), and nothing that arrives is unpickled or executed. The agent passes on what the supervisor and the
ranks send to each other (`nodes`). If an agent ends, its node starts another one at the same
address; ranks and shims connect again, and repeat the messages that the agent needs.

| from | `kind` | fields |
|---|---|---|
| rank, shim | `hello` | `token`, `again`, and the fields of `Peer`; `role` is "rank" or "shim" |
| shim | `started` | `attempt`, `pid`, `starts_again`: whether it can start the next attempt's trainer |
| shim | `exited` | `attempt`, `pid`, `returncode` (negative: the signal), `at_monotonic_s` |
| shim | `swept` | `attempt`, `log_dropped_bytes`: nothing that its trainer started is left |
| rank | `watch` | : it will report steps, so that its silence means something |
| rank | `sigterm` | : it got that signal, and does not act on it yet |
| rank | `step` | `step`, `step_s`, `at_s`, `loss`, `metrics` |
| rank | `section` | `name`, `open`, `limit_s` |
| rank | `event` | `event`, `data`: for the ledger |
| rank | `vote` | `proposal`, `yes`, `saves`, `step`: of the last save, or null |
| rank | `stopped` | `step` |
| rank | `imported` | : it has written what it has imported, see `shim.imports` |
| rank | `stacks` | `threads`: where each stands, see `stacks` |
| rank | `begun`, `collectives` | `collectives`: the last ones that it has begun, see `detectors.collectives`, or null |
| supervisor | `welcome` | |
| supervisor | `displaced` | : it is cut off, or another process has attached as the rank: it goes on alone |
| supervisor | `terminate` | `attempt`: end by SIGTERM; a shim sends that to its rank |
| supervisor | `kill` | `attempt`: to a shim: send SIGKILL to its rank |
| supervisor | `warm` | : to a shim: import what its rank has imported, for the next start |
| supervisor | `start` | `attempt`, `logs`, `environment`: to a shim: start the next attempt's trainer |
| supervisor | `leave` | : to a shim: end in the way its trainer has ended |
| supervisor | `propose` | `proposal`, `step`: save and stop at the first save of `step` or later |
| supervisor | `decide` | `proposal`, `commit` |
| supervisor | `look` | : answer with `stacks` and `begun` |
| supervisor | `collectives` | : answer with `collectives` |
"""

import asyncio
import contextlib
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from holdfast.core.channel import HungUp, frame, is_token, read_frame, receive_frame
from holdfast.core.errors import ChannelError
from holdfast.core.link import ENV_ATTEMPT

ENV_ADDRESS = "HOLDFAST_CHANNEL"
ENV_TOKEN = "HOLDFAST_TOKEN"
MAX_MESSAGE_BYTES = 64 * 1024
HELLO_TIMEOUT_S = 10.0
RECONNECTS = 30
"""So often a process waits `HELLO_TIMEOUT_S` for the next agent's welcome."""
FIRST_TRIES = 3
RETRY_S = 0.2
MOST_WORLD_SIZE = 1 << 20
BROKEN_FRAMES = 3
"""The limit of a process' connections that end with an invalid frame; then it is cut off."""
OF_THE_CHANNEL = ("hello", "gone", "cut_off")
"""The kinds of messages of the channel itself, which no rank sends after its first message."""
STRANGERS = 256
"""The limit of open connections without a hello; more are closed, to keep descriptors free."""


def encode(message: dict[str, Any]) -> bytes:
    """Return a frame. NaN and infinities become strings, since JSON has none.

    Raises:
        ChannelError: the message is longer than a frame may be.
    """
    body = json.dumps(_finite(message), default=str, allow_nan=False, separators=(",", ":"))
    what = f"A message of kind {message.get('kind')!r}"
    return frame(body.encode(), MAX_MESSAGE_BYTES, what=what)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value


def decode(body: bytes) -> dict[str, Any] | None:
    """Return the object that a frame holds; None if the frame holds no object with a `kind`."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) and isinstance(message.get("kind"), str) else None


@dataclass(frozen=True, kw_only=True)
class Peer:
    """The sender on a connection, from its `hello`."""

    role: str
    attempt: int
    rank: int
    local_rank: int
    world_size: int
    pid: int
    is_attached: bool = False
    """True if the sender's script called `attach`; False if it only made a Checkpointer."""

    @classmethod
    def of_this_process(cls, role: str) -> Self:
        """Return this process's place in the job, from the launchers' environment variables."""
        return cls(
            role=role,
            attempt=int(os.environ.get(ENV_ATTEMPT, "0")),
            rank=int(os.environ.get("RANK", "0")),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            pid=os.getpid(),
        )


OnMessage = Callable[[Peer, dict[str, Any]], None]


class ChannelServer:
    """The agent's end of the channel.

    Call all methods in one event loop, in which `on_message` is called, too.

    A `hello`, the end of a connection (`kind` "gone") and a peer that is cut off (`cut_off`, with
    `why`) are passed on like any message.
    """

    def __init__(
        self,
        on_message: OnMessage,
        *,
        token: str,
        suspect: Callable[[Peer], str] = lambda _peer: "",
    ) -> None:
        """Start without connections.

        Args:
            on_message: receives the messages.
            token: the token of the node.
            suspect: returns why a rank that connects must not be admitted; empty if it may.
        """
        self._on_message = on_message
        self._suspect = suspect
        self._broken_frames: dict[tuple[str, int, int, int], int] = {}
        self._cut_off: set[tuple[str, int, int, int]] = set()
        self._writers: dict[Peer, asyncio.StreamWriter] = {}
        self._watched: set[Peer] = set()
        self._strangers = 0
        self._server: asyncio.Server | None = None
        self._token = token

    async def start(self, listening: socket.socket) -> None:
        """Serve the connections to a listening socket."""
        self._server = await asyncio.start_server(
            self._serve, sock=listening, limit=MAX_MESSAGE_BYTES
        )

    def send(
        self,
        message: dict[str, Any],
        *,
        to: str | None = None,
        rank: int | None = None,
        only: Peer | None = None,
    ) -> int:
        """Send to all peers with the role `to`, to those of one `rank`, or to the peer `only`.

        Returns:
            The number of peers.
        """
        encoded = encode(message)
        writers = [
            writer
            for peer, writer in self._writers.items()
            if to in (None, peer.role)
            and rank in (None, peer.rank)
            and only in (None, peer)
            and not writer.is_closing()
        ]
        for writer in writers:
            writer.write(encoded)
        return len(writers)

    def cut_off(self, peer: Peer, why: str) -> None:
        """Ignore all further messages of a peer's process, which goes on without a supervisor.

        Args:
            peer: the peer.
            why: the reason, as the end of a sentence whose subject is the rank.
        """
        self._cut_off.add(_process_of(peer))
        writer = self._writers.pop(peer, None)
        if writer is not None:
            writer.write(encode({"kind": "displaced"}))
            writer.close()
        self._on_message(peer, {"kind": "cut_off", "why": why})
        self._on_message(peer, {"kind": "gone"})

    def _broke_a_frame(self, peer: Peer) -> None:
        process = _process_of(peer)
        count = self._broken_frames[process] = self._broken_frames.get(process, 0) + 1
        if peer.role == "rank" and count >= BROKEN_FRAMES:
            self.cut_off(peer, "it sends what is no message")

    async def close(self) -> None:
        """Stop listening and hang up on everyone."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers.values()):
            writer.close()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer: Peer | None = None
        try:
            peer, again = await self._greet(reader)
            if peer is None:
                return
            if (former := self._writers.get(peer)) is not None:
                former.close()  # the same process, which has connected once more
            self._writers[peer] = writer
            writer.write(encode({"kind": "welcome"}))
            self._on_message(peer, {"kind": "hello", "again": again})
            while True:
                message = decode(await read_frame(reader, MAX_MESSAGE_BYTES))
                if self._writers.get(peer) is not writer:
                    return
                if message is None or message["kind"] in OF_THE_CHANNEL:
                    self._broke_a_frame(peer)
                    return
                if message["kind"] == "watch":
                    self._watched.add(peer)
                self._on_message(peer, message)
        except OSError:
            return  # cut, or silent
        except ChannelError:  # a frame over the bound
            if peer is not None and self._writers.get(peer) is writer:
                self._broke_a_frame(peer)
        finally:
            if peer is not None and self._writers.get(peer) is writer:
                del self._writers[peer]
                self._on_message(peer, {"kind": "gone"})
            writer.close()

    async def _greet(self, reader: asyncio.StreamReader) -> tuple[Peer | None, bool]:
        """Return the sender (None for strangers), and True if it was connected before."""
        if self._strangers >= STRANGERS:
            return None, False
        self._strangers += 1
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                return self._admit(await read_frame(reader, MAX_MESSAGE_BYTES))
        finally:
            self._strangers -= 1

    def _admit(self, body: bytes) -> tuple[Peer | None, bool]:
        hello = decode(body)
        if hello is None or hello["kind"] != "hello":
            return None, False
        return self._peer(hello), hello.get("again") is True

    def _peer(self, hello: dict[str, Any]) -> Peer | None:
        if not is_token(str(hello.get("token", "")).encode(), self._token.encode()):
            return None
        try:
            peer = Peer(
                role=str(hello["role"]),
                attempt=int(hello["attempt"]),
                rank=int(hello["rank"]),
                local_rank=int(hello["local_rank"]),
                world_size=int(hello["world_size"]),
                pid=int(hello["pid"]),
                is_attached=hello.get("is_attached") is True,
            )
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
        is_possible = peer.pid > 0 and 0 <= peer.rank < peer.world_size <= MOST_WORLD_SIZE
        if not is_possible or _process_of(peer) in self._cut_off:
            return None
        if why := self._suspect(peer) if peer.role == "rank" else "":
            self._cut_off.add(_process_of(peer))
            self._on_message(peer, {"kind": "cut_off", "why": why})
            return None
        place = (peer.role, peer.attempt, peer.rank)
        holder = next(
            (other for other in self._writers if (other.role, other.attempt, other.rank) == place),
            None,
        )
        if holder is None or (holder == peer and hello.get("again") is True):
            return peer
        if not peer.is_attached or holder.is_attached or holder in self._watched:
            return None
        # A program that a rank started before attaching, such as an evaluation, may have connected
        # instead of the rank.
        writer = self._writers.pop(holder)
        writer.write(encode({"kind": "displaced"}))
        writer.close()
        return peer


def _process_of(peer: Peer) -> tuple[str, int, int, int]:
    return peer.role, peer.attempt, peer.rank, peer.pid


class ChannelClient:
    """A rank's or shim's end: a blocking socket."""

    def __init__(
        self, address: str, token: str, peer: Peer, *, timeout_s: float = HELLO_TIMEOUT_S
    ) -> None:
        """Connect and be admitted.

        Raises:
            ChannelError: no agent listens there, or the agent did not admit this process.
        """
        self._address = address
        self._token = token
        self._peer = peer
        self._timeout_s = timeout_s
        self._sending = threading.Condition()
        self._is_connected = True
        self._is_lost = False
        for _ in range(FIRST_TRIES):  # the agent may be gone just then
            try:
                self._socket = self._connect()
            except (OSError, ValueError) as error:
                raise ChannelError(f"No agent answers at {address}: {error}.") from error
            if self._greet(self._socket, again=False):
                self._socket.settimeout(None)
                return
            self.close()
            time.sleep(RETRY_S)
        raise ChannelError(
            f"The agent at {address} did not admit {peer.role} {peer.rank}: wrong token or already there."
        )

    def _connect(self) -> socket.socket:
        host, _, port = self._address.rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout=self._timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _greet(self, connection: socket.socket, *, again: bool) -> bool:
        hello = {"kind": "hello", "token": self._token, "again": again, **vars(self._peer)}
        try:
            connection.sendall(encode(hello))
            return decode(receive_frame(connection, MAX_MESSAGE_BYTES)) is not None
        except (OSError, ChannelError):
            return False

    def reconnect(self, repeated: Callable[[], Sequence[dict[str, Any]]]) -> bool:
        """Connect to the next agent, after `receive` returned None; return False if there will be none.

        The node holds the listening socket: while the node lives, a connection waits there for the next agent.

        Args:
            repeated: returns the messages to send first on the new connection.
        """
        with self._sending:
            self._is_connected = False
            self.close()
        for _ in range(RECONNECTS):
            try:
                connection = self._connect()
            except OSError:
                break
            if self._greet(connection, again=True):
                connection.settimeout(None)
                with self._sending, contextlib.suppress(OSError):  # it may be gone again
                    self._socket, self._is_connected = connection, True
                    for message in repeated():
                        connection.sendall(encode(message))
                    self._sending.notify_all()
                return True
            connection.close()
            time.sleep(RETRY_S)
        with self._sending:
            self._is_lost = True
            self._sending.notify_all()
        return False

    def wait_until_connected(self) -> bool:
        """Wait for the next agent, after `send` has failed; return False if there will be none."""
        with self._sending:
            self._sending.wait_for(lambda: self._is_connected or self._is_lost)
            return self._is_connected

    def send(self, message: dict[str, Any]) -> None:
        """Send one message; any thread may.

        Raises:
            OSError: the connection is gone.
        """
        encoded = encode(message)
        with self._sending:
            if not self._is_connected:
                raise HungUp
            try:
                self._socket.sendall(encoded)
            except OSError:
                self._is_connected = False
                raise

    def give_up(self) -> None:
        """Stop sending, and do not wait for another agent."""
        with self._sending:
            self._is_connected, self._is_lost = False, True
            self._sending.notify_all()

    def receive(self) -> dict[str, Any] | None:
        """Wait for the next message; None when the agent is gone."""
        try:
            return decode(receive_frame(self._socket, MAX_MESSAGE_BYTES))
        except (OSError, ChannelError):
            return None

    def close(self) -> None:
        """Hang up."""
        self._socket.close()
