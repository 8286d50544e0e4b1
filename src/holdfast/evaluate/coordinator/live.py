"""An evaluation in progress: messages in, the policy asked, messages out.

Everything here is soft but three things, which are committed before anybody is told of them: answers and metrics (the
journals), the outcomes of tasks, and the list of models. A coordinator that is started anew finds those, and whoever
dials in again says the rest: nodes what they hold, engines what they have finished, clients what they want.
"""

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.core.clock import Clock
from holdfast.evaluate.coordinator import wire
from holdfast.evaluate.coordinator.book import Book, OpenRequest, OpenSample, measured_key
from holdfast.evaluate.coordinator.chronicle import Chronicle
from holdfast.evaluate.coordinator.config import DONE, FAILED, CoordinatorConfig, CoordinatorFiles
from holdfast.evaluate.coordinator.connections import Peer
from holdfast.evaluate.coordinator.fleet import Fleet, Seat
from holdfast.evaluate.coordinator.journal import Journal, JournalError
from holdfast.evaluate.coordinator.models import Model, Models
from holdfast.evaluate.coordinator.tasks import Tasks
from holdfast.evaluate.harness.harness import AnsweredSample
from holdfast.evaluate.policy import events
from holdfast.evaluate.policy.decide import decide
from holdfast.evaluate.policy.state import State
from holdfast.evaluate.requests import decode_answer

if TYPE_CHECKING:
    from collections.abc import Callable

_MOST_REFUSALS = 3  # of one request, by engines that live: then it is the request
_MOST_METRIC_LOSSES = 3

_SETTLE_S = 1.2  # after a restart: until all that live have dialled again, and said what they have
_COMMIT = "the commit"  # by which an answer is expected that came before its question
_NO_ENGINE = -1  # to the policy: one that it did not ask
_NOT_STORED = "its answer is not stored; `holdfast eval resume` asks for it"

_log = logging.getLogger(__name__)


@dataclass
class TaskCounts:
    """What a task asked for so far."""

    since_s: float
    samples: int = 0
    reused: int = 0


