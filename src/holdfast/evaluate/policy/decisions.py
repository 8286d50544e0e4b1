"""Decide what to do after each event, without input or output, and without a clock.

All times come from the events. The request with the longest remaining path (decoding, then the
metric) goes first, to the engine that is expected to be free first. An engine gets only as many
requests ahead as hide the time of a round trip. `feed` gives requests to engines. `tail` acts when
the queue is empty: it takes requests back, sends them twice, and swaps engines to the next model.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast.evaluate.policy import feed, tail
from holdfast.evaluate.policy.events import (
    Action,
    Answered,
    EngineLeft,
    EngineReady,
    Event,
    Measured,
    MetricLost,
    ModelDropped,
    ModelReady,
    NodeJoined,
    NodeLeft,
    Recalled,
    RequestRefused,
    SamplesAdded,
    SampleSpec,
    Tick,
)
from holdfast.evaluate.policy.longest_first import Entry
from holdfast.evaluate.policy.state import (
    DONE,
    METRIC_READY,
    METRIC_RUNS,
    METRIC_WANTED,
    NO_METRIC,
    SAMPLE_DONE,
    WAITING,
    EngineState,
    State,
)
from holdfast.evaluate.policy.target import REVIEW_EVENTS, review

if TYPE_CHECKING:
    from array import array

REVIEW_SHARE = 0.02
"""The estimates are renewed after this share of the time until the expected end.

The share applies once the events since the last review are at least an eighth of the requests in
flight.
"""
QUIET_REVIEW_SHARE = 0.1
"""The share that applies instead of `REVIEW_SHARE` after fewer events.

