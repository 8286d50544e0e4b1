"""Run a coordinator over real TCP with fake nodes, engines, hosts and clients in one event loop.

Everything may be killed at any await: a coordinator by cutting all its connections and dropping its
state, a peer by cutting its connection.
"""

import asyncio
import gc
import hashlib
from collections import Counter
from functools import partial

import msgspec

from holdfast.core.clock import SystemClock
from holdfast.evaluate.coordinator.config import CoordinatorConfig, CoordinatorFiles, task_names
from holdfast.evaluate.coordinator.live import Live
from holdfast.evaluate.coordinator.timeline_writer import TimelineWriter
from holdfast.evaluate.policy.priors import Priors
from holdfast.evaluate.policy.state import State
from holdfast.evaluate.types.engine import Curve, EngineSpec
from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.types.harness import TaskResult
from holdfast.evaluate.types.model_manifest import Chunk, ModelFile, ModelManifest
from holdfast.evaluate.types.requests import (
    Answer,
    Request,
    Sampling,
    encode_answer,
    keyed,
    pack_tokens,
)
from holdfast.evaluate.types.suite import Suite, TaskEntry
from holdfast.evaluate.types.timeline import TimelineFile
from holdfast.evaluate.wire import messages
from holdfast.evaluate.wire.client import Line
from holdfast.evaluate.wire.server import listen

TOKEN = "of the test"
CURVE = Curve(
    prefill_tokens_per_s=1e5, request_s=1e-4, step_base_s=1e-4, step_sequence_s=1e-5, max_batch=4
)
MANIFEST = ModelManifest(
    source="/nowhere",
    form="dcp",
    files=[ModelFile(path="a", size_bytes=10)],
    chunks=[Chunk(file=0, offset=0, size_bytes=10)],
)


def config(folder, entries, **changes):
    said = {
        "evaluation_id": "test",
        "suite": Suite(name="suite", entries=tuple(entries)),
        "spec": EngineSpec(kind="simulated", mode="exact"),
        "engines_per_node": 2,
        "nodes": 1,
        "folder": str(folder),
        "journals": str(folder / "answers"),
        "metric_slots": 2,
        "linger_s": 5.0,
        "silent_s": 5.0,
        "settle_s": 0.8,
        "gather_s": 0.2,
    }
    return CoordinatorConfig(**{**said, **changes})


def entry(name, samples, requests=1, metric=False, kind="loglikelihood"):
    return TaskEntry(
        name=name,
        options={"samples": samples, "requests": requests, "metric": metric, "kind": kind},
    )


def samples_of(task: TaskEntry):
    found = []
    for number in range(task.options["samples"]):
        requests = []
        for index in range(task.options["requests"]):
            prompt = pack_tokens([*task.name.encode(), number, index])
            if task.options["kind"] == "generate":
                asked = Request(kind="generate", prompt=prompt, sampling=Sampling(max_new_tokens=8))
            else:
                asked = Request(kind="loglikelihood", prompt=prompt, continuation=pack_tokens([1]))
            requests.append(keyed(asked))
        key = hashlib.blake2b(f"{task.name} {number}".encode(), digest_size=16).digest()
        found.append(
            messages.KeyedSample(
                sample=number, requests=requests, metric_key=key if task.options["metric"] else b""
            )
        )
    return found


def answer_to(key: bytes, folder: str) -> Answer:
    """Return an answer that depends on the request and on the weights."""
    digest = hashlib.blake2b(key + folder.encode(), digest_size=4).digest()
    return Answer(logprob=-int.from_bytes(digest, "big") / 2**28, new_tokens=1)


