"""When a judge may be asked: limits on requests, tokens, cost and concurrency that no window of time ever exceeds.

A pure function of what it knows and what it hears (every time is `now_s`, given by the caller), the same in the judge's
proxy and in the simulator.

The window slides exactly. A request counts from when it is sent until a window after its answer came: whenever in
between the judge's own clock counted it, no window of that clock holds more than the limit. What was reserved for a
request (the most it can take) counts until its answer says what it took.

Beneath the limits the number in flight adapts by additive increase and multiplicative decrease (Chiu and Jain 1989):
one more for each round that went well, half of them after a 429 or a 5xx, and a pause as long as the judge asks for.
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
    """What a judge may be asked at most; infinity for no limit.

    Attributes:
        requests_per_minute: sent, whatever came of them.
        tokens_per_minute: of prompts and answers together.
        cost_microdollars: of everything that the evaluation ever asked.
        concurrency: requests in flight.
    """

    requests_per_minute: float = math.inf
    tokens_per_minute: float = math.inf
    cost_microdollars: float = math.inf
    concurrency: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeRequest:
    """A request to send, after those that wait. `tokens` and `cost_microdollars` are the most it can take."""

    now_s: float
    request: int
    tokens: int
    cost_microdollars: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Came:
    """An answer came, or it is given up as unknown; with what it took, as far as that is known."""

    now_s: float
    request: int
    tokens: int
    cost_microdollars: int
    outcome: Outcome = "well"
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """A request of an earlier life of this quota: in the window until a window after `until_s`, its cost for ever.

    That cost is 0 for what another evaluation asked: it has a limit of its own.
    """

    until_s: float
    tokens: int
    cost_microdollars: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """Time went by."""

    now_s: float


@dataclass(frozen=True, slots=True)
class Send:
    """Send this request now."""

    request: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """This request can never be sent: `limit` is in the way."""

    request: int
    limit: Literal["cost", "tokens", "requests"]


@dataclass(frozen=True, slots=True)
class Wake:
    """Nothing more can be sent before `at_s` unless an answer comes: say `Passed` then."""

    at_s: float


Event = JudgeRequest | Came | Remembered | Passed
Action = Send | Refuse | Wake


@dataclass(slots=True)
class QuotaState:
    """What the quota knows. Made once; changed by `decide` alone."""

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
    settled: deque[tuple[float, int]] = field(
        default_factory=deque
    )  # when it leaves the window, tokens

    def __post_init__(self) -> None:
        self.allowed = self.allowed or float(self.limits.concurrency)


def decide(state: QuotaState, event: Event) -> list[Action]:
    """What to do upon an event. Times of events do not go back."""
    match event:
        case Remembered():
            state.spent_microdollars += event.cost_microdollars
            _settle(state, event.until_s + WINDOW_S, event.tokens)
            return []
        case JudgeRequest():
            state.waiting.append(event)
        case Came():
            _came(state, event)
        case Passed():
            pass
    return _send(state, event.now_s)


def _came(state: QuotaState, event: Came) -> None:
    sent_s, asked = state.flying.pop(event.request)
    state.flying_tokens -= asked.tokens
    state.reserved_microdollars -= asked.cost_microdollars
    state.spent_microdollars += event.cost_microdollars
    _settle(state, event.now_s + WINDOW_S, event.tokens)
    if event.outcome == "well":
        state.failures = 0
        state.allowed = min(float(state.limits.concurrency), state.allowed + 1.0 / state.allowed)
    elif event.outcome == "overloaded":
        if sent_s >= state.last_decrease_s:  # those sent before it were of the same overload
            state.allowed = max(1.0, state.allowed / 2.0)
            state.last_decrease_s = event.now_s
            state.failures += 1
        pause_s = event.retry_after_s
        if pause_s is None:
            pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** max(0, state.failures - 1))
        state.paused_until_s = max(state.paused_until_s, event.now_s + pause_s)


def _settle(state: QuotaState, leaves_s: float, tokens: int) -> None:
    if state.settled and leaves_s < state.settled[-1][0]:
        leaves_s = state.settled[-1][0]  # remembered out of order: later is on the safe side
    state.settled.append((leaves_s, tokens))
    state.settled_tokens += tokens


def _send(state: QuotaState, now_s: float) -> list[Action]:
    while state.settled and state.settled[0][0] <= now_s:
        state.settled_tokens -= state.settled.popleft()[1]
    actions: list[Action] = []
    while state.waiting:
        asked = state.waiting[0]
        if limit := _never(state, asked):
            state.waiting.popleft()
            actions.append(Refuse(asked.request, limit))
            continue
        at_s = _earliest_s(state, asked, now_s)
        if at_s > now_s:
            if at_s < math.inf:
                actions.append(Wake(at_s))
            break
        state.waiting.popleft()
        state.flying[asked.request] = (now_s, asked)
        state.flying_tokens += asked.tokens
        state.reserved_microdollars += asked.cost_microdollars
        actions.append(Send(asked.request))
    return actions


def _never(state: QuotaState, asked: JudgeRequest) -> Literal["", "cost", "tokens", "requests"]:
    if state.limits.requests_per_minute < 1:
        return "requests"
    if asked.tokens > state.limits.tokens_per_minute:
        return "tokens"
    return (
        "cost"
        if state.spent_microdollars + asked.cost_microdollars > state.limits.cost_microdollars
        else ""
    )


def _earliest_s(state: QuotaState, asked: JudgeRequest, now_s: float) -> float:
    """When it can be sent at the earliest; infinity if only an answer can make room."""
    limits = state.limits
    if len(state.flying) >= math.floor(state.allowed):
        return math.inf
    if (
        state.spent_microdollars + state.reserved_microdollars + asked.cost_microdollars
        > limits.cost_microdollars
    ):
        return math.inf  # what flies may turn out cheaper than reserved
    at_s = max(now_s, state.paused_until_s)
    requests = len(state.flying) + len(state.settled) + 1
    tokens = state.flying_tokens + state.settled_tokens + asked.tokens
    for leaves_s, settled_tokens in state.settled:
        if requests <= limits.requests_per_minute and tokens <= limits.tokens_per_minute:
            return at_s
        requests -= 1
        tokens -= settled_tokens
        at_s = max(at_s, leaves_s)
    fits = requests <= limits.requests_per_minute and tokens <= limits.tokens_per_minute
    return at_s if fits else math.inf
