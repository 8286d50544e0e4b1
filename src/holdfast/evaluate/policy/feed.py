"""Give requests to engines: choose the next entry, the engine, and the number of requests ahead.

The next entry goes to the engine that is expected to be free first. An engine takes requests while
its batch has free places, and beyond that as many as it answers in one round trip. When few entries
are left in the queue, an engine takes fewer ahead, so that the remaining entries can go to
whichever engine is free first. While many entries wait, an engine also gets the entries with the
same prefix.
"""

from heapq import heappop, heappush, heapreplace
from typing import TYPE_CHECKING

from holdfast.evaluate.policy.events import Answered
from holdfast.evaluate.policy.longest_first import Entry, LongestFirst
from holdfast.evaluate.policy.state import ASKED, WAITING, EngineState, ModelState, State

if TYPE_CHECKING:
    from array import array

PLENTY = 8
"""If more entries than this wait for each engine, one engine is filled at a time.

So entries with a common prefix stay together.
"""
WAITS = 0.5
"""The share of the remaining time that decides whether an entry can wait.

An entry that takes longer than this share does not wait until a generating engine has a place.
"""
MEASURABLE = 20
"""Round trips that an answer must take to show its engine's speed.

The end of an answer is known only with the delay of a message, which hides the speed of shorter
answers.
"""
AHEAD = 200
"""An engine whose present work lasts for more round trips than this gets no requests ahead.

Such an engine loses at most 0.5 % of its time while it waits for the next request.
"""
SPEED_WEIGHT = 0.05
"""The weight of one answer in the running estimate of its engine's speed."""


def put_in_order(state: State, model: ModelState) -> None:
    """Move a model's unsorted entries into its queues, by their predicted lengths."""
    entries, model.late = model.late, []
    curve = state.reference
    assert curve is not None
    decode_token_s = curve.step_base_s + curve.step_sequence_s
    prefix = state.request_prefix
    entries.sort(key=lambda entry: _by_prefix(entry, prefix), reverse=True)
    for entry in entries:
        first = entry if isinstance(entry, int) else entry[0]
        sample = state.request_sample[first]
        task, number = state.sample_task[sample], state.sample_number[sample]
        metric_s = state.priors.metric_s(task, number) if state.sample_stage[sample] == 1 else 0.0
        prefill_s = curve.request_s + state.request_prompt[first] / curve.prefill_tokens_per_s
        max_new = state.request_max_new[first]
        if max_new:
            q50, q90 = state.priors.tokens(task, number, max_new)
            state.request_tokens[first] = q50
            state.request_most[first] = q90
            decode_s = prefill_s + q90 * decode_token_s
            model.decode.add(
                task,
                first,
                length_s=decode_s + metric_s,
                prefill_s=prefill_s,
                metric_s=metric_s,
                tokens=q50,
                most_tokens=q90,
            )
            state.note_shares(task, decode_s, metric_s)
        else:
            length_s = prefill_s + metric_s
            model.forward.add(
                task, entry, length_s=length_s, prefill_s=prefill_s, metric_s=metric_s
            )
            state.note_shares(task, 0.0, metric_s)
    if model.waiting():
        state.waiting_models.add(model.model)


def _by_prefix(entry: Entry, prefix: "array[int]") -> tuple[int, int]:
    first = entry if isinstance(entry, int) else entry[0]
    return prefix[first], first


def put_front(state: State, entry: Entry) -> None:
    """Put an entry that came back from an engine at the front of its queue."""
    first = entry if isinstance(entry, int) else entry[0]
    sample = state.request_sample[first]
    model = state.model(state.sample_model[sample])
    if model.dropped:
        return
    queue = model.decode if state.request_max_new[first] else model.forward
    queue.add_front(entry)
    state.waiting_models.add(model.model)


def open_engine(state: State, engine: EngineState) -> None:
    """Put an engine into the heaps of engines with capacity, if it has any."""
    if engine.swapping or engine.drain_for >= 0:
        return
    model = state.models[engine.model]
    model.compact(state.engines)
    if _has_decode_room(state, model, engine):
        state.stamp += 1
        engine.stamp_decode = state.stamp
        heappush(model.decode_room, (state.now_s + engine.load_s(), state.stamp, engine.engine))
    if _has_forward_room(state, model, engine):
        state.stamp += 1
        engine.stamp_forward = state.stamp
        heappush(model.forward_room, (state.now_s + engine.end_s(), state.stamp, engine.engine))


def feed(state: State, model: ModelState) -> None:
    """Give waiting entries to engines while engines take them."""
    decode, forward = model.decode, model.forward
    while decode.count and _give_decode(state, model):
        pass
    while forward.count and _give_forward(state, model):
        pass
    if not (decode.count or forward.count or model.late):
        state.waiting_models.discard(model.model)


