"""Keep a worker's connection to the coordinator, in a thread of its own.

Finished requests are numbered and kept until the coordinator has committed them. On each new
connection, the uplink sends them again, with the model that the engine serves and the requests that
it holds. Other messages are dropped while there is no connection.
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable

import msgspec

from holdfast.core.clock import Clock
from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.wire import messages
from holdfast.evaluate.wire.client import NOT_NOW, dial, waits_s

ALIVE_EVERY_S = 1.0
FLUSH_AFTER_S = 0.02
FLUSH_AT = 64  # answers in one `Done`, or more if they come faster than they are sent


class Uplink:
    """Connect a worker to the coordinator.

    Only the worker's main thread may call the public methods.

    Args:
        address: host:port of the coordinator.
        hello: the first message of each connection; its `model` is set here.
        deliver: called in the connection's thread with each message for the worker.
        lives: called in the connection's thread; returns True if `Alive` may be sent.
        held: called in the connection's thread; returns the keys of the engine's open requests.
        clock: measures the coordinator's absence.
        alive_every_s: the seconds between two `Alive` messages.
    """

    def __init__(
        self,
        address: str,
        hello: messages.Hello,
        *,
        deliver: Callable[[messages.Message], None],
        lives: Callable[[], bool],
        held: Callable[[], list[bytes]],
        clock: Clock,
        alive_every_s: float = ALIVE_EVERY_S,
    ) -> None:
        self._address = address
        self._hello = hello
        self._deliver = deliver
        self._lives = lives
        self._held = held
        self._clock = clock
        self._alive_every_s = alive_every_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="uplink", daemon=True)
        self._writer: asyncio.StreamWriter | None = None
        self._gone_since_s: float | None = clock.monotonic_s()
        # (model, answer) pairs that are not in a message yet
        self._finished: deque[tuple[int, messages.DoneRequest]] = deque()
        self._flush_is_due = False
        self._serving: messages.Serving | None = None
        self._number = 0
        self._unacked: deque[messages.Done] = deque()

    def start(self) -> None:
        """Start the thread, which connects to the coordinator."""
        self._thread.start()

    def send(self, message: messages.Message) -> None:
        """Send a message if connected; the last `Serving` is sent again on each new connection."""
        self._loop.call_soon_threadsafe(self._send, message)

    def done(self, model: int, finished: messages.DoneRequest) -> None:
        """Queue a finished request, which is sent with those that finish in the next 20 ms."""
        self._finished.append((model, finished))
        if len(self._finished) == FLUSH_AT:
            self.flush()
        elif not self._flush_is_due:
            self._flush_is_due = True
            self._loop.call_soon_threadsafe(self._loop.call_later, FLUSH_AFTER_S, self._flush)

    def flush(self) -> None:
        """Send the queued finished requests now."""
        if self._finished:
            self._loop.call_soon_threadsafe(self._flush)

    def away_s(self) -> float:
        """Return the seconds for which the coordinator has been unreachable; 0 while connected."""
        gone_since_s = self._gone_since_s
        return 0.0 if gone_since_s is None else self._clock.monotonic_s() - gone_since_s

    def close(self, timeout_s: float) -> list[messages.Done]:
        """Wait up to `timeout_s` for commits while connected, then close the connection.

        Returns:
            The messages that are not acknowledged, whose requests are possibly not committed.
        """
        asyncio.run_coroutine_threadsafe(self._settle(timeout_s), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        return list(self._unacked)

    # Everything below runs in the connection's own thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._dialling = self._loop.create_task(self._stay_connected())
        self._loop.run_forever()
        self._loop.close()

    async def _settle(self, timeout_s: float) -> None:
        self._flush()
        deadline_s = self._loop.time() + timeout_s
        while self._unacked and self._writer is not None and self._loop.time() < deadline_s:
            await asyncio.sleep(0.01)
        writer = self._writer
        self._dialling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._dialling
        if writer is not None:
            # Give the last messages, for instance a failed load, the time to arrive.
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(
                    writer.wait_closed(), max(0.1, deadline_s - self._loop.time())
                )

    async def _stay_connected(self) -> None:
        waits = waits_s()
        while True:
            try:
                reader, writer = await dial(self._address, self._hello)
                waits = waits_s()
                try:
                    await self._converse(reader, writer)
                finally:
                    self._writer, self._gone_since_s = None, self._clock.monotonic_s()
                    writer.close()
            except EvaluationError as error:
                self._deliver(messages.Refused(why=str(error)))
            except NOT_NOW:
                pass
            await asyncio.sleep(next(waits))

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._serving:
            writer.write(messages.encode(self._serving))
        # Before the flush, so that requests that end in between are sent twice instead of never.
        held = self._held()
        self._flush()
        for done in self._unacked:
            writer.write(messages.encode(done))
        if self._serving:
            writer.write(messages.encode(messages.Holding(model=self._serving.model, keys=held)))
        self._writer, self._gone_since_s = writer, None
        living = self._loop.create_task(self._send_alive(writer))
        try:
            while True:
                message = await messages.read(reader)
                if isinstance(message, messages.Acked):
                    while self._unacked and self._unacked[0].number <= message.number:
                        self._unacked.popleft()
                else:
                    self._note(message)
                    self._deliver(message)
        finally:
            living.cancel()

    async def _send_alive(self, writer: asyncio.StreamWriter) -> None:
        while True:
            if self._lives():
                writer.write(messages.encode(messages.Alive()))
            await asyncio.sleep(self._alive_every_s)

    def _note(self, message: messages.Message) -> None:
        """Put the model that is being loaded into the next hello, to prevent a second order."""
        if isinstance(message, messages.Serve):
            self._serving = None
            self._hello = msgspec.structs.replace(self._hello, model=message.model)

    def _send(self, message: messages.Message) -> None:
        if isinstance(message, messages.Serving):
            self._serving = msgspec.structs.replace(message, kept=True, seconds=0.0)
        elif isinstance(message, messages.ServeFailed):
            self._serving = None
            self._hello = msgspec.structs.replace(self._hello, model=-1)
        if self._writer is not None:
            self._writer.write(messages.encode(message))

    def _flush(self) -> None:
        self._flush_is_due = False
        by_model: dict[int, list[messages.DoneRequest]] = {}
        while self._finished:
            model, finished = self._finished.popleft()
            by_model.setdefault(model, []).append(finished)
        for model, finished_ones in by_model.items():
            self._number += 1
            done = messages.Done(
                number=self._number,
                model=model,
                done=finished_ones,
                now_s=self._clock.monotonic_s(),
            )
            self._unacked.append(done)
            if self._writer is not None:
                self._writer.write(messages.encode(done))