class World:
    """Everything of one evaluation."""

    def __init__(self, config: CoordinatorConfig, seed=None) -> None:
        self.config, self.folder = config, config.folder
        self.port = 0
        self.epoch = 0
        self.committed: set[tuple[str, bytes]] = (
            set()
        )  # (weights, key) that an engine saw acknowledged
        self.answered = Counter()
        self.measured = Counter()
        self.outcomes: dict[tuple[int, int], messages.TaskOutcome] = {}
        self.models: dict[int, messages.ModelOutcome] = {}
        self.statuses: list[messages.Status] = []
        self.redone: list[bytes] = []
        self.pids = 1000
        self.running: set[asyncio.Task] = set()
        self.lines: list[Line] = []
        self.engines: dict[str, FakeEngine] = {}
        self.hosts: dict[str, FakeHost] = {}
        self.live = None
        self.silent: set[str] = set()
        self.bad_swaps: set[str] = set()
        self.stillborn: set[str] = set()
        self.no_route: set[int] = set()  # of nodes, to the weights of `lost_models`
        self.lost_models = {0}
        self.refused: list[int] = []
        self.nodes: dict[int, list[asyncio.Task]] = {}
        self.started: list[str] = []
        self.fetched: list[int] = []
        self.host, self.kind, self.numerics = "here", "", "of fakes"
        self.other_kinds: dict[int, str] = {}  # of nodes, with numerics of the same name
        self.digests = {number: f"digest {number}" for number in range(9)}

    def spawn(self, work):
        task = asyncio.create_task(work)
        self.running.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task):
        self.running.discard(task)
        if not task.cancelled() and task.exception():
            raise task.exception()

    async def start(self):
        from pathlib import Path

        folder = Path(self.folder)
        files = CoordinatorFiles(folder)
        files.folder.mkdir(parents=True, exist_ok=True)
        clock = SystemClock()
        names = task_names(self.config.suite)
        timeline = TimelineFile(folder / "timeline.jsonl")
        chronicle = TimelineWriter(timeline, clock, clock.now_s())
        self.live = Live(self.config, clock, State(Priors(names)), chronicle, epoch=self.epoch)
        self._watch(self.live)
        self.server = await listen("127.0.0.1", self.port, TOKEN, self.live)
        self.port = self.server.sockets[0].getsockname()[1]
        self.epoch += 1
        self.committing = self.spawn(self.live.commit_forever())
        self.ticking = self.spawn(self._tick(self.live))

    def _watch(self, live):
        """Record requests that are sent although committed, or finished by a live engine.

        A request that another engine holds may be sent to a second one: the first answer wins.
        """
        ask = live._dispatcher.ask

        def watched(action):
            finished = {
                (done.model, one.key)
                for engine in self.engines.values()
                for done in engine.unacked
                for one in done.done
                if not one.error
            }
            for request in filter(None, map(live._open_requests.request, action.requests)):
                others = (
                    slot.sent for slot in live._pool.slots.values() if slot.number != action.engine
                )
                is_doubled = any(request.key in asked for asked in others)
                if (f"weights {request.model}", request.key) in self.committed or (
                    (request.model, request.key) in finished and not is_doubled
                ):
                    self.redone.append(request.key)
            ask(action)

        live._dispatcher.ask = watched

    async def _tick(self, live):
        while True:
            await asyncio.sleep(0.05)
            live.tick()

    def kill_coordinator(self):
        """Act like kill -9: send and write nothing."""
        self.committing.cancel()
        self.ticking.cancel()
        self.server.close()
        for task in asyncio.all_tasks():
            if getattr(task.get_coro(), "__name__", "") == "attend":
                task.cancel()
        # Abort unattended connections, too. The check is by type, since isinstance would wake lazy
        # objects.
        for transport in gc.get_objects():
            if type(transport).__name__ != "_SelectorSocketTransport" or transport.is_closing():
                continue
            if (transport.get_extra_info("sockname") or ("", 0))[1] == self.port:
                transport.abort()
        for line in self.lines:
            line.close()
        live, self.live = self.live, None
        live._timeline._timeline._waiting.clear()
        live._timeline.close()  # the rest stays open: a commit may be under way in its thread

    def line(self, role, name, serves=lambda: -1, **more):
        def hello():
            return messages.Hello(token=TOKEN, role=role, name=name, **{"model": serves(), **more})

        line = Line(f"127.0.0.1:{self.port}", hello, patience_s=30.0)
        self.lines.append(line)
        return line

    async def command(self, *models, finish=True):
        line = self.command_line = self.line("command", "command")
        self.added = list(models)
        self.finishing = finish
        async for message in line.messages():
            match message:
                case messages.Welcome():
                    for model in self.added:
                        line.send(model)
                    if self.finishing:
                        line.send(messages.Finish())
                case messages.TaskOutcome():
                    self.outcomes[message.model, message.task] = message
                case messages.ModelOutcome():
                    self.models[message.model] = message
                case messages.Status():
                    self.statuses.append(message)

    def kill_node(self, place):
        """Remove the machine with everything on it."""
        for task in self.nodes.pop(place):
            task.cancel()
        for engine in [one for one in self.engines.values() if one.place == place]:
            engine.die()

    async def node(self, place):
        line = self.line("node", f"node-{place}", node=place)
        self.nodes[place] = [asyncio.current_task(), self.spawn(FakeHost(self, place).run())]
        fetched = {}
        started = {}

        def ended(name, engine):
            if started.get(name) is engine:
                line.send(messages.ChildExited(role="engine", name=name, exit_code=-9))

        async for message in line.messages():
            match message:
                case messages.Welcome():
                    line.send(
                        messages.NodeReport(
                            host=self.host,
                            cores=2,
                            memory_bytes=1,
                            gpus=0,
                            store="here:1",
                            kind=self.other_kinds.get(place, self.kind),
                        )
                    )
                    for one in fetched.values():
                        line.send(one)
                case messages.FetchModel(model=model) if (
                    place in self.no_route and model in self.lost_models
                ):
                    self.refused.append(place)
                    line.send(messages.FetchFailed(model=model, why="There is no route."))
                case messages.FetchModel(model=model):
                    self.fetched.append(model)
                    fetched[model] = messages.ModelFetched(
                        model=model,
                        folder=f"weights {model}",
                        digest=self.digests[model],
                        remote_bytes=10,
                        peer_bytes=0,
                        seconds=0.0,
                    )
                    line.send(fetched[model])
                case messages.ReleaseModel(model=model):
                    fetched.pop(model, None)
                case messages.StartEngine(name=name) if name in self.stillborn:
                    line.send(messages.ChildExited(role="engine", name=name, exit_code=1))
                case messages.StartEngine(name=name):
                    self.started.append(name)
                    if name not in started or started[name].done():
                        self.engines[name] = FakeEngine(self, name, place)
                        started[name] = self.engines[name].task = self.spawn(
                            self.engines[name].run()
                        )
                        started[name].add_done_callback(partial(ended, name))
                case messages.StopEngine(name=name):
                    if (
                        name in started
                    ):  # like an agent, which does not report children that it ended on order
                        started.pop(name).cancel()
                        self.engines[name].die()

    async def finish(self, within_s=240.0):
        async with asyncio.timeout(within_s):
            while True:
                live = self.live
                if live is not None and live.ended.is_set():
                    break
                await asyncio.sleep(0.01)
        await self.live.commit()
        await asyncio.sleep(0.05)  # the command's last messages cross a real socket

    async def end(self):
        for task in list(self.running):
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)
        for line in self.lines:
            line.close()
        self.server.close()
        for _ in range(20):  # both ends of each connection close in turn
            await asyncio.sleep(0)
        await asyncio.sleep(0.02)
        if self.live is not None:
            self.live.close("done")


