"""Accept peers that have the token, receive their messages, and queue messages to them."""

import asyncio
import logging
from typing import Protocol

from holdfast.core.channel import is_token, notice_loss
from holdfast.core.errors import ChannelError
from holdfast.evaluate.wire.messages import (
    HELLO_TIMEOUT_S,
    Hello,
    Message,
    Refused,
    encode,
    read,
)

_MAX_UNSENT_BYTES = 512 * 1024 * 1024  # a peer that does not read is dropped beyond this size

_log = logging.getLogger(__name__)


class Connection:
    """The connection of one peer that has sent its hello."""

    def __init__(self, hello: Hello, writer: asyncio.StreamWriter) -> None:
        self.hello = hello
        self._writer = writer

    def send(self, message: Message) -> None:
        """Queue a message and return at once; does nothing if the peer is gone."""
        if self._writer.is_closing():
            return
        self._writer.write(encode(message))
        if self._writer.transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            _log.warning(
                "%s %s does not read its messages; disconnected.", self.hello.role, self.hello.name
            )
            self._writer.transport.abort()

    def close(self) -> None:
        """Close the connection after the queued messages are sent."""
        self._writer.close()


class Listener(Protocol):
    """Handle the events of connections; called from the event loop, never concurrently."""

    def joined(self, peer: Connection) -> None:
        """Handle a new peer; an earlier peer of the same role and name is already gone."""
        ...

    def on_message(self, peer: Connection, message: Message) -> None:
        """Handle a message of a peer."""
        ...

    def gone(self, peer: Connection) -> None:
        """Handle the loss of a peer's connection."""
        ...

    def broke(self, error: Exception) -> None:
        """Handle an exception that one of the other methods raised: a bug, or a full disk."""
        ...


async def listen(host: str, port: int, token: str, listener: Listener) -> asyncio.Server:
    """Start a server that accepts peers and calls the listener; return the server.

    Raises:
        OSError: the port is taken.
    """
    peers: dict[tuple[str, str], Connection] = {}

    async def attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer: Connection | None = None
        notice_loss(writer.get_extra_info("socket"))
        try:
            hello = await asyncio.wait_for(read(reader), HELLO_TIMEOUT_S)
            if not isinstance(hello, Hello) or not is_token(hello.token.encode(), token.encode()):
                writer.write(encode(Refused(why="The token is not this evaluation's.")))
                return
            peer = Connection(hello, writer)
            name = (hello.role, hello.name)
            if before := peers.pop(name, None):  # the earlier connection's end was not noticed yet
                listener.gone(before)
                before.close()
            peers[name] = peer
            listener.joined(peer)
            while peers.get(name) is peer:
                listener.on_message(peer, await read(reader))
                await writer.drain()  # a peer that sends faster than it reads is not read further
        except (EOFError, TimeoutError, ConnectionError):
            pass
        except asyncio.CancelledError:
            pass  # the loop ends, and asyncio (before 3.12) raises for such a task
        except ChannelError as error:
            _log.warning(
                "%s: %s",
                "a stranger" if peer is None else f"{peer.hello.role} {peer.hello.name}",
                error,
            )
        except Exception as error:
            # The listener ends the process, since the state is not reliable any more.
            listener.broke(error)
        finally:
            if peer is not None and peers.get((peer.hello.role, peer.hello.name)) is peer:
                del peers[peer.hello.role, peer.hello.name]
                listener.gone(peer)
            writer.close()

    return await asyncio.start_server(attend, host, port, limit=1 << 20)
