"""An evaluation in progress: messages in, the policy asked, messages out.

Everything here is soft but three things, which are committed before anybody is told of them: answers and metrics (the
journals), the outcomes of tasks, and the models with what their weights are. A coordinator that is started anew finds
those, and whoever dials in again says the rest: nodes what they hold, engines what they have finished, clients what
they want.
"""

import asyncio
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.core.atomic import write_atomic
from holdfast.core.clock import Clock
from holdfast.evaluate.coordinator.commits import Commits
from holdfast.evaluate.coordinator.config import DONE, FAILED, CoordinatorConfig, CoordinatorFiles
from holdfast.evaluate.coordinator.counts import Counts
from holdfast.evaluate.coordinator.delivery import Delivery
from holdfast.evaluate.coordinator.dispatcher import Dispatcher
from holdfast.evaluate.coordinator.engine_pool import EnginePool
from holdfast.evaluate.coordinator.measurements import Measurements
from holdfast.evaluate.coordinator.models import Model, Models
from holdfast.evaluate.coordinator.open_requests import OpenRequests, ResumedRequests
from holdfast.evaluate.coordinator.sample_queue import NOT_WANTED, SampleQueue
from holdfast.evaluate.coordinator.tasks import Tasks
from holdfast.evaluate.coordinator.timeline_writer import TimelineWriter
from holdfast.evaluate.policy import events
from holdfast.evaluate.policy.decisions import decide
from holdfast.evaluate.policy.priors import encode_history
from holdfast.evaluate.policy.state import State
from holdfast.evaluate.wire import messages
from holdfast.evaluate.wire.answer_journal import Journal
from holdfast.evaluate.wire.server import Connection

if TYPE_CHECKING:
    from collections.abc import Callable

_DRAIN_POLL_S = 0.1


