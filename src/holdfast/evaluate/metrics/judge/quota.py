"""Limit the requests, tokens, cost and concurrency of a judge, in every window of time.

The quota is a pure function of its state and of events, whose times the caller sets (`now_s`). So
the judge's proxy and the simulator run the same code.

The window slides exactly. A request counts from the moment it is sent until one window's length
after its answer. The judge itself counts a request at some moment in between, so no window of the
judge's own clock exceeds the limit. The reservation for a request, which is its largest possible
use, counts until the answer states the actual use.

Within the limits, the number of requests in flight adapts by additive increase and multiplicative
decrease (Chiu and Jain 1989). The number grows by one for each round of successful requests. After
a response 429 or 5xx, the number is halved, and requests pause for as long as the judge demands.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["well", "overloaded", "failed"]
WINDOW_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaLimits:
    """Limit the requests to a judge; infinity means no limit.

    Attributes:
        requests_per_minute: the number of sent requests; failed requests count too.
        tokens_per_minute: the number of tokens of prompts and answers together.
        cost_microdollars: the cost of the whole evaluation.
        concurrency: the number of requests in flight.
    """

    requests_per_minute: float = math.inf
    tokens_per_minute: float = math.inf
    cost_microdollars: float = math.inf
    concurrency: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeRequest:
    """A new request, which queues behind the requests that already wait.

    `tokens` and `cost_microdollars` are the largest use that the request can have.
    """

    now_s: float
    request: int
    tokens: int
    cost_microdollars: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeAnswered:
    """Record that a request to the judge has ended, with an answer or without a known outcome.

    `tokens` and `cost_microdollars` are what the request used. If the judge did not report the use,
    they are the amounts that were reserved for the request.
    """

    now_s: float
    request: int
    tokens: int
    cost_microdollars: int
    outcome: Outcome = "well"
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """A request from before a restart of the proxy.

    The request counts in the window until one window's length after `until_s`.

    Its cost counts towards the limit for ever. The cost is 0 for a request of another evaluation,
    whose cost has a limit of its own.
    """

    until_s: float
    tokens: int
    cost_microdollars: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """Time has passed, so that it may now be possible to send waiting requests."""

    now_s: float


@dataclass(frozen=True, slots=True)
class Send:
    """Send this request now."""

    request: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Never send this request: its use exceeds the limit named by `limit`."""

    request: int
    limit: Literal["cost", "tokens", "requests"]


@dataclass(frozen=True, slots=True)
class Wake:
    """Pass the event `Passed` to `decide` at `at_s`.

    Before that time, a request can be sent only if an answer arrives.
    """

    at_s: float


Event = JudgeRequest | JudgeAnswered | Remembered | Passed
Action = Send | Refuse | Wake


@dataclass(slots=True)
class QuotaState:
    """Hold the quota's state; only `decide` changes it."""

    limits: QuotaLimits
    allowed: float = 0.0
    paused_until_s: float = -math.inf
    failures: int = 0
    last_decrease_s: float = -math.inf
    spent_microdollars: int = 0
    reserved_microdollars: int = 0
    flying_tokens: int = 0
    settled_tokens: int = 0
    waiting: deque[JudgeRequest] = field(default_factory=deque)
    flying: dict[int, tuple[float, JudgeRequest]] = field(default_factory=dict)
    # (time at which the request leaves the window, tokens)
    settled: deque[tuple[float, int]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.allowed = self.allowed or float(self.limits.concurrency)


def decide(state: QuotaState, event: Event) -> list[Action]:
    """Return the actions that follow from an event; the times of events must never go back."""
    match event:
        case Remembered():
            state.spent_microdollars += event.cost_microdollars
            _settle(state, event.until_s + WINDOW_S, event.tokens)
            return []
        case JudgeRequest():
            state.waiting.append(event)
        case JudgeAnswered():
            _answered(state, event)
        case Passed():
            pass
    return _send(state, event.now_s)


def _answered(state: QuotaState, event: JudgeAnswered) -> None:
    sent_s, request = state.flying.pop(event.request)
    state.flying_tokens -= request.tokens
    state.reserved_microdollars -= request.cost_microdollars
    state.spent_microdollars += event.cost_microdollars
    _settle(state, event.now_s + WINDOW_S, event.tokens)
    if event.outcome == "well":
        state.failures = 0
        state.allowed = min(float(state.limits.concurrency), state.allowed + 1.0 / state.allowed)
    elif event.outcome == "overloaded":
        if sent_s >= state.last_decrease_s:  # requests sent earlier belong to the same overload
            state.allowed = max(1.0, state.allowed / 2.0)
            state.last_decrease_s = event.now_s
            state.failures += 1
        pause_s = event.retry_after_s
        if pause_s is None:
            pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** max(0, state.failures - 1))
        state.paused_until_s = max(state.paused_until_s, event.now_s + pause_s)


def _settle(state: QuotaState, leaves_s: float, tokens: int) -> None:
    if state.settled and leaves_s < state.settled[-1][0]:
        leaves_s = state.settled[-1][0]  # out of order: the later time is the safe one
    state.settled.append((leaves_s, tokens))
    state.settled_tokens += tokens


def _send(state: QuotaState, now_s: float) -> list[Action]:
    while state.settled and state.settled[0][0] <= now_s:
        state.settled_tokens -= state.settled.popleft()[1]
    actions: list[Action] = []
    while state.waiting:
        request = state.waiting[0]
        if limit := _never(state, request):
            state.waiting.popleft()
            actions.append(Refuse(request.request, limit))
            continue
        at_s = _earliest_s(state, request, now_s)
        if at_s > now_s:
            if at_s < math.inf:
                actions.append(Wake(at_s))
            break
        state.waiting.popleft()
        state.flying[request.request] = (now_s, request)
        state.flying_tokens += request.tokens
        state.reserved_microdollars += request.cost_microdollars
        actions.append(Send(request.request))
    return actions


def _never(state: QuotaState, request: JudgeRequest) -> Literal["", "cost", "tokens", "requests"]:
    if state.limits.requests_per_minute < 1:
        return "requests"
    if request.tokens > state.limits.tokens_per_minute:
        return "tokens"
    return (
        "cost"
        if state.spent_microdollars + request.cost_microdollars > state.limits.cost_microdollars
        else ""
    )


def _earliest_s(state: QuotaState, request: JudgeRequest, now_s: float) -> float:
    """Return the earliest time to send a request; infinity if an answer must make room first."""
    limits = state.limits
    if len(state.flying) >= math.floor(state.allowed):
        return math.inf
    if (
        state.spent_microdollars + state.reserved_microdollars + request.cost_microdollars
        > limits.cost_microdollars
    ):
        return math.inf  # requests in flight may cost less than reserved
    at_s = max(now_s, state.paused_until_s)
    requests = len(state.flying) + len(state.settled) + 1
    tokens = state.flying_tokens + state.settled_tokens + request.tokens
    for leaves_s, settled_tokens in state.settled:
        if requests <= limits.requests_per_minute and tokens <= limits.tokens_per_minute:
            return at_s
        requests -= 1
        tokens -= settled_tokens
        at_s = max(at_s, leaves_s)
    fits = requests <= limits.requests_per_minute and tokens <= limits.tokens_per_minute
    return at_s if fits else math.inf
