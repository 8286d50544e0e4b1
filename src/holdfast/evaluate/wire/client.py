"""The other end of a connection to the coordinator: it dials, says hello, and dials again when the line is cut."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator

from holdfast.core.channel import notice_loss
from holdfast.core.clock import Clock, SystemClock
from holdfast.core.errors import ChannelError
from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.wire import messages as wire

_BACK_OFF_S = (0.05, 0.5)  # short, since whoever restarts a coordinator does so at once
_CONNECT_TIMEOUT_S = 5.0

NOT_NOW = (OSError, TimeoutError, EOFError, ChannelError)
"""What `dial`, and reading from what it returns, raise where another try may do."""


class Away(EvaluationError):
    """The coordinator did not answer for as long as was agreed."""


def waits_s() -> Iterator[float]:
    """How long to wait before each next try: 0.05 s, doubled up to 0.5 s."""
    wait_s, most_s = _BACK_OFF_S
    while True:
        yield wait_s
        wait_s = min(2 * wait_s, most_s)


async def dial(
    address: str, hello: wire.Hello
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect and be welcomed.

    Raises:
        OSError, TimeoutError, EOFError, ChannelError: not now.
        EvaluationError: the coordinator refuses.
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
            answer.why if isinstance(answer, wire.Refused) else f"{address} is no coordinator."
        )
    return reader, writer


class Line:
    """A connection that outlives the coordinator's restarts.

    Args:
        address: host:port.
        hello: makes the first message; asked anew for each connection, since what it says may change.
        patience_s: how long the coordinator may be away before `messages` raises `Away`.
        clock: injected time.
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
        """Whether what is sent now has somebody to go to."""
        return self._writer is not None and not self._writer.is_closing()

    def send(self, message: wire.Message) -> None:
        """Queue a message; it is lost if the line is cut, and each `Welcome` says that it was."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(wire.encode(message))

    async def messages(self) -> AsyncIterator[wire.Message]:
        """All that the coordinator says. A `Welcome` opens each connection: say again what must not be lost.

        Raises:
            Away: the coordinator was away for too long.
            EvaluationError: it refuses us; the message says why.
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
        """Cut the line; `messages` would dial again."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def address_and_token() -> tuple[str, str]:
    """Where the coordinator is and what it wants to hear, from the environment.

    Raises:
        EvaluationError: they are not there.
    """
    address, token = os.environ.get(wire.ENV_ADDRESS), os.environ.get(wire.ENV_TOKEN)
    if not address or not token:
        raise EvaluationError(
            f"{wire.ENV_ADDRESS} and {wire.ENV_TOKEN} are not set. `holdfast eval run` starts this program."
        )
    return address, token