class Live:
    """See the module. Implements `connections.Listener`; everything runs on one event loop."""

    def __init__(
        self,
        config: CoordinatorConfig,
        clock: Clock,
        state: State,
        chronicle: TimelineWriter,
        *,
        epoch: int,
    ) -> None:
        files = CoordinatorFiles(Path(config.folder))
        self._config, self._clock, self._state, self._epoch = config, clock, state, epoch
        self._chronicle = chronicle
        self._journals, self._learned = Path(config.journals), files.learned
        self._book = OpenRequests(files.folder)
        self._models = Models(files.models)
        self._tasks = Tasks(
            config.suite, config.spec, config.nodes, Path(config.folder), files.results
        )
        self._fleet = EnginePool(
            config,
            clock,
            self._models,
            emit=self._emit,
            known=self._model_known,
            lost=lambda seat: self._awaited.engine_lost(seat.name),
            failed=self._failed,
            chronicle=chronicle,
        )
        self._command: Connection | None = None
        self._clients: dict[tuple[int, int], Connection] = {}
        self._events: deque[events.Event] = deque()
        self._awaited = ResumedRequests(self._book)
        self._delivery = Delivery(self._book, self._models, self._clients.get)
        self._measurements = Measurements(
            self._book,
            self._models,
            self._tasks,
            self._delivery,
            config.suite,
            emit=self._emit,
            now_s=self._now_s,
        )
        self._counts = Counts()
        self._intake = SampleQueue(
            self._models,
            self._book,
            self._awaited,
            self._measurements,
            self._delivery,
            self._counts,
            rescore=config.rescore,
            settled_s=clock.monotonic_s() + (config.settle_s if epoch else 0.0),
            emit=self._emit,
            now_s=self._now_s,
        )
        self._commits = Commits(
            self._models,
            answered=self._intake.answered,
            measured=self._intake.measured,
            ended=self._committed,
        )
        self._asking = Dispatcher(
            self._book,
            self._fleet,
            self._awaited,
            self._commits,
            chronicle,
            state,
            emit=self._emit,
            unanswerable=self._intake.unanswerable,
            now_s=self._now_s,
        )
        self._finishing = False
        self._draining = False
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Has the error of a message that could not be dealt with: nothing can go on."""
        self.ended = asyncio.Event()
        """Set when nothing is left to do, or nothing can be done."""
        self.exit_code = DONE
        self._handlers: dict[type[messages.Message], Callable[[Connection, Any], None]] = {
            messages.AddModel: self._add_model,
            messages.Finish: self._finish,
            messages.NodeReport: self._fleet.node_reported,
            messages.ModelFetched: self._model_fetched,
            messages.FetchFailed: self._fleet.fetch_failed,
            messages.ChildExited: self._fleet.child_exited,
            messages.Prepared: self._prepared,
            messages.TaskEnded: self._task_ended,
            messages.SampleMeasured: self._sample_measured,
            messages.Submit: self._intake.submit,
            messages.Serving: self._fleet.serving,
            messages.ServeFailed: self._fleet.serve_failed,
            messages.Done: self._asking.done,
            messages.GivenBack: self._asking.given_back,
            messages.Holding: self._holding,
        }

    # Peers

    def joined(self, peer: Connection) -> None:
        """See `Listener.joined`."""
        match peer.hello.role:
            case "command":
                self._command = peer
                peer.send(
                    messages.Welcome(epoch=self._epoch)
                )  # it says its models again, and hears what became of them
            case "node":
                self._fleet.node_joined(peer)
            case "host":
                peer.send(messages.Welcome(epoch=self._epoch))
                self._tasks.host_joined(peer)
            case "client" if self._tasks.is_elsewhere(
                peer.hello.model, peer.hello.task, peer.hello.node
            ):
                peer.send(messages.Refused(why="Its task was given to another node."))
            case "client":
                self._clients[peer.hello.model, peer.hello.task] = peer
                self._intake.forget_early(peer.hello.model, peer.hello.task)
                peer.send(messages.Welcome(epoch=self._epoch))
            case "engine":
                self._fleet.engine_joined(peer)
            case role:
                peer.send(messages.Refused(why=f"Nobody of the role {role!r} is expected."))
                peer.close()
        self._run_policy()

    def heard(self, peer: Connection, message: messages.Message) -> None:
        """See `Listener.heard`."""
        self._fleet.heard(peer)
        if handler := self._handlers.get(type(message)):
            handler(peer, message)
            self._run_policy()

    def gone(self, peer: Connection) -> None:
        """See `Listener.gone`."""
        match peer.hello.role:
            case "command":
                self._command = None
            case "node":
                self._fleet.node_gone(peer)
            case "host":
                self._tasks.host_gone(peer)
                self._measurements.host_gone(peer.hello.name)
            case "client":
                if self._clients.get((peer.hello.model, peer.hello.task)) is peer:
                    del self._clients[peer.hello.model, peer.hello.task]
            case "engine":
                self._fleet.engine_gone(peer)
        self._run_policy()

    def broke(self, error: Exception) -> None:
        """See `Listener.broke`."""
        if not self.broken.done():
            self.broken.set_exception(error)

    # Models

    def _add_model(self, peer: Connection, added: messages.AddModel) -> None:
        if (known := self._models.get(added.model)) is not None:
            for outcome in self._tasks.of_model(known.number):
                peer.send(outcome)
            if known.outcome is not None:
                peer.send(known.outcome)
            return
        waiting = [model for model in self._models.open() if not model.is_begun]
        if new := self._models.add(added):
            if (
                self._config.drop_stale and self._intake.is_settled()
            ):  # before, nobody knows what is begun
                for model in waiting:
                    self._end_model(
                        model, "a newer checkpoint came before it was begun", is_stale=True
                    )
            new.added_s = self._now_s()
            self._fleet.identify(new)
            self._fleet.tick()
            self._tasks.start(self._models.open(), self._now_s())

    def _finish(self, _peer: Connection, _finish: messages.Finish) -> None:
        self._finishing = True
        self._end_if_done()

    def _model_fetched(self, peer: Connection, fetched: messages.ModelFetched) -> None:
        self._fleet.fetched(peer, fetched)
        self._tasks.start(self._models.open(), self._now_s())

    def _model_known(self, model: Model) -> None:
        """Digest and numerics are known: answers have a journal, and what clients asked early can be looked up."""
        whose = f"{model.digest}\n{model.numerics}"
        again = f", computed again for {self._config.evaluation_id}" if self._config.rescore else ""
        model.answers = Journal(self._journals, whose)
        model.metrics = Journal(self._journals, f"{whose}\nmetrics{again}")
        self._commits.journal_opened()
        self._intake.take_early()

    def _failed(self, model: Model | None, why: str, *, wrong_use: bool = False) -> None:
        """A model's evaluation cannot go on; without a model, none can."""
        for one in self._models.open() if model is None else [model]:
            if one.outcome is None:
                self._end_model(one, error=why, wrong_use=wrong_use, any_model=model is None)
        if model is None:
            self.exit_code = FAILED
            self._finishing = True
            self._end_if_done()

    def _end_model(
        self,
        model: Model,
        error: str = "",
        *,
        wrong_use: bool = False,
        any_model: bool = False,
        is_stale: bool = False,
    ) -> None:
        outcome = messages.ModelOutcome(
            model=model.number,
            digest=model.digest,
            numerics=model.numerics,
            error=error,
            wrong_use=wrong_use,
            any_model=any_model,
            is_stale=is_stale,
        )
        self.keep_learned()  # before the command hears of the end, and records what is known
        self._models.end(model, outcome)
        self._chronicle.model(model.added.name, outcome, model.added_s)
        self._chronicle.flush()  # before the command hears of the end, and reads what happened
        self._book.drop(model.number)
        self._emit(events.ModelDropped(now_s=self._now_s(), model=model.number))
        self._intake.forget(model.number)
        self._tasks.forget(model.number)
        for (number, _task), client in list(self._clients.items()):
            if number == model.number:
                client.send(messages.Refused(why=NOT_WANTED))
        if self._command:
            self._command.send(outcome)
        self._fleet.release(model)
        self._tasks.start(self._models.open(), self._now_s())
        self._end_if_done()

    def keep_learned(self) -> None:
        """Write what samples cost, as far as it is known, for the evaluations to come."""
        write_atomic(self._learned, encode_history(self._state.priors.history()))

    def _end_if_done(self) -> None:
        if self._finishing and not self._models.open():
            self.ended.set()

    # Tasks and samples

    def _prepared(self, peer: Connection, prepared: messages.Prepared) -> None:
        if prepared.error:
            self._failed(None, prepared.error, wrong_use=True)
            return
        self._tasks.prepared(peer, prepared)
        self._tasks.start(self._models.open(), self._now_s())

    def _task_ended(self, peer: Connection, ended: messages.TaskEnded) -> None:
        model = self._models.get(ended.model)
        if model is None or model.outcome is not None:
            return
        if ended.error and self._tasks.is_elsewhere(ended.model, ended.task, peer.hello.node):
            return  # a client that we refused, since another runs
        outcome = messages.TaskOutcome(
            model=ended.model, task=ended.task, result=ended.result, error=ended.error
        )
        if not self._tasks.ended(outcome):
            return
        counts = self._counts.take(ended.model, ended.task, self._now_s())
        self._chronicle.task(
            outcome, since_s=counts.since_s, samples=counts.samples, reused=counts.reused
        )
        self._book.drop(ended.model, ended.task)
        if self._command:
            self._command.send(outcome)
        if self._tasks.are_all_ended(ended.model):
            self._end_model(model)

    def _holding(self, peer: Connection, message: messages.Holding) -> None:
        self._asking.holding(peer, message)
        if self._fleet.is_complete():
            self._intake.settle()

    # What is committed

    def _committed(self) -> None:
        self._delivery.send()
        self._run_policy()

    async def commit_forever(self) -> None:
        """Commit what comes, batch by batch. Raises as `Commits.forever`."""
        await self._commits.forever()

    async def commit(self) -> None:
        """Commit what came so far. Raises as `Commits.commit`."""
        await self._commits.commit()

    # Metrics

    def _sample_measured(self, peer: Connection, said: messages.SampleMeasured) -> None:
        samples, losses = self._measurements.ended(said)
        if samples:
            self._chronicle.metric(peer.hello.node, samples[0], said.seconds, said.error)
        died = (
            f"the process that computed its metric died {losses} times: {said.error}"
            if said.lost
            else ""
        )
        for sample in samples:
            if said.measured:
                self._commits.add_metric(sample, said.metric_key, said.measured)
            else:
                self._intake.unmeasurable(sample, error=died)

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
                self._asking.ask(action)
            case events.Recall():
                self._asking.recall(action)
            case events.Measure():
                self._measurements.grant(action.sample, action.node)
            case events.Swap():
                self._fleet.swap(action.engine, action.model)

    # Time

    def tick(self) -> None:
        """Twice a second: what waits for time."""
        self._fleet.tick()
        self._chronicle.flush()
        self._intake.take_early()
        self._intake.plan_settled()
        for (
            model
        ) in self._models.open():  # whoever ran it died between its last task's end and its own
            if model.answers is not None and self._tasks.are_all_ended(model.number):
                self._end_model(model)
        self._tasks.start(self._models.open(), self._now_s())
        self._measurements.start_waiting()
        self._emit(events.Tick(now_s=self._now_s()))
        self._run_policy()
        if self._command:
            status = self._counts.status(
                self._fleet,
                self._state,
                now_s=self._chronicle.since_start_s(self._now_s()),
                delivered=self._delivery.count,
                answered_s=self._asking.answered_s,
                draining=self._draining,
            )
            self._command.send(status)

    async def drain(self) -> None:
        """The command is gone: give out nothing more, keep what engines have begun, for `linger_s` at most."""
        self._draining = True
        deadline_s = self._now_s() + self._config.linger_s
        self._asking.recall_everything()
        while self._now_s() < deadline_s and self._asking.is_under_way():
            await asyncio.sleep(_DRAIN_POLL_S)
        await self.commit()

    def stop_everyone(self) -> None:
        """Tell all that it is over."""
        for host in self._tasks.hosts.values():
            host.peer.send(messages.Stop())
        for seat in self._fleet.seats.values():
            if seat.peer:
                seat.peer.send(messages.Stop())
        for peer in self._clients.values():
            peer.send(messages.Stop())
        for node in self._fleet.nodes.values():
            node.peer.send(messages.Stop())

    def close(self, state: str) -> None:
        """Write the end into the timeline and let go of the files."""
        self._fleet.chronicle_end()
        self._chronicle.end(state)
        self._book.close()
        self._chronicle.close()

    def _now_s(self) -> float:
        return self._clock.monotonic_s()
