"""Connect a node's agent with its ranks and shims: JSON objects over TCP on loopback.

A frame carries one JSON object. The first frame of a connection must contain the node's token;
otherwise, the connection is closed. The size of frames is limited (see `core.channel`), and no
received message is unpickled or executed. The agent forwards the messages between the supervisor
and the ranks (`nodes`). If an agent ends, its node starts another one at the same address; ranks
and shims connect again, and repeat the messages that the new agent needs.

| from | `kind` | fields |
|---|---|---|
| rank, shim | `hello` | `token`, `again`, and the fields of `Peer`; `role` is "rank" or "shim" |
| shim | `started` | `attempt`, `pid`; `starts_again`: True if the shim can start the next attempt's trainer |
| shim | `exited` | `attempt`, `pid`, `returncode` (negative: the signal), `at_monotonic_s` |
| shim | `swept` | `attempt`, `log_dropped_bytes`; the message means that no process of the trainer is left |
| rank | `watch` | the rank will report steps, so that its silence has a meaning |
| rank | `sigterm` | the rank has received SIGTERM, and does not act on the signal yet |
| rank | `step` | `step`, `step_s`, `at_s`, `loss`, `metrics` |
| rank | `section` | `name`, `open`, `limit_s` |
| rank | `event` | `event`, `data`: an event for the ledger |
| rank | `vote` | `proposal`, `yes`, `saves`; `step`: the step of the last save, or null |
| rank | `stopped` | `step` |
| rank | `imported` | the rank has written the list of its imported modules, see `shim.imports` |
| rank | `stacks` | `threads`: the stacks of the threads, see `stacks` |
| rank | `begun`, `collectives` | `collectives`: the last collectives begun, or null |
| supervisor | `welcome` | |
| supervisor | `displaced` | another process is the rank, or the receiver is cut off; it continues unsupervised |
| supervisor | `terminate` | `attempt`: end by SIGTERM; a shim sends SIGTERM to its rank |
| supervisor | `kill` | `attempt`; to a shim: send SIGKILL to the rank |
| supervisor | `warm` | to a shim: import the modules that the rank has imported, for the next start |
| supervisor | `start` | `attempt`, `logs`, `environment`; to a shim: start the next attempt's trainer |
| supervisor | `leave` | to a shim: end in the same way as the trainer |
| supervisor | `propose` | `proposal`, `step`: save and stop at the first save of `step` or later |
| supervisor | `decide` | `proposal`, `commit` |
| supervisor | `look` | answer with `stacks` and `begun` |
| supervisor | `collectives` | answer with `collectives` |
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
"""The number of times that a process waits `HELLO_TIMEOUT_S` for the welcome of the next agent."""
FIRST_TRIES = 3
RETRY_S = 0.2
MAX_WORLD_SIZE = 1 << 20
BROKEN_FRAMES = 3
"""A process is cut off after this number of connections that ended with an invalid frame."""
OF_THE_CHANNEL = ("hello", "gone", "cut_off")
"""The kinds of messages that only the channel itself uses. A rank must not send them after its
first message.
"""
STRANGERS = 256
"""The largest number of open connections without a hello. Further connections are closed, so that
file descriptors remain free.
"""


def encode(message: dict[str, Any]) -> bytes:
    """Encode a message as a frame. NaN and infinities become strings, since JSON has none.

    Raises:
        ChannelError: the message does not fit into a frame.
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
    """Decode a frame; return None if it does not contain an object with a `kind`."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) and isinstance(message.get("kind"), str) else None


@dataclass(frozen=True, kw_only=True)
class Peer:
    """The process at the other end of a connection, as its `hello` describes it."""

    role: str
    attempt: int
    rank: int
    local_rank: int
    world_size: int
    pid: int
    is_attached: bool = False
    """True if the script of the process called `attach`; False if it only made a Checkpointer."""

    @classmethod
    def of_this_process(cls, role: str) -> Self:
        """Return the description of this process, from the environment variables of the launchers."""
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

    Call all methods from one event loop, in which `on_message` is also called.

    `on_message` also receives each `hello`, a message of the kind `gone` at the end of a
    connection, and a message of the kind `cut_off`, with the reason `why`, if a peer is cut off.
    """

    def __init__(
        self,
        on_message: OnMessage,
        *,
        token: str,
        suspect: Callable[[Peer], str] = lambda _peer: "",
    ) -> None:
        """Store what the server needs; `start` serves connections.

        Args:
            on_message: a function that receives the messages.
            token: the token of the node.
            suspect: a function that returns why a connecting rank must be refused; an empty text to
                admit the rank.
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
        """Start to serve connections to a listening socket."""
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
        """Send to all peers with the role `to`, to those of one `rank`, or only to the peer `only`.

        Returns:
            The number of peers to which the message was sent.
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
        """Ignore all further messages of a peer's process, which continues without a supervisor.

        Args:
            peer: the peer to cut off.
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
            self.cut_off(peer, "it sends invalid data")

    async def close(self) -> None:
        """Stop listening, and close all connections."""
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
                former.close()  # the same process has connected again
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
            return  # the connection was cut, or the peer is silent
        except ChannelError:  # a frame that is too large
            if peer is not None and self._writers.get(peer) is writer:
                self._broke_a_frame(peer)
        finally:
            if peer is not None and self._writers.get(peer) is writer:
                del self._writers[peer]
                self._on_message(peer, {"kind": "gone"})
            writer.close()

    async def _greet(self, reader: asyncio.StreamReader) -> tuple[Peer | None, bool]:
        """Read the first message of a connection.

        Returns:
            The peer, or None if the message has no valid token; and True if the peer was connected
            before.
        """
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
        is_possible = peer.pid > 0 and 0 <= peer.rank < peer.world_size <= MAX_WORLD_SIZE
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
        # Before this rank attached, a program that the rank had started, such as an evaluation, may
        # have connected in the rank's place.
        writer = self._writers.pop(holder)
        writer.write(encode({"kind": "displaced"}))
        writer.close()
        return peer


def _process_of(peer: Peer) -> tuple[str, int, int, int]:
    return peer.role, peer.attempt, peer.rank, peer.pid


class ChannelClient:
    """The end of the channel in a rank or shim: a blocking socket."""

    def __init__(
        self, address: str, token: str, peer: Peer, *, timeout_s: float = HELLO_TIMEOUT_S
    ) -> None:
        """Connect to the agent, and wait for its welcome.

        Raises:
            ChannelError: no agent listens on the address, or the agent did not admit this process.
        """
        self._address = address
        self._token = token
        self._peer = peer
        self._timeout_s = timeout_s
        self._sending = threading.Condition()
        self._is_connected = True
        self._is_lost = False
        for _ in range(FIRST_TRIES):  # the agent may have gone meanwhile
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
            f"The agent at {address} refused {peer.role} {peer.rank}: wrong token, or already connected."
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
        """Connect to the next agent; return False if there will be no further agent.

        Call this method after `receive` returned None. The node's process holds the listening
        socket, so while the node lives, a connection waits until the next agent accepts it.

        Args:
            repeated: a function that returns the messages to send first on the new connection.
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
                with self._sending, contextlib.suppress(OSError):  # the next agent may be gone, too
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
        """Wait for the next agent after `send` has failed; return False if there will be none."""
        with self._sending:
            self._sending.wait_for(lambda: self._is_connected or self._is_lost)
            return self._is_connected

    def send(self, message: dict[str, Any]) -> None:
        """Send one message. Any thread may call this method.

        Raises:
            OSError: the connection has ended.
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
        """Stop sending, and do not wait for a further agent."""
        with self._sending:
            self._is_connected, self._is_lost = False, True
            self._sending.notify_all()

    def receive(self) -> dict[str, Any] | None:
        """Wait for the next message; return None if the agent is gone."""
        try:
            return decode(receive_frame(self._socket, MAX_MESSAGE_BYTES))
        except (OSError, ChannelError):
            return None

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
