"""Run an evaluation: receive messages, apply the policy's decisions, send messages.

All state is rebuilt after a restart except for three things, which are on disk before they are
sent:

- answers and metrics, in the journals;
- the outcomes of tasks;
- the models, with the digests of their weights.

After a restart, nodes report the models they hold, engines report their requests and finished
answers, and clients submit their samples again.
"""

import asyncio
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
from holdfast.evaluate.coordinator.policy_queue import PolicyQueue
from holdfast.evaluate.coordinator.sample_queue import NOT_WANTED, SampleQueue
from holdfast.evaluate.coordinator.tasks import Tasks
from holdfast.evaluate.coordinator.timeline_writer import TimelineWriter
from holdfast.evaluate.policy import events
from holdfast.evaluate.policy.priors import encode_history
from holdfast.evaluate.policy.state import State
from holdfast.evaluate.wire import messages
from holdfast.evaluate.wire.answer_journal import Journal
from holdfast.evaluate.wire.server import Connection

if TYPE_CHECKING:
    from collections.abc import Callable

_DRAIN_POLL_S = 0.1


class Live:
    """Run an evaluation on one event loop.

    Implements `wire.server.Listener` and `engine_pool.ModelListener`.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        clock: Clock,
        state: State,
        timeline: TimelineWriter,
        *,
        epoch: int,
    ) -> None:
        files = CoordinatorFiles(Path(config.folder))
        self._config, self._clock, self._epoch = config, clock, epoch
        self._timeline = timeline
        self._journals, self._learned = Path(config.journals), files.learned
        self._state_folder = files.folder
        self._policy = PolicyQueue(state)
        self._open_requests = OpenRequests(files.folder)
        self._models = Models(files.models)
        self._tasks = Tasks(
            config.suite, config.spec, config.nodes, Path(config.folder), files.results
        )
        self._resumed = ResumedRequests(self._open_requests)
        self._pool = EnginePool(
            config, clock, self._policy, self._models, self._resumed, timeline, listener=self
        )
        self._delivery = Delivery(self._open_requests, self._models)
        self._measurements = Measurements(
            clock,
            self._policy,
            self._open_requests,
            self._models,
            self._tasks,
            self._delivery,
            config.suite,
        )
        self._counts = Counts()
        self._samples = SampleQueue(
            clock,
            self._policy,
            self._models,
            self._open_requests,
            self._resumed,
            self._measurements,
            self._delivery,
            self._counts,
            rescore=config.rescore,
            settled_s=clock.monotonic_s() + (config.settle_s if epoch else 0.0),
            need_engines=self._pool.need_engines,
        )
        self._commits = Commits(self._models, self._samples)
        self._dispatcher = Dispatcher(
            clock,
            self._policy,
            self._open_requests,
            self._pool,
            self._resumed,
            self._samples,
            self._commits,
            timeline,
        )
        self._command: Connection | None = None
        self._finishing = False
        self._draining = False
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Receives the error of a message that could not be handled; the coordinator then ends."""
        self.ended = asyncio.Event()
        """Set when all work is done, or no more work is possible."""
        self.exit_code = DONE
        self._handlers: dict[type[messages.Message], Callable[[Connection, Any], None]] = {
            messages.AddModel: self._add_model,
            messages.Finish: self._finish,
            messages.NodeReport: self._pool.node_reported,
            messages.ModelFetched: self._model_fetched,
            messages.FetchFailed: self._pool.fetch_failed,
            messages.ChildExited: self._pool.child_exited,
            messages.Prepared: self._prepared,
            messages.TaskEnded: self._task_ended,
            messages.SampleMeasured: self._sample_measured,
            messages.Submit: self._samples.submit,
            messages.Serving: self._pool.serving,
            messages.ServeFailed: self._pool.serve_failed,
            messages.Done: self._dispatcher.done,
            messages.GivenBack: self._dispatcher.given_back,
            messages.Holding: self._holding,
        }

    # Peers

    def joined(self, peer: Connection) -> None:
        """See `Listener.joined`."""
        match peer.hello.role:
            case "command":
                self._command = peer
                # The command then adds its models again and receives their outcomes.
                peer.send(messages.Welcome(epoch=self._epoch))
            case "node":
                self._pool.node_joined(peer)
            case "host":
                peer.send(messages.Welcome(epoch=self._epoch))
                self._tasks.host_joined(peer)
            case "client" if self._tasks.is_elsewhere(
                peer.hello.model, peer.hello.task, peer.hello.node
            ):
                peer.send(messages.Refused(why="Its task was given to another node."))
            case "client":
                self._delivery.client_joined(peer)
                self._samples.forget_early(peer.hello.model, peer.hello.task)
                peer.send(messages.Welcome(epoch=self._epoch))
            case "engine":
                self._pool.engine_joined(peer)
            case role:
                peer.send(messages.Refused(why=f"A peer of the role {role!r} is not expected."))
                peer.close()
        self._run_policy()

    def on_message(self, peer: Connection, message: messages.Message) -> None:
        """Handle a message and apply the policy's decisions; see `Listener.on_message`."""
        self._pool.mark_alive(peer)
        if handler := self._handlers.get(type(message)):
            handler(peer, message)
            self._run_policy()

    def gone(self, peer: Connection) -> None:
        """See `Listener.gone`."""
        match peer.hello.role:
            case "command":
                self._command = None
            case "node":
                self._pool.node_left(peer)
            case "host":
                self._tasks.host_left(peer)
                self._measurements.host_left(peer.hello.name)
            case "client":
                self._delivery.client_left(peer)
            case "engine":
                self._pool.engine_left(peer)
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
            # Before the samples are settled, it is unknown which models have begun.
            if self._config.drop_stale and self._samples.is_settled():
                for model in waiting:
                    self._end_model(
                        model, "a newer checkpoint came before it was begun", is_stale=True
                    )
            new.added_s = self._now_s()
            self._pool.identify(new)
            self._pool.tick()
            self._tasks.start(self._models.open(), self._now_s())

    def _finish(self, _peer: Connection, _finish: messages.Finish) -> None:
        self._finishing = True
        self._end_if_done()

    def _model_fetched(self, peer: Connection, fetched: messages.ModelFetched) -> None:
        self._pool.fetched(peer, fetched)
        self._tasks.start(self._models.open(), self._now_s())

    def model_known(self, model: Model) -> None:
        """See `ModelListener.model_known`.

        The journals of the model are opened, and submissions that waited for them are looked up.
        """
        whose = f"{model.digest}\n{model.numerics}"
        # A rescore computes all metrics again, so it keeps their results in a journal of its own.
        metrics = self._state_folder / "metrics" if self._config.rescore else self._journals
        model.answers = Journal(self._journals, whose)
        model.metrics = Journal(metrics, f"{whose}\nmetrics of files")
        self._commits.journal_opened()
        self._samples.take_early()

    def model_failed(self, model: Model | None, why: str, *, wrong_use: bool = False) -> None:
        """See `ModelListener.model_failed`; if `model` is None, all models fail."""
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
        self.keep_learned()  # before the command receives the end and records the costs
        self._models.end(model, outcome)
        self._timeline.model(model.added.name, outcome, model.added_s)
        self._timeline.flush()  # before the command receives the end and reads the timeline
        self._open_requests.drop(model.number)
        self._policy.put(events.ModelDropped(now_s=self._now_s(), model=model.number))
        self._samples.forget(model.number)
        self._tasks.forget(model.number)
        self._delivery.refuse(model.number, NOT_WANTED)
        if self._command:
            self._command.send(outcome)
        self._pool.release(model)
        self._tasks.start(self._models.open(), self._now_s())
        self._end_if_done()

    def keep_learned(self) -> None:
        """Write the measured cost of each sample to a file, for later evaluations."""
        write_atomic(self._learned, encode_history(self._policy.state.priors.history()))

    def _end_if_done(self) -> None:
        if self._finishing and not self._models.open():
            self.ended.set()

    # Tasks and samples

    def _prepared(self, peer: Connection, prepared: messages.Prepared) -> None:
        if prepared.error:
            self.model_failed(None, prepared.error, wrong_use=True)
            return
        self._tasks.prepared(peer, prepared)
        self._tasks.start(self._models.open(), self._now_s())

    def _task_ended(self, peer: Connection, ended: messages.TaskEnded) -> None:
        model = self._models.get(ended.model)
        if model is None or model.outcome is not None:
            return
        if ended.error and self._tasks.is_elsewhere(ended.model, ended.task, peer.hello.node):
            return  # a refused client, whose task runs elsewhere
        outcome = messages.TaskOutcome(
            model=ended.model, task=ended.task, result=ended.result, error=ended.error
        )
        if not self._tasks.ended(outcome):
            return
        counts = self._counts.take(ended.model, ended.task, self._now_s())
        self._timeline.task(
            outcome, since_s=counts.since_s, samples=counts.samples, reused=counts.reused
        )
        self._open_requests.drop(ended.model, ended.task)
        if self._command:
            self._command.send(outcome)
        if self._tasks.are_all_ended(ended.model):
            self._end_model(model)

    def _holding(self, peer: Connection, message: messages.Holding) -> None:
        self._dispatcher.holding(peer, message)
        if self._pool.is_complete():
            self._samples.settle()

    # Commits

    async def commit_forever(self) -> None:
        """Commit in batches until cancelled.

        Raises:
            JournalError: the disk is full or failing.
        """
        while True:
            await self._commits.wait()
            await self.commit()

    async def commit(self) -> None:
        """Commit everything queued so far, and deliver the samples that this finished.

        Raises:
            JournalError: the disk is full or failing.
        """
        await self._commits.commit()
        self._delivery.send()
        self._run_policy()

    # Metrics

    def _sample_measured(self, peer: Connection, result: messages.SampleMeasured) -> None:
        samples, losses = self._measurements.ended(result)
        if samples:
            self._timeline.metric(peer.hello.node, samples[0], result.seconds, result.error)
        died = (
            f"the process that computed its metric died {losses} times: {result.error}"
            if result.lost
            else ""
        )
        for sample in samples:
            if result.measured:
                records = self._measurements.records(sample.model, result)
                self._commits.add_metric(sample, records, result.measured)
            else:
                self._samples.unmeasurable(sample, error=died)

    # The policy

    def _run_policy(self) -> None:
        for action in self._policy.actions():
            self._act(action)

    def _act(self, action: events.Action) -> None:
        match action:
            case events.SendRequests():
                self._dispatcher.ask(action)
            case events.Recall():
                self._dispatcher.recall(action)
            case events.Measure():
                self._measurements.grant(action.sample, action.node)
            case events.Swap():
                self._pool.swap(action.engine, action.model)

    # Time

    def tick(self) -> None:
        """Do the periodic work of all parts, twice a second, and send the progress."""
        self._pool.tick()
        self._timeline.flush()
        self._samples.take_early()
        self._samples.plan_settled()
        # A former coordinator may have died after a model's last task ended, before the model did.
        for model in self._models.open():
            if model.answers is not None and self._tasks.are_all_ended(model.number):
                self._end_model(model)
        self._tasks.start(self._models.open(), self._now_s())
        self._measurements.start_waiting()
        self._policy.put(events.Tick(now_s=self._now_s()))
        self._run_policy()
        if self._command:
            status = self._counts.status(
                self._pool,
                self._policy.state,
                now_s=self._timeline.since_start_s(self._now_s()),
                delivered=self._delivery.count,
                answered_s=self._dispatcher.answered_s,
                draining=self._draining,
            )
            self._command.send(status)

    async def drain(self) -> None:
        """Wind down after the command is gone: let engines finish begun requests.

        The engines have at most `linger_s` seconds, and get no further requests.
        """
        self._draining = True
        self._policy.close()
        deadline_s = self._now_s() + self._config.linger_s
        self._dispatcher.recall_everything()
        while self._now_s() < deadline_s and self._dispatcher.is_under_way():
            await asyncio.sleep(_DRAIN_POLL_S)
        await self.commit()

    def stop_everyone(self) -> None:
        """Send `Stop` to all hosts, engines, clients and nodes."""
        for host in self._tasks.hosts.values():
            host.peer.send(messages.Stop())
        for slot in self._pool.slots.values():
            if slot.peer:
                slot.peer.send(messages.Stop())
        self._delivery.stop_clients()
        for node in self._pool.nodes.values():
            node.peer.send(messages.Stop())

    def close(self, state: str) -> None:
        """Write the end of the evaluation into the timeline and close the files."""
        self._pool.record_end()
        self._timeline.end(state)
        self._open_requests.close()
        self._timeline.close()

    def _now_s(self) -> float:
        return self._clock.monotonic_s()
