"""Connect a harness to the coordinator: send samples, and receive answers in any order.

If the coordinator restarts, the client reconnects and submits all samples without answers again.
The answers of the other samples are in the coordinator's journal, so the client stores none.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

from holdfast.core.clock import Clock, SystemClock
from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.types.harness import AnsweredSample, ModelFacts, SampleRequests
from holdfast.evaluate.types.requests import keyed
from holdfast.evaluate.wire import messages
from holdfast.evaluate.wire.client import NOT_NOW, dial, waits_s

SUBMIT_BYTES = 4 * 1024 * 1024
"""The approximate size of a message.

Frames must not exceed a maximum size. Small messages also let engines start on the first requests
early.
"""


class WireClient:
    """Implement `EngineClient` over a connection to the coordinator.

    Samples that are open at the same time must have different numbers.

    Args:
        address: host:port of the coordinator.
        token: the evaluation's token.
        node: the number of this node.
        task: the number of the task within its suite.
        facts: the facts of the model.
        asked: called once, when the first samples have been sent.
        patience_s: the seconds for which the coordinator may be unreachable.
        clock: measures the patience.
    """

    def __init__(
        self,
        address: str,
        token: str,
        *,
        node: int,
        task: int,
        facts: ModelFacts,
        asked: Callable[[], None] = lambda: None,
        patience_s: float = 120.0,
        clock: Clock | None = None,
    ) -> None:
        self.facts = facts
        self._address, self._asked, self._patience_s = address, asked, patience_s
        self._clock: Clock = clock or SystemClock()
        self._hello = messages.Hello(
            token=token,
            role="client",
            name=f"{facts.model}.{task}@{node}",  # two nodes may run the same task for a while
            node=node,
            pid=os.getpid(),
            model=facts.model,
            task=task,
        )
        self._line: _Line | None = None

    def ask(self, samples: Sequence[SampleRequests]) -> list[AnsweredSample]:
        """See `EngineClient.ask`; must not be called from an event loop."""

        async def ask() -> list[AnsweredSample]:
            line = self._new_line()
            try:
                return await line.ask(samples)
            finally:
                await line.close()

        return asyncio.run(ask())

    async def ask_one(self, sample: SampleRequests) -> AnsweredSample:
        """See `EngineClient.ask_one`; all calls must come from the same event loop."""
        if self._line is None:
            self._line = self._new_line()
        (answered,) = await self._line.ask([sample])
        return answered

    def _new_line(self) -> "_Line":
        return _Line(self._address, self._hello, self._asked, self._patience_s, self._clock)


class _Line:
    """The connection of one event loop; reconnects while samples are open."""

    def __init__(
        self,
        address: str,
        hello: messages.Hello,
        asked: Callable[[], None],
        patience_s: float,
        clock: Clock,
    ) -> None:
        self._address, self._hello, self._asked = address, hello, asked
        self._patience_s, self._clock = patience_s, clock
        self._open: dict[int, tuple[messages.KeyedSample, asyncio.Future[AnsweredSample]]] = {}
        self._unsent: list[messages.KeyedSample] = []
        self._has_unsent = asyncio.Event()
        self._was_called = False
        self._task = asyncio.create_task(self._stay_connected())

    async def ask(self, samples: Sequence[SampleRequests]) -> list[AnsweredSample]:
        futures = []
        for sample in samples:
            if sample.sample in self._open:
                raise EvaluationError(
                    f"Sample {sample.sample} was requested again while it is being answered."
                )
            given = messages.KeyedSample(
                sample=sample.sample,
                requests=[keyed(request) for request in sample.requests],
                metric_key=sample.metric_key,
            )
            if _size_bytes(given) > messages.MAX_FRAME_BYTES - SUBMIT_BYTES:
                raise EvaluationError(
                    f"Sample {sample.sample} has {_size_bytes(given)} bytes: more than can be sent."
                )
            future: asyncio.Future[AnsweredSample] = asyncio.get_running_loop().create_future()
            self._open[sample.sample] = given, future
            self._unsent.append(given)
            futures.append(future)
        self._has_unsent.set()
        return await _all(futures, self._task)

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, EvaluationError):  # raised in `ask`
            await self._task

    async def _stay_connected(self) -> None:
        waits, gone_since_s = waits_s(), self._clock.monotonic_s()
        while True:
            with contextlib.suppress(*NOT_NOW):
                reader, writer = await dial(self._address, self._hello)
                waits = waits_s()
                try:
                    await self._converse(reader, writer)
                finally:
                    writer.close()
                    gone_since_s = self._clock.monotonic_s()
            away_s = self._clock.monotonic_s() - gone_since_s
            if away_s > self._patience_s:
                raise EvaluationError(
                    f"The coordinator at {self._address} was unreachable for {away_s:.0f} s. "
                    "Answers are kept: continue with `holdfast eval resume`."
                )
            await asyncio.sleep(next(waits))

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._unsent = [given for given, _future in self._open.values()]
        self._has_unsent.set()
        both = (
            asyncio.create_task(self._receive(reader)),
            asyncio.create_task(self._send_samples(writer)),
        )
        try:
            ended, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()  # raises: both tasks end only with an error
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        while True:
            match await messages.read(reader):
                case messages.Answers(samples=samples):
                    for sample in samples:
                        _given, future = self._open.pop(sample.sample, (None, None))
                        if future is not None and not future.done():
                            future.set_result(sample)
                case messages.Refused(why=why):
                    raise EvaluationError(why)
                case messages.Stop():
                    raise EvaluationError("The evaluation ended before this task.")
                case _:
                    pass

    async def _send_samples(self, writer: asyncio.StreamWriter) -> None:
        while True:
            await self._has_unsent.wait()
            self._has_unsent.clear()
            unsent, self._unsent = self._unsent, []
            for samples in _in_parts(unsent):
                writer.write(messages.encode(messages.Submit(samples=samples)))
                await writer.drain()
            if not self._was_called:
                self._was_called = True
                self._asked()


async def _all(
    futures: Iterable["asyncio.Future[AnsweredSample]"], line: "asyncio.Task[None]"
) -> list[AnsweredSample]:
    """Return all results, or raise the connection's error if the connection ends first."""
    waited = asyncio.gather(*futures)
    await asyncio.wait((waited, line), return_when=asyncio.FIRST_COMPLETED)
    if not waited.done():
        waited.cancel()
        line.result()  # raises the connection's error
    return list(await waited)


def _in_parts(samples: Iterable[messages.KeyedSample]) -> Iterator[list[messages.KeyedSample]]:
    part: list[messages.KeyedSample] = []
    size_bytes = 0
    for sample in samples:
        part.append(sample)
        size_bytes += _size_bytes(sample)
        if size_bytes >= SUBMIT_BYTES:
            yield part
            part, size_bytes = [], 0
    if part:
        yield part


def _size_bytes(sample: messages.KeyedSample) -> int:
    return sum(len(request.body) for request in sample.requests)
