"""Make requests to the judge wait until the quota admits them, and record their actual use.

An admitted request is in the journal before it is sent, so that a restarted gate still counts it.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from holdfast.core.clock import Clock
from holdfast.evaluate.metrics.judge.journal import JudgeJournal
from holdfast.evaluate.metrics.judge.quota import (
    Event,
    JudgeAnswered,
    JudgeRequest,
    Outcome,
    Passed,
    QuotaLimits,
    QuotaState,
    Refuse,
    Remembered,
    Send,
    Wake,
    decide,
)


@dataclass(slots=True)
class _Waiting:
    turn: "asyncio.Future[str]"  # the limit that forbids the request, or "" to send it
    asked_s: float


class JudgeGate:
    """Make requests wait until the quota admits them.

    `waited_s` is the sum of the waiting times of all requests that no longer wait.
    """

    def __init__(
        self,
        limits: QuotaLimits,
        journal: JudgeJournal,
        clock: Clock,
        pause: Callable[[float], Awaitable[None]],
    ) -> None:
        """Load earlier use from the journal.

        `pause` waits for some seconds; tests replace it.

        Raises:
            OSError: the journal cannot be written.
        """
        self._journal = journal
        self._clock = clock
        self._pause = pause
        past = journal.past
        # Start from wall time and add monotonic time, so that setting the clock back cannot reopen
        # a window.
        self._epoch_s = max(clock.now_s(), past.last_s) - clock.monotonic_s()
        self._quota = QuotaState(limits)
        for event in past.settled:
            decide(self._quota, event)
        for left in past.unsettled:  # perhaps answered, so count the request as spent now
            now_s, cost = self.now_s(), left.cost_microdollars
            journal.settle(now_s, left.request, left.tokens, cost)
            paid = cost if left.is_ours else 0
            decide(
                self._quota, Remembered(until_s=now_s, tokens=left.tokens, cost_microdollars=paid)
            )
        self._next_request = past.next_request
        self._waiting: dict[int, _Waiting] = {}
        self._alarm: asyncio.Task[None] | None = None
        self._alarm_s = math.inf
        self.waited_s = 0.0

    def now_s(self) -> float:
        """Return a time in seconds that never goes back, even over restarts of the gate."""
        return self._epoch_s + self._clock.monotonic_s()

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return len(self._waiting)

    @property
    def spent_microdollars(self) -> int:
        """The evaluation's cost so far, without the reservations of requests in flight."""
        return self._quota.spent_microdollars

    async def admit(self, tokens: int, cost_microdollars: int) -> tuple[int, str]:
        """Wait until the quota admits a request.

        Args:
            tokens: the largest number of tokens that the request can use.
            cost_microdollars: the highest cost that the request can have.

        Returns:
            The request's number, and "" if the request may be sent; otherwise the name of the limit
            because of which the request can never be sent.

        Raises:
            OSError: the journal cannot be written.
        """
        request = self._next_request
        self._next_request += 1
        turn: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        now_s = self.now_s()
        self._waiting[request] = _Waiting(turn, now_s)
        self._apply(
            JudgeRequest(
                now_s=now_s, request=request, tokens=tokens, cost_microdollars=cost_microdollars
            )
        )
        limit = await turn
        if not limit:
            self._journal.reserve(self.now_s(), request, tokens, cost_microdollars)
        return request, limit

    def settle(
        self,
        request: int,
        tokens: int,
        cost_microdollars: int,
        outcome: Outcome,
        *,
        retry_after_s: float | None,
    ) -> None:
        """Record the actual use of an admitted request.

        Raises:
            OSError: the journal cannot be written.
        """
        now_s = self.now_s()
        self._journal.settle(now_s, request, tokens, cost_microdollars)
        self._apply(
            JudgeAnswered(
                now_s=now_s,
                request=request,
                tokens=tokens,
                cost_microdollars=cost_microdollars,
                outcome=outcome,
                retry_after_s=retry_after_s,
            )
        )

    def _apply(self, event: Event) -> None:
        for action in decide(self._quota, event):
            match action:
                case Send(request) | Refuse(request):
                    waiting = self._waiting.pop(request)
                    self.waited_s += self.now_s() - waiting.asked_s
                    waiting.turn.set_result("" if isinstance(action, Send) else action.limit)
                case Wake(at_s):
                    self._wake(at_s)

    def _wake(self, at_s: float) -> None:
        if self._alarm and not self._alarm.done():
            if self._alarm_s <= at_s:
                return
            self._alarm.cancel()
        self._alarm_s = at_s
        self._alarm = asyncio.ensure_future(self._ring(at_s))

    async def _ring(self, at_s: float) -> None:
        await self._pause(max(0.0, at_s - self.now_s()))
        self._alarm = None
        self._apply(Passed(now_s=self.now_s()))

    def close(self) -> None:
        """Cancel the timer that would admit further requests."""
        if self._alarm:
            self._alarm.cancel()
