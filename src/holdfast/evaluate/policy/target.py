"""Compute the earliest possible end, and the batch sizes that long answers need to meet it.

A full batch slows down each of its answers. So an answer that is long relative to the remaining
time goes into a smaller batch, which leaves a part of the engine unused. The target is the earliest
feasible end. With a time `H` left, an answer of `n` tokens with a metric of `m` seconds needs steps
of at most `(H - m) / n` seconds. So its batch `b` is at most `((H - m) / n - base) / sequence`, and
the answer takes `n * (base / b + sequence)` engine-seconds. The sum over all open work grows as `H`
shrinks. Bisection finds the `H` at which the sum equals `H` times the number of engines.
"""

import math
from typing import NamedTuple

from holdfast.evaluate.policy.feed import feed, open_engine
from holdfast.evaluate.policy.state import State
from holdfast.evaluate.types.engine import Curve

REVIEW_EVENTS = 1024
"""The smallest number of events between two reviews."""
OVERDUE = 0.15
"""The assumed remainder of an overdue answer, as a share of the answer's expected tokens."""
SPARE = 0.7
"""The share of the engines' time that is planned when answers run faster than the target needs."""
_BISECTIONS = 14


class Item(NamedTuple):
    """A number of similar requests, with the costs of each of them."""

    number: int
    tokens: float
    most_tokens: float
    metric_s: float
    prefill_s: float


Items = list[Item]


def review(state: State) -> None:
    """Renew all estimates.

    The cost is spread over the events between two reviews.
    """
    state.corrections = [state.priors.correction(task) for task in range(len(state.shares))]
    items: dict[int, Items] = {}
    in_flight = _look_at_engines(state, items)
    for number in state.waiting_models:
        model = state.models[number]
        found = items.setdefault(number, [])
        for queue in (model.decode, model.forward):
            queue.review(state.length_factor)
            found += [
                Item(
                    len(bucket.entries),
                    bucket.tokens * state.correction(task),
                    bucket.most_tokens * state.correction(task),
                    bucket.metric_s,
                    bucket.prefill_s,
                )
                for task, bucket in queue.buckets()
            ]
    if state.reference is not None and state.engines:
        engines = state.capacity()
        for number, found in items.items():
            model = state.models[number]
            left_s = time_left_s(found, state.reference, engines)
            model.target_s = state.now_s + left_s
            model.pace_s = state.now_s + pace_s(found, state.reference, engines, left_s)
            forward_s = sum(item.number * item.prefill_s for item in found if item.tokens <= 0)
            model.decode_limit = (
                max(1, math.ceil(engines - forward_s / left_s)) if left_s > 0 else 1 << 30
            )
    state.events_until_review, state.looked_at = max(REVIEW_EVENTS, in_flight), in_flight
    state.reviewed_s = state.now_s
    if state.waiting_models:
        for engine in state.engines.values():
            open_engine(state, engine)
        for number in sorted(state.waiting_models, key=state.rank):
            feed(state, state.models[number])


def _look_at_engines(state: State, items: dict[int, Items]) -> int:
    """Advance the clock of every engine, and add the engine's open requests to `items` by length.

    Returns:
        The number of requests in flight.
    """
    levels: dict[tuple[int, int], int] = {}
    in_flight = 0
    # Local names, since the loop uses them a hundred thousand times.
    log2, most_tokens, max_new = math.log2, state.most_tokens, state.request_max_new
    for engine in state.engines.values():
        engine.advance(state.now_s)
        in_flight += len(engine.asked)
        last, model, clock, slowness = 0.0, engine.model, engine.clock, engine.slowness
        if engine.decoding:
            for request, (_, _, begun) in engine.asked.items():
                if max_new[request]:
                    rest = tokens = most_tokens(request) * slowness
                    if begun >= 0:
                        rest += begun - clock
                        rest = max(rest, OVERDUE * tokens)
                    last = max(last, rest)
                    level = model, int(log2(rest + 1.0) * 4.0)
                    levels[level] = levels.get(level, 0) + 1
        engine.last_clock = engine.clock + last
        if engine.forward_s > 0:
            items.setdefault(engine.model, []).append(Item(1, 0.0, 0.0, 0.0, engine.forward_s))
    for (model, octave), count in levels.items():
        rest = 2.0 ** ((octave + 0.5) / 4.0)
        items.setdefault(model, []).append(Item(count, rest, rest, 0.0, 0.0))
    return in_flight


def needs_s(items: Items, curve: Curve, left_s: float) -> float:
    """Return the engine-seconds of items if all of them must end within `left_s`."""
    base_s, sequence_s, most = curve.step_base_s, max(curve.step_sequence_s, 1e-12), curve.max_batch
    total_s = 0.0
    for count, tokens, most_tokens, metric_s, prefill_s in items:
        total_s += count * prefill_s
        if tokens > 0:
            batch = ((left_s - metric_s) / most_tokens - base_s) / sequence_s
            total_s += count * tokens * (base_s / min(max(batch, 1.0), most) + sequence_s)
    return total_s


def time_left_s(items: Items, curve: Curve, engines: float) -> float:
    """Return the shortest time in which `engines` can do all items, as the module derives."""
    token_s = curve.step_base_s + curve.step_sequence_s
    low_s = max((item.most_tokens * token_s + item.metric_s for item in items), default=0.0)
    low_s = max(low_s, needs_s(items, curve, math.inf) / engines)
    high_s = low_s
    while needs_s(items, curve, high_s) > high_s * engines:
        low_s, high_s = high_s, high_s * 1.5 + 1e-6
    for _ in range(_BISECTIONS if high_s > low_s else 0):
        middle_s = (low_s + high_s) / 2
        if needs_s(items, curve, middle_s) > middle_s * engines:
            low_s = middle_s
        else:
            high_s = middle_s
    return high_s


def pace_s(items: Items, curve: Curve, engines: float, left_s: float) -> float:
    """Return the duration within which each answer should end, at most `left_s`.

    If the engines have time to spare, they spend it on smaller batches, so that answers end earlier
    than the target needs. The reason is that predicted lengths may be wrong: in a
    large batch, an answer that is longer than predicted would end after the target.
    """
    low_s, high_s = 0.0, left_s
    if needs_s(items, curve, high_s) > SPARE * left_s * engines:
        return left_s
    for _ in range(_BISECTIONS):
        middle_s = (low_s + high_s) / 2
        if needs_s(items, curve, middle_s) > SPARE * left_s * engines:
            low_s = middle_s
        else:
            high_s = middle_s
    return high_s
