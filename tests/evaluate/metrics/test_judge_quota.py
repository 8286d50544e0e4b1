"""Check the judge's quota: no window exceeds a limit, and no admissible request waits."""

import math
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.evaluate.metrics.judge.quota import (
    WINDOW_S,
    Action,
    JudgeAnswered,
    JudgeRequest,
    Passed,
    QuotaLimits,
    QuotaState,
    Refuse,
    Remembered,
    Send,
    Wake,
    decide,
)


def _ask(request: int, now_s: float, tokens: int = 1, cost: int = 0) -> JudgeRequest:
    return JudgeRequest(now_s=now_s, request=request, tokens=tokens, cost_microdollars=cost)


def _came(
    request: int,
    now_s: float,
    tokens: int = 1,
    cost: int = 0,
    outcome: str = "well",
    after: float | None = None,
):
    return JudgeAnswered(
        now_s=now_s,
        request=request,
        tokens=tokens,
        cost_microdollars=cost,
        outcome=outcome,
        retry_after_s=after,
    )


def test_sends_at_once_within_the_limits() -> None:
    state = QuotaState(QuotaLimits(requests_per_minute=2))
    assert decide(state, _ask(0, 0.0)) == [Send(0)]
    assert decide(state, _ask(1, 0.0)) == [Send(1)]
    assert decide(state, _ask(2, 0.0)) == []
    assert decide(state, _came(0, 1.0)) == [Wake(61.0)]
    assert decide(state, Passed(now_s=60.9)) == [Wake(61.0)]
    assert decide(state, Passed(now_s=61.0)) == [Send(2)]


def test_settles_tokens_to_what_was_used() -> None:
    state = QuotaState(QuotaLimits(tokens_per_minute=100))
    assert decide(state, _ask(0, 0.0, tokens=90)) == [Send(0)]
    assert decide(state, _ask(1, 0.0, tokens=80)) == []
    assert decide(state, _came(0, 1.0, tokens=20)) == [Send(1)]


def test_refuses_what_never_fits() -> None:
    state = QuotaState(QuotaLimits(tokens_per_minute=100, cost_microdollars=50))
    assert decide(state, _ask(0, 0.0, tokens=101)) == [Refuse(0, "tokens")]
    assert decide(state, _ask(1, 0.0, cost=51)) == [Refuse(1, "cost")]
    assert decide(state, _ask(2, 0.0, cost=30)) == [Send(2)]
    assert decide(state, _ask(3, 0.0, cost=30)) == []  # the first may turn out cheaper
    assert decide(state, _came(2, 1.0, cost=30)) == [Refuse(3, "cost")]


def test_in_the_order_asked() -> None:
    state = QuotaState(QuotaLimits(concurrency=1))
    for request in (2, 0, 1):
        decide(state, _ask(request, 0.0))
    assert [decide(state, _came(before, 1.0)) for before in (2, 0)] == [[Send(0)], [Send(1)]]


def test_halves_once_for_one_overload_and_waits_as_asked() -> None:
    state = QuotaState(QuotaLimits(concurrency=8))
    for request in range(8):
        decide(state, _ask(request, 0.0))
    for request in range(8):
        decide(state, _came(request, 1.0, outcome="overloaded", after=30.0))
    assert state.allowed == 4.0
    assert decide(state, _ask(8, 2.0)) == [Wake(31.0)]
    assert decide(state, Passed(now_s=31.0)) == [Send(8)]
    decide(state, _came(8, 32.0))
    assert state.allowed == 4.25


def test_waits_longer_each_time_where_nothing_is_asked_for() -> None:
    state = QuotaState(QuotaLimits(concurrency=8))
    now_s, pauses = 0.0, []
    for request in range(9):
        assert decide(state, _ask(request, now_s)) == [Send(request)]
        decide(state, _came(request, now_s, outcome="overloaded"))
        pauses.append(state.paused_until_s - now_s)
        now_s = state.paused_until_s
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]


