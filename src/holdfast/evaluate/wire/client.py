"""Connect to the coordinator: dial, send the hello, and redial after a cut."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator

from holdfast.core.channel import notice_loss
from holdfast.core.clock import Clock, SystemClock
from holdfast.core.errors import ChannelError
from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.wire import messages as wire

_BACK_OFF_S = (0.05, 0.5)  # short, since a coordinator is restarted at once
_CONNECT_TIMEOUT_S = 5.0

NOT_NOW = (OSError, TimeoutError, EOFError, ChannelError)
"""Errors of `dial`, and of the connection's reader, after which another attempt may succeed."""


class Away(EvaluationError):
    """The coordinator was unreachable for longer than the permitted time."""


def waits_s() -> Iterator[float]:
    """Yield the seconds to wait before each further attempt: 0.05, doubled up to 0.5."""
    wait_s, most_s = _BACK_OFF_S
    while True:
        yield wait_s
        wait_s = min(2 * wait_s, most_s)


async def dial(
    address: str, hello: wire.Hello
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the coordinator, send the hello, and wait for the welcome.

    Raises:
        OSError, TimeoutError, EOFError, ChannelError: the attempt failed; another may succeed.
        EvaluationError: the coordinator refuses this peer.
    """
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(_CONNECT_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
    try:
        notice_loss(writer.get_extra_info("socket"))
        writer.write(wire.encode(hello))
        async with asyncio.timeout(wire.HELLO_TIMEOUT_S):
            answer = await wire.read(reader)
    except BaseException:
        writer.close()
        raise
    if not isinstance(answer, wire.Welcome):
        writer.close()
        raise EvaluationError(
            answer.why
            if isinstance(answer, wire.Refused)
            else f"{address} is not the address of a coordinator."
        )
    return reader, writer


class Line:
    """Keep a connection to the coordinator, and reconnect when the coordinator restarts.

    Args:
        address: host:port of the coordinator.
        hello: returns the first message of each connection.
        patience_s: seconds after which `messages` raises `Away` if the coordinator cannot be
            reached.
        clock: measures the patience.
    """

    def __init__(
        self,
        address: str,
        hello: Callable[[], wire.Hello],
        *,
        patience_s: float,
        clock: Clock | None = None,
    ) -> None:
        self._address, self._hello, self._patience_s = address, hello, patience_s
        self._clock = clock or SystemClock()
        self._writer: asyncio.StreamWriter | None = None

    @property
    def is_connected(self) -> bool:
        """Return True if there is a connection, so that a message can be sent now."""
        return self._writer is not None and not self._writer.is_closing()

    def send(self, message: wire.Message) -> None:
        """Queue a message, which is lost if the connection breaks.

        The caller notices a broken connection by the `Welcome` that begins the next connection.
        """
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(wire.encode(message))

    async def messages(self) -> AsyncIterator[wire.Message]:
        """Yield the coordinator's messages; the first message of each connection is a `Welcome`.

        After a `Welcome`, the caller must repeat the messages that must not be lost.

        Raises:
            Away: the coordinator could not be reached for `patience_s`.
            EvaluationError: the coordinator refuses this peer; the error's text is the reason.
        """
        try:
            async for message in self._messages():
                yield message
        finally:
            self.close()

    async def _messages(self) -> AsyncIterator[wire.Message]:
        away_since_s, waits = self._clock.monotonic_s(), waits_s()
        while True:
            try:
                reader, self._writer = await dial(self._address, self._hello())
                waits = waits_s()
                yield wire.Welcome()
                while True:
                    message = await wire.read(reader)
                    if isinstance(message, wire.Refused):
                        raise EvaluationError(message.why)
                    yield message
            except NOT_NOW:
                if self._writer is not None:
                    away_since_s = self._clock.monotonic_s()
                self.close()
            if self._clock.monotonic_s() - away_since_s > self._patience_s:
                raise Away(
                    f"No coordinator answered at {self._address} for {self._patience_s:.0f} s."
                )
            await asyncio.sleep(next(waits))

    def close(self) -> None:
        """Close the connection; a further call of `messages` would connect again."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def address_and_token() -> tuple[str, str]:
    """Read the coordinator's address and token from the environment.

    Raises:
        EvaluationError: the variables are not set.
    """
    address, token = os.environ.get(wire.ENV_ADDRESS), os.environ.get(wire.ENV_TOKEN)
    if not address or not token:
        raise EvaluationError(
            f"{wire.ENV_ADDRESS} and {wire.ENV_TOKEN} are not set. `holdfast eval run` starts this "
            "program."
        )
    return address, token