def _give_decode(state: State, model: ModelState) -> bool:
    """Give the next entry that generates tokens to an engine; return False if no engine takes it.

    Some entries would end too late in a full batch. Such an entry joins similar entries on one
    engine, in the largest batch that still ends in time. All other entries go to the engine with
    the least work.
    """
    queue = model.decode
    room = model.decode_room
    slack_s = model.pace_s - state.now_s
    request = _next_of(state, queue)
    if request is None:
        return bool(queue.count)
    tokens = state.most_tokens(request)
    packing = state.engines.get(model.packing)
    if (
        packing is not None
        and tokens * packing.step_s(packing.max_batch) * packing.slowness > slack_s
        and packing.model == model.model
        and packing.decoding < packing.max_batch
        and not packing.swapping
        and packing.drain_for < 0
        and packing.takes(tokens, slack_s)
    ):
        queue.pop()
        ask(state, packing, request)
        return True
    while room:
        engine = state.engines.get(room[0][2])
        if (
            engine is not None
            and room[0][1] == engine.stamp_decode
            and engine.model == model.model
            and _has_decode_room(state, model, engine)
        ):
            if engine.takes(tokens, slack_s):
                break
            model.too_slow[engine.engine] = None
        heappop(room)
    else:
        return _widen(state, model, tokens, slack_s) or _hurry_less(state, model, tokens)
    assert engine is not None
    queue.pop()
    ask(state, engine, request)
    model.packing = engine.engine
    if _has_decode_room(state, model, engine):
        heapreplace(room, (state.now_s + engine.load_s(), room[0][1], engine.engine))
    else:
        heappop(room)
    return True


def _widen(state: State, model: ModelState, tokens: float, slack_s: float) -> bool:
    """Let one more engine generate, for an entry that cannot wait; return True if one does.

    The limit on generating engines was computed as if answers filled their batches exactly.
    """
    if model.decode_engines >= len(model.engines) or model.decode_limit > model.decode_engines:
        return False
    if tokens * _full_step_s(state) < WAITS * slack_s:
        return False
    model.decode_limit = model.decode_engines + 1
    for number in model.engines:
        if not state.engines[number].decoding:
            open_engine(state, state.engines[number])
    return True


def _hurry_less(state: State, model: ModelState, tokens: float) -> bool:
    """Allow larger batches until the next review, for an entry that cannot wait.

    The target was computed with batches of fractional size. With few engines, batches of whole size
    may not meet the target.

    Returns:
        True if an engine can now take the entry. False if the entry can wait, if the entry would
        get no place at any pace, or if more engines are expected.
    """
    if state.expects_engines():
        return False
    if model.pace_s < model.target_s:
        model.pace_s = model.target_s
        for number in model.engines:
            open_engine(state, state.engines[number])
        return True
    slack_s = max(model.pace_s - state.now_s, 0.0)
    if not model.too_slow or tokens * _full_step_s(state) < WAITS * slack_s:
        return False
    known = (state.engines.get(number) for number in model.too_slow)
    too_slow = [
        one
        for one in known
        if one and one.model == model.model and _has_decode_room(state, model, one)
    ]
    model.too_slow.clear()
    if not too_slow:
        return False
    # Raise the pace by as much as one engine needs, and by at least a tenth, so that the next
    # entries rarely need a further raise.
    model.pace_s = state.now_s + max(
        1.1 * slack_s, min(engine.with_one_more_s(tokens) for engine in too_slow)
    )
    for engine in too_slow:
        open_engine(state, engine)
    return True


def _full_step_s(state: State) -> float:
    curve = state.reference
    assert curve is not None
    return curve.step_base_s + curve.max_batch * curve.step_sequence_s


def _next_of(state: State, queue: LongestFirst) -> int | None:
    """Return the request at the queue's front without removing it.

    Entries at the front that are already answered are dropped.
    """
    while (entry := queue.peek()) is not None:
        request = entry if isinstance(entry, int) else entry[0]
        if state.request_state[request] == WAITING:
            return request
        queue.pop()
    return None


def _give_forward(state: State, model: ModelState) -> bool:
    """Give entries without generation to the engine that ends first.

    Returns:
        False if no engine takes an entry.
    """
    queue = model.forward
    room = model.forward_room
    while room:
        engine = state.engines.get(room[0][2])
        if (
            engine is not None
            and room[0][1] == engine.stamp_forward
            and engine.model == model.model
            and _has_forward_room(state, model, engine)
        ):
            break
        heappop(room)
    else:
        return False
    assert engine is not None
    plenty = PLENTY * len(model.engines)
    while True:
        entry = queue.pop()
        for request in (entry,) if isinstance(entry, int) else entry:
            if state.request_state[request] == WAITING:
                ask(state, engine, request)
        more = _has_forward_room(state, model, engine)
        if not more or queue.count <= plenty:
            break
    if more:
        heapreplace(room, (state.now_s + engine.end_s(), room[0][1], engine.engine))
    else:
        heappop(room)
    return True