class FakeEngine:
    """Answer by the content of the request and of the weights, one at a time."""

    def __init__(self, world: World, name: str, place: int) -> None:
        self.world, self.name, self.place = world, name, place
        self.serving: messages.Serving | None = None
        self.folder = ""
        self.held: list[tuple[bytes, bytes]] = []
        self.unacked: list[messages.Done] = []
        self.number = 0
        self.gate = asyncio.Event()
        self.line = None

    async def run(self):
        self.world.pids += 1
        self.line = self.world.line(
            "engine", self.name, self.model, node=self.place, pid=self.world.pids
        )
        working = self.world.spawn(self.work())
        try:
            async for message in self.line.messages():
                self.heed(message)
        finally:
            working.cancel()

    def heed(self, message):
        match message:
            case messages.Welcome():
                if self.serving:
                    self.line.send(self.serving)
                for done in self.unacked:
                    self.line.send(done)
                if self.serving:
                    held = messages.Holding(
                        model=self.serving.model, keys=[key for key, _ in self.held]
                    )
                    self.line.send(held)
            case messages.Serve():
                how = "swap" if self.serving and not message.fresh else "load"
                self.folder = message.folder
                canary = float(message.model) + (
                    0.5 if how == "swap" and self.name in self.world.bad_swaps else 0.0
                )
                said = messages.Serving(
                    model=message.model,
                    how=how,
                    seconds=0.0,
                    numerics=self.world.other_kinds.get(self.place, self.world.numerics),
                    max_length=64,
                    curve=CURVE,
                    canary=[canary],
                )
                self.line.send(said)
                self.serving = msgspec.structs.replace(said, kept=True)
            case messages.AnswerRequests():
                if (
                    self.serving is None or message.model != self.serving.model
                ):  # as the worker does
                    self.line.send(messages.GivenBack(keys=[key for key, _ in message.requests]))
                    return
                mine = {key for key, _ in self.held}
                self.held += [one for one in message.requests if one[0] not in mine]
                self.gate.set()
            case messages.TakeBack() if self.name in self.world.silent:
                pass  # a thread that hangs reads nothing
            case messages.TakeBack(keys=keys):
                given = [key for key, _ in self.held if key in set(keys)]
                self.held = [one for one in self.held if one[0] not in set(keys)]
                self.line.send(messages.GivenBack(keys=given))
            case messages.Acked(number=number):
                for done in [one for one in self.unacked if one.number <= number]:
                    self.unacked.remove(done)
                    self.world.committed |= {
                        (self.folder_of(done), one.key) for one in done.done if not one.error
                    }

    def model(self):
        return self.serving.model if self.serving else -1

    def die(self):
        """Act like kill -9: drop everything; the agent reports the end."""
        self.serving, self.held, self.unacked, self.folder = None, [], [], ""
        self.task.cancel()
        if self.line:
            self.line.close()

    def folder_of(self, done):
        return f"weights {done.model}"

    async def work(self):
        while True:
            await self.gate.wait()
            while self.held and self.name not in self.world.silent:
                await asyncio.sleep(0)
                if not self.held:
                    break
                key, _body = self.held.pop(0)
                self.world.answered[key] += 1
                self.number += 1
                body = encode_answer(answer_to(key, self.folder))
                one = messages.DoneRequest(
                    key=key, body=body, new_tokens=1, started_s=0.0, finished_s=0.001
                )
                done = messages.Done(
                    number=self.number, model=self.serving.model, done=[one], now_s=0.001
                )
                self.unacked.append(done)
                self.line.send(done)
            self.gate.clear()


