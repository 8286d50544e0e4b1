"""The other end of a connection to the coordinator: it dials, says hello, and dials again when the line is cut."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable

from holdfast.core.clock import Clock, SystemClock
from holdfast.core.errors import ChannelError
from holdfast.evaluate.coordinator.wire import ENV_ADDRESS, ENV_TOKEN, Hello, Message, Refused, Welcome, encode, read

FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 0.5
"""Between two attempts: short, since whoever restarts a coordinator does so at once."""


class Away(ChannelError):
    """The coordinator did not answer for as long as was agreed."""


class Line:
    """A connection that outlives the coordinator's restarts.

    Args:
        address: host:port.
        hello: makes the first message; asked anew for each connection, since what it says may change.
        patience_s: how long the coordinator may be away before `messages` raises `Away`.
        clock: injected time.
    """

    def __init__(
        self, address: str, hello: Callable[[], Hello], *, patience_s: float, clock: Clock | None = None
    ) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._hello, self._patience_s, self._clock = hello, patience_s, clock or SystemClock()
        self._writer: asyncio.StreamWriter | None = None

    @property
    def is_connected(self) -> bool:
        """Whether what is sent now has somebody to go to."""
        return self._writer is not None and not self._writer.is_closing()

    def send(self, message: Message) -> None:
        """Queue a message; it is lost if the line is cut, and each `Welcome` says that it was."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode(message))

    async def drain(self) -> None:
        """Wait until what was sent has gone out, or the line is cut."""
        if self._writer is not None:
            try:
                await self._writer.drain()
            except ConnectionError:
                return

    async def messages(self) -> AsyncIterator[Message]:
        """All that the coordinator says. A `Welcome` opens each connection: say again what must not be lost.

        Raises:
            Away: the coordinator was away for too long.
            ChannelError: it refuses us; the message says why.
        """
        try:
            async for message in self._messages():
                yield message
        finally:
            self.close()

    async def _messages(self) -> AsyncIterator[Message]:
        away_since_s, wait_s = self._clock.monotonic_s(), FIRST_WAIT_S
        while True:
            try:
                reader, self._writer = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
                self._writer.write(encode(self._hello()))
                while True:
                    message = await read(reader)
                    if isinstance(message, Refused):
                        raise ChannelError(message.why)
                    if isinstance(message, Welcome):
                        wait_s = FIRST_WAIT_S
                    yield message
                    away_since_s = self._clock.monotonic_s()
            except (OSError, EOFError):
                self.close()
            if self._clock.monotonic_s() - away_since_s > self._patience_s:
                raise Away(f"No coordinator answered at {self._host}:{self._port} for {self._patience_s:.0f} s.")
            await asyncio.sleep(wait_s)
            wait_s = min(LONGEST_WAIT_S, wait_s * 2)

    def close(self) -> None:
        """Cut the line; `messages` would dial again."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def address_and_token() -> tuple[str, str]:
    """Where the coordinator is and what it wants to hear, from the environment.

    Raises:
        ChannelError: they are not there.
    """
    address, token = os.environ.get(ENV_ADDRESS), os.environ.get(ENV_TOKEN)
    if not address or not token:
        raise ChannelError(f"{ENV_ADDRESS} and {ENV_TOKEN} are not set. `holdfast eval run` starts this program.")
    return address, token