def _has_decode_room(state: State, model: ModelState, engine: EngineState) -> bool:
    if engine.swapping or engine.drain_for >= 0:
        return False
    ahead = engine.decoding - engine.max_batch
    if ahead < 0:
        return engine.decoding > 0 or model.decode_engines < model.decode_limit
    if 2 * (ahead + 1) * len(model.engines) > model.decode.count:
        return False
    round_trip_s, load_s = state.config.round_trip_s, engine.decode_load_s * engine.slowness
    # A place becomes free every load_s / decoding seconds on average. If all answers begin and end
    # together, places become free only every load_s seconds.
    return (ahead + 1) * load_s < 2 * round_trip_s * engine.decoding or (
        ahead == 0 and load_s < AHEAD * round_trip_s
    )


def _has_forward_room(state: State, model: ModelState, engine: EngineState) -> bool:
    if engine.swapping or engine.drain_for >= 0:
        return False
    if engine.decoding and (
        model.decode.count or state.now_s + engine.end_s() + engine.forward_s > model.target_s
    ):
        return False
    waiting = len(engine.asked) - engine.decoding
    if not waiting:
        return True
    if 2 * len(model.engines) > model.forward.count:
        return False
    ahead_s = (engine.forward_s - engine.forward_entry_s) * engine.slowness
    return ahead_s < 2 * state.config.round_trip_s


def ask(state: State, engine: EngineState, request: int) -> None:
    """Send a request to an engine, and add the request's cost to the engine's load."""
    if not engine.asked:
        state.idle[engine.node].discard(engine.engine)
    engine.advance(state.now_s)
    state.request_state[request] = ASKED
    cost_s = engine.prefill_s(state.request_prompt[request])
    engine.debt_s += cost_s
    if state.request_max_new[request]:
        task = state.sample_task[state.request_sample[request]]
        tokens = state.expected_tokens(request)
        cost_s += tokens * engine.decode_s
        if not engine.decoding:
            state.models[engine.model].decode_engines += 1
        engine.decoding += 1
        engine.decode_load_s += cost_s
        engine.last_clock = max(
            engine.last_clock, engine.clock + state.most_tokens(request) * engine.slowness
        )
        state.priors.ask(task, state.request_tokens[request])
    else:
        engine.forward_s += cost_s
        engine.forward_entry_s = cost_s
    engine.asked[request] = (
        cost_s,
        state.now_s,
        engine.clock if engine.decoding <= engine.max_batch else -1.0,
    )
    state.ask(engine.engine, request)


def release(state: State, engine: EngineState, request: int) -> bool:
    """Remove a request from an engine; return False if the engine did not hold the request."""
    held = engine.asked.pop(request, None)
    if held is None:
        return False
    if request in engine.recalled:
        engine.recalled.discard(request)
        state.models[engine.model].recalled -= 1
    cost_s = held[0]
    if state.request_max_new[request]:
        engine.decoding -= 1
        if not engine.decoding:
            state.models[engine.model].decode_engines -= 1
        engine.decode_load_s = engine.decode_load_s - cost_s if engine.decoding else 0.0
        state.priors.unask(
            state.sample_task[state.request_sample[request]], state.request_tokens[request]
        )
    else:
        engine.forward_s = engine.forward_s - cost_s if len(engine.asked) > engine.decoding else 0.0
    if not engine.asked:
        engine.debt_s = 0.0
        engine.last_clock = engine.clock
        if not engine.swapping and engine.engine in state.engines:
            state.idle[engine.node].add(engine.engine)
    return True


def learn_speed(state: State, engine: EngineState, answer: Answered) -> None:
    """Update an engine's slowness from the time of an answer, compared with the cost curve."""
    held = engine.asked.get(answer.request)
    if held is None or answer.engine_s <= 0:
        return
    cost_s, _, clock = held
    curve_s = engine.step_s(1) * answer.new_tokens
    if engine.max_batch == 1:
        expected_s = engine.prefill_s(state.request_prompt[answer.request]) + curve_s
        if expected_s <= 0:  # answered by another request's forward
            return
        ratio = answer.engine_s / expected_s
    elif state.request_max_new[answer.request]:
        if clock < 0 or curve_s < state.config.round_trip_s * MEASURABLE:
            return
        ratio = (engine.clock - clock) / answer.new_tokens
    elif engine.decoding or not cost_s:
        return
    else:
        ratio = answer.engine_s / cost_s
    engine.slowness += SPEED_WEIGHT * (min(ratio, 4.0 * engine.slowness) - engine.slowness)
