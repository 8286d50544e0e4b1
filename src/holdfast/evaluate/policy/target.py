"""Compute the earliest end, and the batch sizes that allow it for long answers.

A full batch slows each of its answers. An answer that is long relative to the remaining time goes
into a smaller batch, which wastes a part of the engine. The target is the earliest feasible end.
With a time `H` left, an answer of `n` tokens and a metric of `m` seconds needs steps of at most `(H
- m) / n`, hence a batch `b` of at most `((H - m) / n - base) / sequence`, and takes `n * (base / b
+ sequence)` of an engine. The sum over all open work grows as `H` shrinks; bisection finds the `H`
at which the sum equals `H` times the engines.
"""

import math
from typing import NamedTuple

from holdfast.evaluate.policy.feed import feed, open_engine
from holdfast.evaluate.policy.state import State
from holdfast.evaluate.types.engine import Curve

REVIEW_EVENTS = 1024
"""The least number of events between two reviews."""
OVERDUE = 0.15
"""The assumed rest of an overdue answer, as a share of its expected tokens."""
SPARE = 0.7
"""The share of the engines' time to plan with if answers are paced faster than the target needs."""
_BISECTIONS = 14


class Item(NamedTuple):
    """`number` similar requests, with the costs of each."""

    number: int
    tokens: float
    most_tokens: float
    metric_s: float
    prefill_s: float


Items = list[Item]


def review(state: State) -> None:
    """Renew all estimates; the cost is spread over the events between two reviews."""
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
    """Advance every engine's clock and count its requests by length.

    Returns:
        The number of requests in flight.
    """
    levels: dict[tuple[int, int], int] = {}
    in_flight = 0
    log2, most_tokens, max_new = (
        math.log2,
        state.most_tokens,
        state.request_max_new,
    )  # used a hundred thousand times
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
    """Return the engine-seconds of items that must all end in `left_s`."""
    base_s, sequence_s, most = curve.step_base_s, max(curve.step_sequence_s, 1e-12), curve.max_batch
    total_s = 0.0
    for count, tokens, most_tokens, metric_s, prefill_s in items:
        total_s += count * prefill_s
        if tokens > 0:
            batch = ((left_s - metric_s) / most_tokens - base_s) / sequence_s
            total_s += count * tokens * (base_s / min(max(batch, 1.0), most) + sequence_s)
    return total_s


def time_left_s(items: Items, curve: Curve, engines: float) -> float:
    """Return the least time in which `engines` can do all items, as derived in the module."""
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
    """Return the time for each answer, so that engines spend spare time on smaller batches.

    The predicted lengths may be wrong. If only the target set the batch sizes, an answer that is
    longer than expected would be in too large a batch.
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