class FakeHost:
    """Run clients, and measure by counting."""

    def __init__(self, world: World, place: int) -> None:
        self.world, self.place = world, place
        world.hosts[f"host-{place}"] = self
        self.clients = {}

    async def run(self):
        self.line = self.world.line("host", f"host-{self.place}", node=self.place)
        async for message in self.line.messages():
            match message:
                case messages.Prepare(entries=entries):
                    missing = [one.name for one in entries if one.name == "missing"]
                    self.line.send(
                        messages.Prepared(error="There is no task 'missing'." if missing else "")
                    )
                case messages.RunTask():
                    place = (message.facts.model, message.task)
                    if place not in self.clients or self.clients[place].done():
                        self.clients[place] = self.world.spawn(self.client(message))
                    else:  # as a real host: what runs, runs on
                        pass
                case messages.MeasureSample():
                    self.world.measured[message.metric_key] += 1
                    measured = b"%d" % sum(map(len, message.answers))
                    self.line.send(
                        messages.SampleMeasured(
                            metric_key=message.metric_key,
                            measured=measured,
                            read={},
                            seconds=0.001,
                        )
                    )

    async def said(self, line):
        try:
            async for message in line.messages():
                yield message
        except EvaluationError:
            raise asyncio.CancelledError from None  # refused: the scores are no longer needed

    async def client(self, run: messages.RunTask):
        model, task = run.facts.model, run.task
        line = self.world.line(
            "client", f"client-{model}-{task}", node=self.place, model=model, task=task
        )
        if run.entry.name == "raises":
            await asyncio.sleep(0)
            self.line.send(
                messages.TaskEnded(model=model, task=task, error="ValueError: it raises")
            )
            return
        wanted = samples_of(run.entry)
        answered = {}
        async for message in self.said(line):
            match message:
                case messages.Welcome():
                    left = [one for one in wanted if one.sample not in answered]
                    for start in range(0, len(left), 7):
                        line.send(
                            messages.Submit(
                                samples=left[start : start + 7], final=start + 7 >= len(left)
                            )
                        )
                case messages.Answers(samples=samples):
                    answered |= {one.sample: one for one in samples}
            if len(answered) == len(wanted):
                break
        line.close()
        errors = [one.error for one in answered.values() if one.error]
        score = [[a.logprob for a in answered[number].answers] for number in sorted(answered)]
        metrics = [answered[number].measured.decode() for number in sorted(answered)]
        result = TaskResult(results={"score": score, "metrics": metrics})
        while not self.line.is_connected:
            await asyncio.sleep(0.01)
        self.line.send(
            messages.TaskEnded(
                model=model,
                task=task,
                result=None if errors else result,
                error=errors[0] if errors else "",
            )
        )
