"""Provide a coordinator for the harness host, with answers in random order and pieces."""

import asyncio
import random
from collections import deque

from holdfast.evaluate.types.harness import AnsweredSample
from holdfast.evaluate.types.requests import decode_answer, decode_request, encode_answer
from holdfast.evaluate.wire import messages

TOKEN = "a token"


class FakeCoordinator:
    """Run in the test's event loop; `answer` answers a request; `entries` are the suite's."""

    def __init__(
        self, answer, entries, facts, folder, *, include_paths=(), seed=0, confirm_unsafe_code=False
    ) -> None:
        self._answer, self.entries, self.facts, self.folder = answer, entries, facts, folder
        self._include_paths, self._confirm = list(include_paths), confirm_unsafe_code
        self._order = random.Random(seed)
        self.ended: dict[int, messages.TaskEnded] = {}
        self.prepared: asyncio.Queue[messages.Prepared] = asyncio.Queue()
        self.measured: list[messages.SampleMeasured] = []
        self.asked_of: dict[int, int] = {}
        self.submits: dict[int, int] = {}
        self.answers: dict[bytes, bytes] = {}
        self._metrics: dict[bytes, bytes] = {}
        self._open: dict[int, dict[int, messages.KeyedSample]] = {}
        self._clients: dict[int, asyncio.StreamWriter] = {}
        self._measuring: dict[bytes, tuple[int, int]] = {}
        self._writers: set[asyncio.StreamWriter] = set()
        self._ready: deque[tuple[int, messages.KeyedSample]] = deque()
        self._changed = asyncio.Condition()
        self.host: asyncio.StreamWriter | None = None
        self.hellos: list[messages.Hello] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.port = 0

    async def __aenter__(self) -> "FakeCoordinator":
        await self.listen()
        self._answering = asyncio.create_task(self._answer_all())
        return self

    async def __aexit__(self, *_) -> None:
        if self.host is not None:
            self.host.write(messages.encode(messages.Stop()))
            await self.until(lambda: self.host is None)
        self._answering.cancel()
        await self.hang_up()

    async def listen(self) -> None:
        self._server = await asyncio.start_server(
            self._attend, "127.0.0.1", self.port, limit=1 << 20
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def hang_up(self) -> None:
        """Act like a killed coordinator: cut every connection and stop listening."""
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await self._server.wait_closed()

    def forget(self) -> None:
        """Act like a restarted coordinator."""
        self._open, self._clients, self.asked_of = {}, {}, {}
        self._ready.clear()
        self.hellos.clear()
        self.ended.clear()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def until(self, predicate) -> None:
        async with self._changed:
            await self._changed.wait_for(predicate)

    def run(self, task: int) -> None:
        job = messages.RunTask(
            task=task, entry=self.entries[task], facts=self.facts, folder=str(self.folder)
        )
        self.host.write(messages.encode(job))

    async def _attend(self, reader, writer) -> None:
        self._writers.add(writer)
        try:
            hello = await messages.read(reader)
            assert hello.token == TOKEN
            self.hellos.append(hello)
            writer.write(messages.encode(messages.Welcome()))
            if hello.role == "host":
                self.host = writer
                writer.write(
                    messages.encode(
                        messages.Prepare(
                            entries=self.entries,
                            include_paths=self._include_paths,
                            confirm_unsafe_code=self._confirm,
                            folder=str(self.folder),
                        )
                    )
                )
            else:
                self._clients[hello.task] = writer
            while True:
                await self._heard(hello, await messages.read(reader))
                async with self._changed:
                    self._changed.notify_all()
        except EOFError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()
            if writer is self.host:
                self.host = None
                async with self._changed:
                    self._changed.notify_all()

    async def _heard(self, hello, message) -> None:
        match message:
            case messages.Prepared():
                await self.prepared.put(message)
            case messages.TaskEnded():
                self.ended[message.task] = message
            case messages.Submit():
                self.submits[hello.task] = self.submits.get(hello.task, 0) + 1
                self.asked_of[hello.task] = self.asked_of.get(hello.task, 0) + len(message.samples)
                mine = self._open.setdefault(hello.task, {})
                for sample in message.samples:
                    mine[sample.sample] = sample
                    self._ready.append((hello.task, sample))
            case messages.SampleMeasured():
                self.measured.append(message)
                if message.lost:
                    self._ready.append(
                        next(
                            (task, sample)
                            for task, samples in self._open.items()
                            for sample in samples.values()
                            if sample.metric_key == message.metric_key
                        )
                    )
                else:
                    self._metrics[message.metric_key] = message.measured or b"none"
                    for task, samples in self._open.items():
                        for sample in samples.values():
                            if sample.metric_key == message.metric_key:
                                self._ready.append((task, sample))

    async def _answer_all(self) -> None:
        while True:
            await self.until(lambda: self._ready)
            await self.may_answer.wait()
            chosen = self._order.sample(
                range(len(self._ready)), min(len(self._ready), self._order.randint(1, 7))
            )
            batch = [self._ready[place] for place in chosen]
            self._ready = deque(
                pair for place, pair in enumerate(self._ready) if place not in set(chosen)
            )
            for task, sample in batch:
                self._answer_one(task, sample)
            await asyncio.sleep(0)

    def _answer_one(self, task: int, sample: messages.KeyedSample) -> None:
        for request in sample.requests:
            if request.key not in self.answers:
                self.answers[request.key] = encode_answer(
                    self._answer(decode_request(request.body))
                )
        bodies = [self.answers[request.key] for request in sample.requests]
        if sample.metric_key and sample.metric_key not in self._metrics:
            self.host.write(
                messages.encode(
                    messages.MeasureSample(
                        metric_key=sample.metric_key,
                        task=task,
                        entry=self.entries[task],
                        facts=self.facts,
                        sample=sample.sample,
                        answers=bodies,
                    )
                )
            )
            return
        measured = self._metrics.get(sample.metric_key, b"")
        answered = AnsweredSample(
            sample=sample.sample,
            answers=[decode_answer(body) for body in bodies],
            measured=b"" if measured == b"none" else measured,
        )
        if self._open[task].pop(sample.sample, None) is not None:
            self._clients[task].write(messages.encode(messages.Answers(samples=[answered])))