A review costs time for all requests in flight, of which only a few have changed then.
"""


def decide(state: State, event: Event) -> list[Action]:
    """Update `state` in place and return the actions that follow from `event`.

    `state` is not copied, since a run has a million events. Equal events give equal actions,
    whether live or under a virtual clock. An event costs O(log n) or amortised constant time for n
    waiting engines, tasks or metrics.
    """
    state.now_s = max(state.now_s, event.now_s)
    _HANDLERS[type(event)](state, event)
    if state.metrics:
        state.measure()
    state.events_until_review -= 1
    if state.events_until_review <= 0:
        review(state)
    return state.take_actions() if state.asks or state.actions else []


def _node_joined(state: State, event: NodeJoined) -> None:
    state.slots_free[event.node] = event.metric_slots - 1
    state.free_slot(event.node)


def _node_left(state: State, event: NodeLeft) -> None:
    state.slots_free.pop(event.node, None)
    for model in state.models.values():
        model.nodes.discard(event.node)
    for sample in [sample for sample, node in state.metric_node.items() if node == event.node]:
        del state.metric_node[sample]
        if state.sample_stage[sample] == METRIC_RUNS:
            state.ready_to_measure(sample)


def _engine_ready(state: State, event: EngineReady) -> None:
    engine = state.engines.get(event.engine)
    if engine is None:
        engine = state.engines[event.engine] = EngineState(event.engine, event.node)
    else:
        _leave_model(state, engine)
        _take_all_back(state, engine)
    engine.serve(event.model, event.curve, state.now_s)
    if state.reference is None:
        state.reference = event.curve
        state.first_ready_s = state.now_s
    model = state.model(event.model)
    model.engines.add(event.engine)
    model.nodes.add(event.node)
    state.idle.setdefault(event.node, set()).add(event.engine)
    if model.late:
        feed.put_in_order(state, model)
        review(state)
    feed.open_engine(state, engine)
    feed.feed(state, model)
    tail.rest(state, engine)


def _engine_left(state: State, event: EngineLeft) -> None:
    engine = state.engines.pop(event.engine, None)
    if engine is None:
        return
    state.idle.get(engine.node, set()).discard(event.engine)
    _leave_model(state, engine)
    _take_all_back(state, engine)
    for model in list(state.models.values()):
        if model.waiting():
            feed.feed(state, model)
            tail.claim(state, model)


def _model_ready(state: State, event: ModelReady) -> None:
    model = state.model(event.model)
    model.nodes.add(event.node)
    for engine in sorted(state.idle.get(event.node, ())):
        tail.rest(state, state.engines[engine])
    tail.claim(state, model)


def _samples_added(state: State, event: SamplesAdded) -> None:
    models: dict[int, list[Entry]] = {}
    groups: dict[tuple[int, int], int] = {}
    for sample in event.samples:
        _enter(state, sample, models.setdefault(sample.model, []), groups)
    for number, requests in models.items():
        model = state.model(number)
        if model.dropped:
            continue
        model.late.extend(_grouped(state, requests))
        state.waiting_models.add(number)
        if model.engines:
            feed.put_in_order(state, model)
            if len(event.samples) > state.samples // 16:
                review(state)
            feed.feed(state, model)
        if model.waiting():
            tail.claim(state, model)


def _enter(
    state: State, sample: SampleSpec, requests: list[Entry], groups: dict[tuple[int, int], int]
) -> None:
    number = sample.sample
    _grow(number + 1, state.sample_task, state.sample_model, state.sample_number, state.sample_left)
    _grow(number + 1, state.sample_stage)
    if state.sample_task[number] >= 0:
        return
    state.samples += 1
    state.sample_task[number] = sample.task
    state.sample_model[number] = sample.model
    state.sample_number[number] = sample.number
    state.sample_stage[number] = METRIC_WANTED if sample.has_metric else NO_METRIC
    model = state.model(sample.model)
    model.first_sample, model.last_sample = (
        min(model.first_sample, number),
        max(model.last_sample, number),
    )
    left = 0
    for spec in sample.requests:
        request = spec.request
        if request >= len(state.request_sample):
            _grow(
                request + 1,
                state.request_sample,
                state.request_group,
                state.request_prompt,
                state.request_max_new,
            )
            _grow(request + 1, state.request_state)
            missing = request + 1 - len(state.request_tokens)
            state.request_tokens.extend([0.0] * missing)
            state.request_most.extend([0.0] * missing)
            state.request_prefix.extend([0] * missing)
        if state.request_sample[request] >= 0:
            if state.request_state[request] != DONE:
                state.more_samples.setdefault(request, []).append(number)
                left += 1
            continue
        left += 1
        model.first_request, model.last_request = (
            min(model.first_request, request),
            max(model.last_request, request),
        )
        state.requests += 1
        state.request_sample[request] = number
        state.request_state[request] = WAITING
        state.request_prompt[request] = max(1, spec.prompt_tokens)
        state.request_max_new[request] = spec.max_new_tokens
        state.request_prefix[request] = spec.affinity >> 32 & 0xFFFFFFFF
        state.request_group[request] = request
        if spec.affinity and not spec.max_new_tokens:
            first = groups.setdefault((sample.model, spec.affinity), request)
            if first != request:
                state.request_group[request] = first
                state.request_prompt[request] = 0
        requests.append(request)
    state.sample_left[number] = left
    if model.dropped:
        state.sample_stage[number] = SAMPLE_DONE
    elif not left:
        _answered_in_full(state, number)


def _grow(size: int, *columns: "array[int]") -> None:
    for column in columns:
        if len(column) < size:
            column.extend([-1] * (size - len(column)))


def _grouped(state: State, requests: list[Entry]) -> list[Entry]:
    """Merge the requests of each group into one entry, at the place of its first request."""
    groups: dict[int, list[int]] = {}
    for request in requests:
        assert isinstance(request, int)
        groups.setdefault(state.request_group[request], []).append(request)
    return [found[0] if len(found) == 1 else tuple(found) for found in groups.values()]


def _answered(state: State, event: Answered) -> None:
    engine = state.engines.get(event.engine)
    request = event.request
    if engine is not None:
        engine.advance(state.now_s)
        feed.learn_speed(state, engine, event)
        feed.release(state, engine, request)
    if state.request_state[request] != DONE:
        state.request_state[request] = DONE
        state.requests_done += 1
        sample = state.request_sample[request]
        if state.request_max_new[request]:
            state.priors.observe_tokens(
                state.sample_task[sample],
                state.sample_number[sample],
                state.request_tokens[request],
                event.new_tokens,
            )
        _call_off(state, request, event.engine)
        _request_over(state, request)
    if engine is not None:
        _more(state, engine)


def _more(state: State, engine: EngineState) -> None:
    """Give more requests to an engine that has finished some, or find other work for it."""
    feed.open_engine(state, engine)
    model = state.models[engine.model]
    if model.decode.count or model.forward.count:
        feed.feed(state, model)
    if not engine.asked:
        tail.rest(state, engine)


def _request_over(state: State, request: int) -> None:
    for sample in (state.request_sample[request], *state.more_samples.pop(request, ())):
        state.sample_left[sample] -= 1
        if not state.sample_left[sample]:
            _answered_in_full(state, sample)


def _answered_in_full(state: State, sample: int) -> None:
    if state.sample_stage[sample] == METRIC_WANTED:
        state.ready_to_measure(sample)
    elif state.sample_stage[sample] == NO_METRIC:
        state.sample_stage[sample] = SAMPLE_DONE
        state.samples_done += 1


def _call_off(state: State, request: int, answered_by: int) -> None:
    """Recall a request from the other engines that hold it, after one engine has answered it."""
    for other in sorted(state.doubled.pop(request, ())):
        engine = state.engines.get(other)
        if other != answered_by and engine is not None and request not in engine.recalled:
            state.recall(engine, [request])


def _recalled(state: State, event: Recalled) -> None:
    engine = state.engines.get(event.engine)
    if engine is None:
        return
    engine.advance(state.now_s)
    _take_back(state, engine, event.requests)
    model = state.model(engine.model)
    feed.feed(state, model)
    _more(state, engine)
    if model.waiting():
        tail.claim(state, model)


def _refused(state: State, event: RequestRefused) -> None:
    engine = state.engines.get(event.engine)
    if event.retry:
        if engine is not None:
            _recalled(
                state, Recalled(now_s=event.now_s, engine=event.engine, requests=(event.request,))
            )
        return
    if engine is not None:
        engine.advance(state.now_s)
        feed.release(state, engine, event.request)
    if state.request_state[event.request] != DONE:
        state.request_state[event.request] = DONE
        state.requests_done += 1
        for sample in (
            state.request_sample[event.request],
            *state.more_samples.get(event.request, ()),
        ):
            if state.sample_stage[sample] == METRIC_WANTED:
                state.sample_stage[sample] = NO_METRIC  # no answer exists to measure
        _call_off(state, event.request, event.engine)
        _request_over(state, event.request)
    if engine is not None:
        _more(state, engine)


def _take_back(state: State, engine: EngineState, requests: tuple[int, ...]) -> None:
    """Put requests that an engine returned back at the front of the queue."""
    back: list[Entry] = []
    for request in requests:
        if not feed.release(state, engine, request) or state.request_state[request] == DONE:
            continue
        if (others := state.doubled.get(request)) is not None:
            others.discard(engine.engine)
            if len(others) == 1:
                del state.doubled[request]
            continue
        state.request_state[request] = WAITING
        back.append(request)
    for entry in _grouped(state, back):
        feed.put_front(state, entry)


def _take_all_back(state: State, engine: EngineState) -> None:
    _take_back(state, engine, tuple(engine.asked))


def _leave_model(state: State, engine: EngineState) -> None:
    model = state.model(engine.model)
    model.engines.discard(engine.engine)
    if engine.swapping:
        model.coming -= 1
        engine.swapping = False
    elif engine.drain_for >= 0:
        state.model(engine.drain_for).coming -= 1
        engine.drain_for = -1


def _measured(state: State, event: Measured) -> None:
    sample = event.sample
    node = state.metric_node.pop(sample, None)
    if node is not None:
        state.free_slot(node)
    if state.sample_stage[sample] in {METRIC_READY, METRIC_RUNS}:
        state.sample_stage[sample] = SAMPLE_DONE
        state.samples_done += 1
    state.priors.observe_metric(
        state.sample_task[sample], state.sample_number[sample], event.metric_s
    )


def _metric_lost(state: State, event: MetricLost) -> None:
    node = state.metric_node.pop(event.sample, None)
    if node is not None:
        state.free_slot(node)
    if state.sample_stage[event.sample] == METRIC_RUNS:
        state.ready_to_measure(event.sample)


def _model_dropped(state: State, event: ModelDropped) -> None:
    model = state.model(event.model)
    model.dropped = True
    model.late.clear()
    model.decode.clear()
    model.forward.clear()
    state.waiting_models.discard(event.model)
    for sample in range(model.first_sample, model.last_sample + 1):
        if state.sample_model[sample] == event.model:
            state.sample_stage[sample] = SAMPLE_DONE
    for request in range(model.first_request, model.last_request + 1):
        sample = state.request_sample[request]
        if sample >= 0 and state.sample_model[sample] == event.model:
            state.request_state[request] = DONE
            state.more_samples.pop(request, None)
            state.doubled.pop(request, None)
    for number in sorted(model.engines):
        engine = state.engines[number]
        if held := [request for request in engine.asked if request not in engine.recalled]:
            state.recall(engine, held)
        tail.rest(state, engine)


def _tick(state: State, _: Tick) -> None:
    end_s = max((model.target_s for model in state.models.values()), default=0.0)
    events = max(REVIEW_EVENTS, state.looked_at) - state.events_until_review
    share = REVIEW_SHARE if 8 * events >= state.looked_at else QUIET_REVIEW_SHARE
    if state.now_s - state.reviewed_s >= share * (end_s - state.reviewed_s):
        review(state)
    tail.look_for_stragglers(state)


_HANDLERS: dict[type, Callable[[State, Any], None]] = {
    NodeJoined: _node_joined,
    NodeLeft: _node_left,
    EngineReady: _engine_ready,
    EngineLeft: _engine_left,
    ModelReady: _model_ready,
    SamplesAdded: _samples_added,
    Answered: _answered,
    Recalled: _recalled,
    RequestRefused: _refused,
    Measured: _measured,
    MetricLost: _metric_lost,
    ModelDropped: _model_dropped,
    Tick: _tick,
}
