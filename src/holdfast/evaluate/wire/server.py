"""Whoever dials in: accepted by token, heard message by message, told without waiting."""

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

_MOST_UNSENT_BYTES = 512 * 1024 * 1024  # to one that does not read; then it is taken for gone

_log = logging.getLogger(__name__)


class Connection:
    """One connection that said hello."""

    def __init__(self, hello: Hello, writer: asyncio.StreamWriter) -> None:
        self.hello = hello
        self._writer = writer

    def send(self, message: Message) -> None:
        """Queue a message; returns at once, and does nothing when the other side is gone."""
        if self._writer.is_closing():
            return
        self._writer.write(encode(message))
        if self._writer.transport.get_write_buffer_size() > _MOST_UNSENT_BYTES:
            _log.warning("%s %s does not read; dropped.", self.hello.role, self.hello.name)
            self._writer.transport.abort()

    def close(self) -> None:
        """Close it when what was queued is sent."""
        self._writer.close()


class Listener(Protocol):
    """What becomes of what peers do. Called from the event loop, never concurrently."""

    def joined(self, peer: Connection) -> None:
        """A peer said hello; one of the same role and name that was there before is gone by now."""
        ...

    def heard(self, peer: Connection, message: Message) -> None:
        """A peer said something."""
        ...

    def gone(self, peer: Connection) -> None:
        """A peer's connection ended."""
        ...

    def broke(self, error: Exception) -> None:
        """One of the above raised: a bug, or a disk that is full."""
        ...


async def listen(host: str, port: int, token: str, listener: Listener) -> asyncio.Server:
    """Accept connections until the server is closed.

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
            if before := peers.pop(name, None):  # its end has not come to us yet
                listener.gone(before)
                before.close()
            peers[name] = peer
            listener.joined(peer)
            while peers.get(name) is peer:
                listener.heard(peer, await read(reader))
                await writer.drain()  # one that asks faster than it reads is heard no further
        except (EOFError, TimeoutError, ConnectionError):
            pass
        except asyncio.CancelledError:
            pass  # the loop ends, and asyncio's own callback (before 3.12) raises for a task that ends so
        except ChannelError as error:
            _log.warning(
                "%s: %s",
                "a stranger" if peer is None else f"{peer.hello.role} {peer.hello.name}",
                error,
            )
        except (
            Exception
        ) as error:  # told to whoever can end the process: its state is not to be trusted any more
            listener.broke(error)
        finally:
            if peer is not None and peers.get((peer.hello.role, peer.hello.name)) is peer:
                del peers[peer.hello.role, peer.hello.name]
                listener.gone(peer)
            writer.close()

    return await asyncio.start_server(attend, host, port, limit=1 << 20)