class Live:
    """See the module. Implements `connections.Listener`; everything runs on one event loop."""

    def __init__(
        self, config: CoordinatorConfig, clock: Clock, state: State, chronicle: Chronicle, *, epoch: int
    ) -> None:
        files = CoordinatorFiles(Path(config.folder))
        self._config, self._clock, self._state, self._epoch = config, clock, state, epoch
        self._chronicle = chronicle
        self._journals = Path(config.journals)
        of_whom = f"metrics, computed again for {config.evaluation_id}" if config.rescore else "metrics"
        self._metrics = Journal(self._journals, of_whom)
        self._book = Book(files.bodies)
        self._models = Models(files.models)
        self._tasks = Tasks(config.suite, config.spec, config.nodes, Path(config.folder), files.results)
        self._fleet = Fleet(
            config,
            clock,
            self._models,
            emit=self._emit,
            known=self._model_known,
            lost=self._engine_lost,
            failed=self._failed,
            chronicle=chronicle,
        )
        self._command: Peer | None = None
        self._clients: dict[tuple[int, int], Peer] = {}
        self._early: dict[tuple[int, int], list[wire.Submit]] = {}  # of models whose answers have no journal yet
        self._events: deque[events.Event] = deque()
        self._uncommitted: list[tuple[Peer, wire.Done]] = []
        self._measured: list[tuple[OpenSample, bytes, bytes]] = []
        self._measuring: dict[bytes, tuple[OpenSample, str]] = {}
        self._metric_losses: dict[int, int] = {}
        self._held_metrics: dict[int, int] = {}  # sample to node: granted by the policy, answers not committed yet
        self._outbox: dict[tuple[int, int], list[AnsweredSample]] = {}
        self._expected: dict[tuple[int, bytes], str] = {}  # held by an engine from before we were started anew
        self._awaiting: list[OpenSample] = []  # samples with such requests
        self._settled_s = clock.monotonic_s() + (_SETTLE_S if epoch else 0.0)
        self._to_commit = asyncio.Event()
        self._committing = asyncio.Lock()
        self._finishing = False
        self._draining = False
        self.ended = asyncio.Event()
        """Set when nothing is left to do, or nothing can be done."""
        self.exit_code = DONE
        self._task_counts: dict[tuple[int, int], TaskCounts] = {}
        self._samples = self._samples_done = self._requests = self._requests_done = self._reused = 0
        self._handlers: dict[type[wire.Message], Callable[[Peer, Any], None]] = {
            wire.AddModel: self._add_model,
            wire.DropModel: self._drop_model,
            wire.Finish: self._finish,
            wire.NodeReport: self._fleet.node_reported,
            wire.ModelFetched: self._model_fetched,
            wire.FetchFailed: self._fleet.fetch_failed,
            wire.ChildExited: self._fleet.child_exited,
            wire.Prepared: self._prepared,
            wire.TaskEnded: self._task_ended,
            wire.SampleMeasured: self._sample_measured,
            wire.Submit: self._submit,
            wire.Serving: self._fleet.serving,
            wire.ServeFailed: self._fleet.serve_failed,
            wire.Done: self._done,
            wire.GivenBack: self._given_back,
            wire.Holding: self._holding,
        }

    # Peers

    def joined(self, peer: Peer) -> None:
        """See `Listener.joined`."""
        match peer.hello.role:
            case "command":
                self._command = peer
                peer.send(wire.Welcome(epoch=self._epoch))
                for outcome in self._tasks.outcomes.values():
                    peer.send(outcome)
                for model in self._models:
                    if model.outcome is not None:
                        peer.send(model.outcome)
            case "node":
                self._fleet.node_joined(peer)
            case "host":
                peer.send(wire.Welcome(epoch=self._epoch))
                self._tasks.host_joined(peer)
            case "client" if self._tasks.is_elsewhere(peer.hello.model, peer.hello.task, peer.hello.node):
                peer.send(wire.Refused(why="Its task was given to another node."))
            case "client":
                self._clients[peer.hello.model, peer.hello.task] = peer
                self._early.pop((peer.hello.model, peer.hello.task), None)
                peer.send(wire.Welcome(epoch=self._epoch))
            case "engine":
                self._fleet.engine_joined(peer)
            case role:
                peer.send(wire.Refused(why=f"Nobody of the role {role!r} is expected."))
                peer.close()
        self._run_policy()

    def heard(self, peer: Peer, message: wire.Message) -> None:
        """See `Listener.heard`."""
        self._fleet.heard(peer)
        if handler := self._handlers.get(type(message)):
            handler(peer, message)
            self._run_policy()

    def gone(self, peer: Peer) -> None:
        """See `Listener.gone`."""
        match peer.hello.role:
            case "command":
                self._command = None
            case "node":
                self._fleet.node_gone(peer)
            case "host":
                self._tasks.host_gone(peer)
                for key, (sample, host) in list(self._measuring.items()):
                    if host == peer.hello.name:
                        del self._measuring[key]
                        self._emit(events.MetricLost(now_s=self._now_s(), sample=sample.number))
            case "client":
                if self._clients.get((peer.hello.model, peer.hello.task)) is peer:
                    del self._clients[peer.hello.model, peer.hello.task]
            case "engine":
                self._fleet.engine_gone(peer)
        self._run_policy()

    # Models

    def _add_model(self, _peer: Peer, added: wire.AddModel) -> None:
        if self._config.drop_stale:
            begun = {model for model, _task in self._clients}
            for model in self._models.open():
                if model.number not in begun:
                    self._failed(model, "a newer checkpoint came before it was begun")
        if new := self._models.add(added):
            new.added_s = self._now_s()
            self._fleet.identify(new)
            self._fleet.tick()
            self._tasks.start(self._models.open(), self._now_s())

    def _drop_model(self, _peer: Peer, dropped: wire.DropModel) -> None:
        if model := self._models.get(dropped.model):
            self._failed(model, "it was dropped")

    def _finish(self, _peer: Peer, _finish: wire.Finish) -> None:
        self._finishing = True
        self._end_if_done()

    def _model_fetched(self, peer: Peer, fetched: wire.ModelFetched) -> None:
        self._fleet.fetched(peer, fetched)
        self._tasks.start(self._models.open(), self._now_s())

    def _model_known(self, model: Model) -> None:
        """Digest and numerics are known: answers have a journal, and what clients asked early can be looked up."""
        model.answers = Journal(self._journals, f"{model.digest}\n{model.numerics}")
        self._to_commit.set()
        self._take_early()

    def _take_early(self) -> None:
        if self._now_s() < self._settled_s:
            return
        for (number, task), submits in list(self._early.items()):
            model = self._models.get(number)
            if model is not None and model.answers is not None:
                del self._early[number, task]
                for submit in submits:
                    self._take(model, task, submit)

    def _failed(self, model: Model | None, why: str) -> None:
        """A model's evaluation cannot go on; without a model, none can."""
        for one in self._models.open() if model is None else [model]:
            if one.outcome is None:
                self._end_model(one, error=why)
        if model is None:
            self.exit_code = FAILED
            self._finishing = True
            self._end_if_done()

    def _end_model(self, model: Model, error: str = "") -> None:
        outcome = wire.ModelOutcome(model=model.number, digest=model.digest, numerics=model.numerics, error=error)
        self._models.end(model, outcome)
        self._chronicle.model(model.added.name, outcome, model.added_s)
        self._book.drop(model.number)
        self._emit(events.ModelDropped(now_s=self._now_s(), model=model.number))
        if self._command:
            self._command.send(outcome)
        self._fleet.release(model)
        self._tasks.start(self._models.open(), self._now_s())
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._finishing and not self._models.open():
            self.ended.set()

    # Tasks and samples

    def _prepared(self, peer: Peer, prepared: wire.Prepared) -> None:
        if prepared.error:
            self._failed(None, prepared.error)
            return
        self._tasks.prepared(peer, prepared)
        self._tasks.start(self._models.open(), self._now_s())

    def _task_ended(self, _peer: Peer, ended: wire.TaskEnded) -> None:
        model = self._models.get(ended.model)
        if model is None or model.outcome is not None:
            return
        outcome = wire.TaskOutcome(model=ended.model, task=ended.task, result=ended.result, error=ended.error)
        if not self._tasks.ended(outcome):
            return
        counts = self._task_counts.pop((ended.model, ended.task), TaskCounts(since_s=self._now_s()))
        self._chronicle.task(outcome, since_s=counts.since_s, samples=counts.samples, reused=counts.reused)
        self._book.drop(ended.model, ended.task)
        if self._command:
            self._command.send(outcome)
        if self._tasks.are_all_ended(ended.model):
            self._end_model(model)

    def _submit(self, peer: Peer, submit: wire.Submit) -> None:
        model, task = self._models.get(peer.hello.model), peer.hello.task
        if model is None or model.outcome is not None:
            peer.send(wire.Refused(why="Its scores are not wanted any more."))
        elif model.answers is None or self._now_s() < self._settled_s:
            self._early.setdefault((model.number, task), []).append(submit)
        else:
            self._take(model, task, submit)

    def _take(self, model: Model, task: int, submit: wire.Submit) -> None:
        assert model.answers is not None
        specs = []
        counts = self._task_counts.setdefault((model.number, task), TaskCounts(since_s=self._now_s()))
        for given in submit.samples:
            sample = self._book.add(model.number, task, given, model.answers)
            if sample is None:
                continue
            self._samples += 1
            self._requests += len(given.requests)
            reused = len(given.requests) - sample.missing
            self._reused += reused
            counts.samples += 1
            counts.reused += reused
            self._requests_done += reused
            if sample.missing == 0 and self._complete(sample):
                continue
            if sample.missing and self._config.rescore:
                for request in list(sample.missing_requests):
                    for complete in self._book.answered(request, error=_NOT_STORED):
                        self._complete(complete)
                continue
            if self._is_awaited(sample):
                self._awaiting.append(sample)
                continue
            specs.append(_spec(sample))
            sample.missing_requests = []
        if specs:
            self._emit(events.SamplesAdded(now_s=self._now_s(), samples=tuple(specs)))
        self._send_answers()

    def _complete(self, sample: OpenSample) -> bool:
        """A sample misses no answer any more: deliver it, unless its metric is to be computed first."""
        if sample.unmeasured and not sample.error:
            sample.measured = self._metrics.get(measured_key(sample.metric_key, self._bodies(sample))) or b""
            if not sample.measured:
                if (node := self._held_metrics.pop(sample.number, None)) is not None:
                    self._measure(sample, node)
                return False
            sample.unmeasured = False
        self._deliver(sample)
        return True

    def _bodies(self, sample: OpenSample) -> list[bytes]:
        model = self._models.get(sample.model)
        assert model is not None
        assert model.answers is not None
        bodies = [model.answers.get(key) for key in sample.keys]
        return [body for body in bodies if body is not None]

    def _deliver(self, sample: OpenSample) -> None:
        answers = [] if sample.error else [decode_answer(body) for body in self._bodies(sample)]
        self._book.delivered(sample)
        self._samples_done += 1
        self._outbox.setdefault((sample.model, sample.task), []).append(
            AnsweredSample(sample=sample.place, answers=answers, measured=sample.measured, error=sample.error)
        )

    def _send_answers(self) -> None:
        outbox, self._outbox = self._outbox, {}
        for place, samples in outbox.items():
            # One that is gone asks again when it is back, and finds everything in the journals.
            if peer := self._clients.get(place):
                peer.send(wire.Answers(samples=samples))

    # Engines' answers

    def _done(self, peer: Peer, message: wire.Done) -> None:
        seat = self._fleet.seats.get(peer.hello.name)
        for done in message.done:
            request = self._book.request_of(message.model, done.key)
            if not done.error and (request is None or not request.is_planned):  # not to be planned until committed
                self._expected[message.model, done.key] = _COMMIT
            else:
                self._expected.pop((message.model, done.key), None)
            was_asked = seat is not None and seat.asked.pop(done.key, None) is not None
            if seat is None or request is None:  # nobody waits for it (yet): kept nevertheless
                continue
            self._chronicle.request(seat.place, request, done, message.now_s)
            engine = seat.number if was_asked else None
            if done.error:
                self._refused(request, engine, done.error)
            elif request.is_planned:
                self._emit(
                    events.Answered(
                        now_s=self._now_s(),
                        engine=_NO_ENGINE if engine is None else engine,
                        request=request.number,
                        new_tokens=done.new_tokens,
                        engine_s=done.finished_s - done.started_s,
                    )
                )
        self._uncommitted.append((peer, message))
        self._to_commit.set()

    def _refused(self, request: OpenRequest, engine: int | None, why: str) -> None:
        request.refusals += 1
        retry = request.refusals < _MOST_REFUSALS
        if engine is not None:
            self._emit(events.Refused(now_s=self._now_s(), engine=engine, request=request.number, retry=retry))
        if not retry:
            for sample in self._book.answered(request, error=why):
                self._complete(sample)
            self._send_answers()

    def _given_back(self, peer: Peer, message: wire.GivenBack) -> None:
        seat = self._fleet.seats.get(peer.hello.name)
        if seat is None or seat.number is None:
            return
        numbers = tuple(seat.asked.pop(key) for key in message.keys if key in seat.asked)
        if numbers:
            self._emit(events.Recalled(now_s=self._now_s(), engine=seat.number, requests=numbers))

    def _holding(self, peer: Peer, message: wire.Holding) -> None:
        """An engine's line had been cut: what it was asked and does not hold never reached it."""
        seat = self._fleet.seats.get(peer.hello.name)
        if seat is None:
            return
        held = set(message.keys)
        if never := [key for key in seat.asked if key not in held]:
            self._given_back(peer, wire.GivenBack(keys=never))
        for key in held - seat.asked.keys():
            self._expected[message.model, key] = seat.name

    def _engine_lost(self, seat: Seat) -> None:
        for place in [place for place, name in self._expected.items() if name == seat.name]:
            del self._expected[place]

    def _is_awaited(self, sample: OpenSample) -> bool:
        """Whether an engine that we have not asked is about to answer some of it."""
        return any((sample.model, request.key) in self._expected for request in sample.missing_requests)

    def _take_awaited(self) -> None:
        """Samples of which no engine holds anything any more: the policy's, with what they still miss."""
        ready = [sample for sample in self._awaiting if not self._is_awaited(sample)]
        self._awaiting = [sample for sample in self._awaiting if self._is_awaited(sample)]
        specs = []
        for sample in ready:
            if self._book.sample(sample.number) is not sample:
                continue
            sample.missing_requests = [
                request for request in sample.missing_requests if self._book.request(request.number) is request
            ]
            if sample.missing_requests or sample.unmeasured:
                specs.append(_spec(sample))
        if specs:
            self._emit(events.SamplesAdded(now_s=self._now_s(), samples=tuple(specs)))

    async def commit_forever(self) -> None:
        """Commit what came in, batch by batch; then tell those who wait for it."""
        while True:
            await self._to_commit.wait()
            self._to_commit.clear()
            await self.commit()

    async def commit(self) -> None:
        """Commit what came in so far, after what is being committed."""
        async with self._committing:
            await self._commit()

    async def _commit(self) -> None:
        dones, self._uncommitted = self._uncommitted, []
        metrics, self._measured = self._measured, []
        early = [one for one in dones if not self._has_journal(one[1].model)]
        ripe = [one for one in dones if self._has_journal(one[1].model)]
        self._uncommitted += early  # an engine was faster than the node that knows the weights
        answers: dict[int, list[tuple[bytes, bytes]]] = {}
        for _peer, message in ripe:
            answers.setdefault(message.model, []).extend((one.key, one.body) for one in message.done if not one.error)
        try:
            await asyncio.to_thread(self._write, answers, metrics)
        except JournalError as error:
            self._failed(None, str(error))
            return
        for model, records in answers.items():
            for key, _body in records:
                if self._expected.get((model, key)) == _COMMIT:
                    del self._expected[model, key]
                if request := self._book.request_of(model, key):
                    self._requests_done += 1
                    for sample in self._book.answered(request):
                        self._complete(sample)
        for peer, message in ripe:
            if not any(other is peer for other, _ in early):
                peer.send(wire.Acked(number=message.number))
        for sample, _key, measured in metrics:
            if self._book.sample(sample.number) is sample:
                sample.measured, sample.unmeasured = measured, False
                self._deliver(sample)
        self._send_answers()
        self._run_policy()

    def _has_journal(self, number: int) -> bool:
        model = self._models.get(number)
        return model is None or model.outcome is not None or model.answers is not None

    def _write(
        self, answers: dict[int, list[tuple[bytes, bytes]]], metrics: list[tuple[OpenSample, bytes, bytes]]
    ) -> None:
        for number, records in answers.items():
            model = self._models.get(number)
            if model is not None and model.answers is not None:
                model.answers.commit(records)
        self._metrics.commit((key, measured) for _sample, key, measured in metrics)

    # Metrics

    def _measure(self, sample: OpenSample, node: int) -> None:
        host, model = self._tasks.host_on(node), self._models.get(sample.model)
        facts = self._tasks.facts(model, node) if model else None
        if host is None or facts is None:
            self._held_metrics[sample.number] = node
            return
        bodies = self._bodies(sample)
        key = measured_key(sample.metric_key, bodies)
        self._measuring[key] = (sample, host.peer.hello.name)
        host.peer.send(
            wire.MeasureSample(
                metric_key=key,
                task=sample.task,
                entry=self._config.suite.entries[sample.task],
                facts=facts,
                sample=sample.place,
                answers=bodies,
            )
        )

    def _sample_measured(self, peer: Peer, said: wire.SampleMeasured) -> None:
        sample, _host = self._measuring.pop(said.metric_key, (None, ""))
        if sample is None:
            return
        losses = self._metric_losses.get(sample.number, 0) + said.lost
        if said.lost and losses < _MOST_METRIC_LOSSES:
            self._metric_losses[sample.number] = losses
            self._emit(events.MetricLost(now_s=self._now_s(), sample=sample.number))
            return
        self._chronicle.metric(peer.hello.node, sample, said.seconds, said.error)
        self._emit(events.Measured(now_s=self._now_s(), sample=sample.number, metric_s=said.seconds))
        if said.measured:
            self._measured.append((sample, said.metric_key, said.measured))
            self._to_commit.set()
        else:  # it raised: the client computes it itself, and fails as the harness would
            sample.unmeasured = False
            if said.lost:
                sample.error = f"the process that computed its metric died {losses} times: {said.error}"
            self._deliver(sample)
            self._send_answers()

    # The policy

    def _emit(self, event: events.Event) -> None:
        self._events.append(event)

    def _run_policy(self) -> None:
        while self._events:
            if self._draining:
                self._events.clear()
                return
            for action in decide(self._state, self._events.popleft()):
                self._act(action)

    def _act(self, action: events.Action) -> None:
        match action:
            case events.Ask():
                self._ask(action)
            case events.Recall():
                seat = self._fleet.seat_of(action.engine)
                if seat and seat.peer:
                    requests = (self._book.request(number) for number in action.requests)
                    seat.peer.send(wire.TakeBack(keys=[request.key for request in requests if request]))
            case events.Measure():
                sample = self._book.sample(action.sample)
                if sample is None:
                    self._emit(events.Measured(now_s=self._now_s(), sample=action.sample, metric_s=0.0))
                elif sample.missing:
                    self._held_metrics[sample.number] = action.node
                else:
                    self._measure(sample, action.node)
            case events.Swap():
                self._fleet.swap(action.engine, action.model)

    def _ask(self, action: events.Ask) -> None:
        seat = self._fleet.seat_of(action.engine)
        if seat is None or seat.serving is None:
            return  # it is gone: the policy hears of that next
        asked = []
        for number in action.requests:
            request = self._book.request(number)
            if request is None or not request.samples:
                self._emit(events.Refused(now_s=self._now_s(), engine=action.engine, request=number, retry=False))
                continue
            seat.asked[request.key] = number
            asked.append((request.key, self._book.body(request)))
        if asked and seat.peer:  # else its line is cut: when it is back, it says what it has
            seat.peer.send(wire.AskEngine(model=seat.serving, requests=asked))

    # Time

    def tick(self) -> None:
        """Twice a second: what waits for time."""
        self._fleet.tick()
        self._chronicle.flush()
        self._take_early()
        self._take_awaited()
        self._tasks.start(self._models.open(), self._now_s())
        for number, node in list(self._held_metrics.items()):
            sample = self._book.sample(number)
            if sample is None:
                del self._held_metrics[number]
            elif not sample.missing and self._tasks.host_on(node):
                del self._held_metrics[number]
                self._measure(sample, node)
        self._emit(events.Tick(now_s=self._now_s()))
        self._run_policy()
        if self._command:
            self._command.send(self._status())

    async def drain(self) -> None:
        """The command is gone: give out nothing more, keep what engines have begun, for `linger_s` at most."""
        self._draining = True
        deadline_s = self._now_s() + self._config.linger_s
        for seat in self._fleet.seats.values():
            if seat.peer and seat.asked:
                seat.peer.send(wire.TakeBack(keys=list(seat.asked)))
        while self._now_s() < deadline_s and any(seat.asked for seat in self._fleet.seats.values() if seat.peer):
            await asyncio.sleep(0.1)
        await self.commit()

    def stop_everyone(self) -> None:
        """Tell all that it is over."""
        for host in self._tasks.hosts.values():
            host.peer.send(wire.Stop())
        for seat in self._fleet.seats.values():
            if seat.peer:
                seat.peer.send(wire.Stop())
        for peer in self._clients.values():
            peer.send(wire.Stop())
        for node in self._fleet.nodes.values():
            node.peer.send(wire.Stop())

    def close(self, state: str) -> None:
        """Write the end into the timeline and let go of the files."""
        self._fleet.chronicle_end()
        self._chronicle.end(state)
        self._metrics.close()
        self._book.close()
        self._chronicle.close()

    def _status(self) -> wire.Status:
        seats = [seat for seat in self._fleet.seats.values() if seat.spare_for is None]
        ready = [seat for seat in seats if seat.number is not None]
        return wire.Status(
            now_s=self._chronicle.since_start_s(self._now_s()),
            samples=self._samples,
            samples_done=self._samples_done,
            requests=self._requests,
            requests_done=self._requests_done,
            reused=self._reused,
            engines=len(seats),
            engines_ready=len(ready),
            nodes=len(self._fleet.nodes),
            busy_share=sum(bool(seat.asked) for seat in ready) / len(ready) if ready else 0.0,
            time_left_s=0.0,
            bound_s=0.0,
            state="draining" if self._draining else "running" if ready else "starting",
        )

    def _now_s(self) -> float:
        return self._clock.monotonic_s()


def _spec(sample: OpenSample) -> events.SampleSpec:
    for request in sample.missing_requests:
        request.is_planned = True
    return events.SampleSpec(
        sample=sample.number,
        model=sample.model,
        task=sample.task,
        number=sample.place,
        requests=tuple(
            events.RequestSpec(
                request=request.number,
                prompt_tokens=request.prompt_tokens,
                max_new_tokens=request.max_new_tokens,
                affinity=request.affinity,
            )
            for request in sample.missing_requests
        ),
        has_metric=sample.unmeasured,
    )