@dataclass
class World:
    """A judge that counts between send and answer, and a proxy that may lose its memory."""

    limits: QuotaLimits
    now_s: float = 0.0
    counted: list[tuple[float, int]] = field(default_factory=list)  # when, tokens
    paid: int = 0
    in_flight: dict[int, tuple[float, int, int]] = field(default_factory=dict)
    past: list[Remembered] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state = QuotaState(self.limits)

    def act(self, actions: list[Action], asked: dict[int, JudgeRequest]) -> None:
        for action in actions:
            if isinstance(action, Send):
                each = asked[action.request]
                self.in_flight[action.request] = (self.now_s, each.tokens, each.cost_microdollars)
        assert len(self.in_flight) <= self.limits.concurrency

    def check(self) -> None:
        assert self.paid <= self.limits.cost_microdollars
        times = sorted(self.counted)
        for index, (start_s, _) in enumerate(times):
            window = [tokens for at_s, tokens in times[index:] if at_s < start_s + WINDOW_S]
            assert len(window) <= self.limits.requests_per_minute
            assert sum(window) <= self.limits.tokens_per_minute


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(1, 40), st.integers(0, 30)),
        st.tuples(st.just("answer"), st.integers(0, 5), st.floats(0, 1), st.floats(0, 1)),
        st.tuples(st.just("overloaded"), st.integers(0, 5), st.floats(0, 90)),
        st.tuples(st.just("wait"), st.floats(0, 70)),
        st.tuples(st.just("kill"), st.floats(0, 5)),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(
    steps=STEPS, requests=st.integers(1, 5), tokens=st.integers(20, 100), cost=st.integers(0, 200)
)
def test_no_window_exceeds_the_quota_even_across_restarts(
    steps: list, requests: int, tokens: int, cost: int
) -> None:
    limits = QuotaLimits(
        requests_per_minute=requests,
        tokens_per_minute=tokens,
        cost_microdollars=cost,
        concurrency=4,
    )
    world = World(limits)
    asked: dict[int, JudgeRequest] = {}
    for number, step in enumerate(steps):
        match step:
            case ("ask", int(size), int(price)):
                asked[number] = _ask(number, world.now_s, size, price)
                world.act(decide(world.state, asked[number]), asked)
            case ("answer", int(index), float(share), float(moment)) if world.in_flight:
                request = sorted(world.in_flight)[index % len(world.in_flight)]
                sent_s, size, price = world.in_flight.pop(request)
                used, paid = math.ceil(size * share), math.ceil(price * share)
                world.counted.append((sent_s + moment * (world.now_s - sent_s), used))
                world.paid += paid
                world.past.append(
                    Remembered(until_s=world.now_s, tokens=used, cost_microdollars=paid)
                )
                world.act(decide(world.state, _came(request, world.now_s, used, paid)), asked)
            case ("overloaded", int(index), float(after)) if world.in_flight:
                request = sorted(world.in_flight)[index % len(world.in_flight)]
                sent_s, *_ = world.in_flight.pop(request)
                world.counted.append((sent_s, 0))
                world.past.append(Remembered(until_s=world.now_s, tokens=0, cost_microdollars=0))
                world.act(
                    decide(world.state, _came(request, world.now_s, 0, 0, "overloaded", after)),
                    asked,
                )
            case ("wait", float(seconds)):
                world.now_s += seconds
                world.act(decide(world.state, Passed(now_s=world.now_s)), asked)
            case ("kill", float(seconds)):
                # The judge may have counted, and charged, all that was in flight.
                for sent_s, size, price in world.in_flight.values():
                    world.counted.append((sent_s, size))
                    world.paid += price
                    world.past.append(
                        Remembered(until_s=world.now_s, tokens=size, cost_microdollars=price)
                    )
                world.in_flight.clear()
                world.now_s += seconds
                world.state = QuotaState(limits)
                for remembered in world.past:
                    decide(world.state, remembered)
        world.check()


@settings(max_examples=50, deadline=None)
@given(requests=st.integers(1, 30), asked=st.integers(1, 90))
def test_leaves_no_quota_unused(requests: int, asked: int) -> None:
    """With immediate answers, each minute is full until no request is left."""
    state = QuotaState(QuotaLimits(requests_per_minute=requests, concurrency=1000))
    queue = [decide(state, _ask(number, 0.0)) for number in range(asked)]
    now_s, sent = 0.0, 0
    actions = [action for each in queue for action in each]
    while actions:
        answers = []
        for action in actions:
            if isinstance(action, Send):
                sent += 1
                answers += decide(state, _came(action.request, now_s))
        wakes = [action.at_s for action in answers or actions if isinstance(action, Wake)]
        sends = [action for action in answers if isinstance(action, Send)]
        if not sends and wakes:
            now_s = max(wakes)
            actions = decide(state, Passed(now_s=now_s))
        else:
            actions = sends
    assert sent == asked
    assert now_s == WINDOW_S * ((asked - 1) // requests)
