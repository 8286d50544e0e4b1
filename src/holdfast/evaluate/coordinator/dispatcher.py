"""What engines are asked, and what they say to it."""

from collections.abc import Callable

from holdfast.evaluate.coordinator.commits import Commits
from holdfast.evaluate.coordinator.engine_pool import EnginePool
from holdfast.evaluate.coordinator.open_requests import OpenRequest, OpenRequests, ResumedRequests
from holdfast.evaluate.coordinator.timeline_writer import TimelineWriter
from holdfast.evaluate.policy import events
from holdfast.evaluate.policy.state import State
from holdfast.evaluate.wire import messages
from holdfast.evaluate.wire.server import Connection

_MOST_REFUSALS = 3  # of one request, by engines that live: then it is the request
_NO_ENGINE = -1  # to the policy: one that it did not ask


class Dispatcher:
    """See the module. `emit` tells the policy; `unanswerable` hears of a request that no engine answers, and why."""

    def __init__(
        self,
        book: OpenRequests,
        fleet: EnginePool,
        awaited: ResumedRequests,
        commits: Commits,
        chronicle: TimelineWriter,
        state: State,
        *,
        emit: Callable[[events.Event], None],
        unanswerable: Callable[[OpenRequest, str], None],
        now_s: Callable[[], float],
    ) -> None:
        self._book, self._fleet, self._awaited, self._commits = book, fleet, awaited, commits
        self._chronicle, self._state = chronicle, state
        self._emit, self._unanswerable, self._now_s = emit, unanswerable, now_s
        self.answered_s = 0.0
        """Engine-seconds at saturated batch of all that was answered."""

    def ask(self, action: events.Ask) -> None:
        """The policy gives requests to an engine."""
        seat = self._fleet.seat_of(action.engine)
        if seat is None or seat.serving is None:
            return  # it is gone: the policy hears of that next
        asked = []
        for number in action.requests:
            request = self._book.request(number)
            if request is None:
                self._emit(
                    events.RequestRefused(
                        now_s=self._now_s(), engine=action.engine, request=number, retry=False
                    )
                )
                continue
            if (
                former := seat.asked.get(request.key, number)
            ) != number:  # asked for somebody who wants it no more
                self._emit(
                    events.Recalled(now_s=self._now_s(), engine=action.engine, requests=(former,))
                )
            seat.asked[request.key] = number
            asked.append((request.key, self._book.body(request)))
        if asked and seat.peer:  # else its line is cut: when it is back, it says what it has
            seat.peer.send(messages.AskEngine(model=seat.serving, requests=asked))

    def recall(self, action: events.Recall) -> None:
        """The policy wants requests back that an engine has not begun."""
        seat = self._fleet.seat_of(action.engine)
        if seat and seat.peer:
            wanted = set(action.requests)  # some may be answered by now, by another engine
            seat.peer.send(
                messages.TakeBack(
                    keys=[key for key, number in seat.asked.items() if number in wanted]
                )
            )

    def recall_everything(self) -> None:
        """No engine is to begin anything more."""
        for seat in self._fleet.seats.values():
            if seat.peer and seat.asked:
                seat.peer.send(messages.TakeBack(keys=list(seat.asked)))

    def is_under_way(self) -> bool:
        """Whether an engine holds anything."""
        return any(seat.asked for seat in self._fleet.seats.values() if seat.peer)

    def done(self, peer: Connection, message: messages.Done) -> None:
        """An engine answered, or could not."""
        seat = self._fleet.seats.get(peer.hello.name)
        for done in message.done:
            request = self._book.request_of(message.model, done.key)
            if not done.error and (
                request is None or not request.is_planned
            ):  # not to be planned until committed
                self._awaited.came_early(message.model, done.key)
            else:
                self._awaited.came(message.model, done.key)
            # The same question may be asked for two models; what is said again after a cut may be of the one before.
            asked = (
                seat.asked.pop(done.key, None)
                if seat is not None and seat.serving == message.model
                else None
            )
            if seat is None or request is None:  # nobody waits for it (yet): kept nevertheless
                if seat is not None and seat.number is not None and asked is not None:
                    self._over(seat.number, asked, done)
                continue
            self._chronicle.request(seat.place, request, done, message.now_s)
            engine = seat.number if asked == request.number else None
            if seat.number is not None and asked is not None and engine is None:
                self._over(seat.number, asked, done)
            if done.error:
                self._refused(request, engine, done.error)
            elif request.is_planned:
                self._answered(request, engine, done)
        self._commits.add(peer, message)

    def _answered(
        self, request: OpenRequest, engine: int | None, done: messages.DoneRequest
    ) -> None:
        if curve := self._state.reference:
            self.answered_s += curve.saturated_s(request.prompt_tokens, done.new_tokens)
        self._emit(
            events.Answered(
                now_s=self._now_s(),
                engine=_NO_ENGINE if engine is None else engine,
                request=request.number,
                new_tokens=done.new_tokens,
                engine_s=done.finished_s - done.started_s,
            )
        )

    def _over(self, engine: int, request: int, done: messages.DoneRequest) -> None:
        """An engine is done with what another had answered before: it holds that no more."""
        self._emit(
            events.Answered(
                now_s=self._now_s(),
                engine=engine,
                request=request,
                new_tokens=done.new_tokens,
                engine_s=done.finished_s - done.started_s,
            )
        )

    def _refused(self, request: OpenRequest, engine: int | None, why: str) -> None:
        request.refusals += 1
        retry = request.refusals < _MOST_REFUSALS
        if engine is not None:
            self._emit(
                events.RequestRefused(
                    now_s=self._now_s(), engine=engine, request=request.number, retry=retry
                )
            )
        if not retry:
            self._unanswerable(request, why)

    def given_back(self, peer: Connection, message: messages.GivenBack) -> None:
        """An engine gave back what it had not begun."""
        seat = self._fleet.seats.get(peer.hello.name)
        if seat is None or seat.number is None:
            return
        numbers = tuple(seat.asked.pop(key) for key in message.keys if key in seat.asked)
        if numbers:
            self._emit(events.Recalled(now_s=self._now_s(), engine=seat.number, requests=numbers))

    def holding(self, peer: Connection, message: messages.Holding) -> None:
        """An engine's line had been cut: what it was asked and does not hold never reached it."""
        seat = self._fleet.seats.get(peer.hello.name)
        if seat is None:
            return
        held, seat.has_said_all = set(message.keys), True
        if never := [key for key in seat.asked if key not in held or seat.serving != message.model]:
            self.given_back(peer, messages.GivenBack(keys=never))
        for key in held - seat.asked.keys():
            self._awaited.held_by(message.model, key, seat.name)
