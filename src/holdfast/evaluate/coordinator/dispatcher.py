"""Send requests to engines, and handle their answers."""

from holdfast.core.clock import Clock
from holdfast.evaluate.coordinator.commits import Commits
from holdfast.evaluate.coordinator.engine_pool import EnginePool
from holdfast.evaluate.coordinator.open_requests import OpenRequest, OpenRequests, ResumedRequests
from holdfast.evaluate.coordinator.policy_queue import PolicyQueue
from holdfast.evaluate.coordinator.sample_queue import SampleQueue
from holdfast.evaluate.coordinator.timeline_writer import TimelineWriter
from holdfast.evaluate.policy import events
from holdfast.evaluate.wire import messages
from holdfast.evaluate.wire.server import Connection

_MAX_REFUSALS = 3  # after as many refusals by running engines, the request itself is at fault
_NO_ENGINE = -1  # reported to the policy for an answer without a known engine


class Dispatcher:
    """Send requests to engines as the policy decides, and handle the answers.

    Args:
        clock: the clock for events.
        policy: receives an event for each answer.
        open_requests: holds the requests without an answer.
        pool: the engines.
        resumed: the requests that engines hold from before a restart of the coordinator.
        samples: fails the samples of requests that no engine can answer.
        commits: writes the answers into the journals.
        timeline: records the engines' work.
    """

    def __init__(
        self,
        clock: Clock,
        policy: PolicyQueue,
        open_requests: OpenRequests,
        pool: EnginePool,
        resumed: ResumedRequests,
        samples: SampleQueue,
        commits: Commits,
        timeline: TimelineWriter,
    ) -> None:
        self._clock, self._policy, self._open_requests, self._pool = (
            clock,
            policy,
            open_requests,
            pool,
        )
        self._resumed, self._samples, self._commits = resumed, samples, commits
        self._timeline = timeline
        self.answered_s = 0.0
        """The engine-seconds that all answers so far cost in full batches."""

    def ask(self, action: events.SendRequests) -> None:
        """Send to an engine the requests that the policy chose for it."""
        slot = self._pool.slot_of(action.engine)
        if slot is None or slot.serving is None:
            return  # the engine is gone; the policy receives its `EngineLeft` next
        sent = []
        for number in action.requests:
            request = self._open_requests.request(number)
            if request is None:
                self._policy.put(
                    events.RequestRefused(
                        now_s=self._clock.monotonic_s(),
                        engine=action.engine,
                        request=number,
                        retry=False,
                    )
                )
                continue
            # The engine may still hold the key for an earlier request that was closed.
            if (former := slot.sent.get(request.key, number)) != number:
                self._policy.put(
                    events.Recalled(
                        now_s=self._clock.monotonic_s(), engine=action.engine, requests=(former,)
                    )
                )
            slot.sent[request.key] = number
            sent.append((request.key, self._open_requests.body(request)))
        if sent and slot.peer:  # an unconnected engine reports its requests when it reconnects
            slot.peer.send(messages.AnswerRequests(model=slot.serving, requests=sent))

    def recall(self, action: events.Recall) -> None:
        """Recall requests from an engine, which returns the ones that it has not begun."""
        slot = self._pool.slot_of(action.engine)
        if slot and slot.peer:
            wanted = set(action.requests)  # another engine may have answered some by now
            slot.peer.send(
                messages.TakeBack(
                    keys=[key for key, number in slot.sent.items() if number in wanted]
                )
            )

    def recall_everything(self) -> None:
        """Recall from all engines the requests that they have not begun."""
        for slot in self._pool.slots.values():
            if slot.peer and slot.sent:
                slot.peer.send(messages.TakeBack(keys=list(slot.sent)))

    def is_under_way(self) -> bool:
        """Return True if a connected engine holds requests."""
        return any(slot.sent for slot in self._pool.slots.values() if slot.peer)

    def done(self, peer: Connection, message: messages.Done) -> None:
        """Handle an engine's answers and failures."""
        slot = self._pool.slots.get(peer.hello.name)
        for done in message.done:
            request = self._open_requests.request_of(message.model, done.key)
            # Plan the request only after the commit.
            if not done.error and (request is None or not request.is_planned):
                self._resumed.came_early(message.model, done.key)
            else:
                self._resumed.came(message.model, done.key)
            # Match by model too: two models may have equal requests, and a message that was sent
            # again after a cut may be about the previous model.
            requests = (
                slot.sent.pop(done.key, None)
                if slot is not None and slot.serving == message.model
                else None
            )
            # Without a request, the answer is only kept, since a request may follow.
            if slot is None or request is None:
                if slot is not None and slot.number is not None and requests is not None:
                    self._over(slot.number, requests, done)
                continue
            self._timeline.request(slot.place, request, done, message.now_s)
            engine = slot.number if requests == request.number else None
            if slot.number is not None and requests is not None and engine is None:
                self._over(slot.number, requests, done)
            if done.error:
                self._refused(request, engine, done.error)
            elif request.is_planned:
                self._answered(request, engine, done)
        self._commits.add(peer, message)

    def _answered(
        self, request: OpenRequest, engine: int | None, done: messages.DoneRequest
    ) -> None:
        if curve := self._policy.state.reference:
            self.answered_s += curve.saturated_s(request.prompt_tokens, done.new_tokens)
        self._policy.put(
            events.Answered(
                now_s=self._clock.monotonic_s(),
                engine=_NO_ENGINE if engine is None else engine,
                request=request.number,
                new_tokens=done.new_tokens,
                engine_s=done.finished_s - done.started_s,
            )
        )

    def _over(self, engine: int, request: int, done: messages.DoneRequest) -> None:
        """Clear a request from an engine that holds it, after another engine answered first."""
        self._policy.put(
            events.Answered(
                now_s=self._clock.monotonic_s(),
                engine=engine,
                request=request,
                new_tokens=done.new_tokens,
                engine_s=done.finished_s - done.started_s,
            )
        )

    def _refused(self, request: OpenRequest, engine: int | None, why: str) -> None:
        request.refusals += 1
        retry = request.refusals < _MAX_REFUSALS
        if engine is not None:
            self._policy.put(
                events.RequestRefused(
                    now_s=self._clock.monotonic_s(),
                    engine=engine,
                    request=request.number,
                    retry=retry,
                )
            )
        if not retry:
            self._samples.unanswerable(request, why)

    def given_back(self, peer: Connection, message: messages.GivenBack) -> None:
        """Handle requests that an engine gave back without having begun them."""
        slot = self._pool.slots.get(peer.hello.name)
        if slot is None or slot.number is None:
            return
        numbers = tuple(slot.sent.pop(key) for key in message.keys if key in slot.sent)
        if numbers:
            self._policy.put(
                events.Recalled(
                    now_s=self._clock.monotonic_s(), engine=slot.number, requests=numbers
                )
            )

    def holding(self, peer: Connection, message: messages.Holding) -> None:
        """Compare the requests that a reconnected engine holds with the requests sent to it.

        Requests that were lost with the connection go back to the policy. Requests from before a
        restart of the coordinator are recorded, so that their answers are awaited.
        """
        slot = self._pool.slots.get(peer.hello.name)
        if slot is None:
            return
        held, slot.has_sent_all = set(message.keys), True
        if never := [key for key in slot.sent if key not in held or slot.serving != message.model]:
            self.given_back(peer, messages.GivenBack(keys=never))
        for key in held - slot.sent.keys():
            self._resumed.held_by(message.model, key, slot.name)
