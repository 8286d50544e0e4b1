"""Act when a model's queue is empty: take requests back, send them twice, or swap engines."""

from holdfast.evaluate.policy import feed
from holdfast.evaluate.policy.state import DONE, EngineState, ModelState, State


def rest(state: State, engine: EngineState) -> None:
    """Find work for an idle engine.

    The choices, in this order:

    1. swap to the model for which the engine was drained;
    2. take over requests of the same model that other engines have not begun, if these requests
       would wait there for longer than the transfer takes;
    3. swap to another model.

    Requests of stragglers follow at the next tick.
    """
    if engine.asked or engine.swapping:
        return
    if engine.drain_for >= 0:
        wanted = engine.drain_for
        engine.drain_for = -1
        state.model(wanted).coming -= 1
        if wanted in state.waiting_models and engine.node in state.models[wanted].nodes:
            state.swap(engine, wanted)
            return
        feed.open_engine(state, engine)
        feed.feed(state, state.model(engine.model))
        if engine.asked:
            return
    model = state.model(engine.model)
    if _steal(state, model):
        return
    following = next_model(state, engine)
    if following is not None:
        state.swap(engine, following.model)


def next_model(state: State, engine: EngineState) -> ModelState | None:
    """Return the first model by rank that needs one more engine and is on the engine's node.

    Return None if there is no such model.
    """
    best: ModelState | None = None
    for number in state.waiting_models:
        model = state.models[number]
        if (
            number != engine.model
            and engine.node in model.nodes
            and (best is None or state.rank(number) < state.rank(best.model))
            and wants(state, model) > 0
        ):
            best = model
    return best


def wants(state: State, model: ModelState) -> int:
    """Return how many more engines a model's waiting work justifies.

    Engines that are already about to swap to the model are subtracted.
    """
    if not model.waiting():
        return 0
    worth = int(state.waiting_s(model) / state.config.swap_pays_s)
    return max(worth, 0 if model.engines else 1) - model.coming


def claim(state: State, model: ModelState) -> None:
    """Take engines for a model with waiting work: first idle ones, then engines of later models."""
    wanted = wants(state, model)
    if wanted <= 0:
        return
    for node in sorted(model.nodes):
        for number in sorted(state.idle.get(node, ())):
            engine = state.engines[number]
            if engine.model != model.model and not engine.swapping and wanted > 0:
                state.swap(engine, model.model)
                wanted -= 1
    wanted -= len(model.engines)
    if wanted <= 0 or len(model.engines) + model.coming >= len(state.engines):
        return
    later = [
        engine
        for engine in state.engines.values()
        if engine.node in model.nodes
        and engine.asked
        and not engine.swapping
        and engine.drain_for < 0
        and state.rank(engine.model) > state.rank(model.model)
    ]
    later.sort(key=lambda engine: (engine.load_s(), engine.engine))
    for engine in later[:wanted]:
        engine.drain_for = model.model
        model.coming += 1
        if waiting := [request for request in engine.asked if request not in engine.recalled]:
            state.recall(engine, waiting)


def _steal(state: State, model: ModelState) -> bool:
    """Recall requests that busy engines have not begun, for idle engines of the same model.

    Returns:
        True if some requests will come back.
    """
    config = state.config
    if state.now_s < model.steal_after_s:
        return model.recalled > 0
    model.steal_after_s = state.now_s + config.round_trip_s
    idle = sum(not state.engines[number].asked for number in model.engines)
    found = False
    victims = [state.engines[number] for number in model.engines]
    victims.sort(key=lambda engine: (-engine.load_s(), engine.engine))
    for engine in victims[: max(idle, 1)]:
        waiting = _not_begun(state, engine)
        if waiting:
            state.recall(engine, waiting)
            found = True
    return found


def _not_begun(state: State, engine: EngineState) -> list[int]:
    """List the requests that an engine has probably not begun: the last ones, beyond its batch."""
    ahead = engine.decoding - engine.max_batch
    forward_s = engine.forward_s * engine.slowness - 2 * state.config.round_trip_s
    found: list[int] = []
    for request in reversed(engine.asked):
        if ahead <= 0 and forward_s <= 0:
            break
        if request in engine.recalled or state.request_state[request] == DONE:
            continue
        cost_s = engine.asked[request][0] * engine.slowness
        if state.request_max_new[request]:
            if ahead > 0:
                found.append(request)
                ahead -= 1
        elif forward_s > cost_s / 2:
            found.append(request)
            forward_s -= cost_s
        else:
            forward_s = 0.0
    return found


def _double(state: State, stragglers: list[EngineState], idle: EngineState) -> None:
    """Send a straggler's requests also to an idle engine; the worst straggler comes first."""
    given = 0
    while stragglers and not given:
        for request in list(stragglers[-1].asked):
            if request in state.doubled or state.request_state[request] == DONE:
                continue
            if given == idle.max_batch:
                return
            state.doubled[request] = {stragglers[-1].engine, idle.engine}
            feed.ask(state, idle, request)
            given += 1
        stragglers.pop()  # another engine has all its requests


def _stragglers(state: State, model: ModelState) -> list[EngineState]:
    """List a model's engines whose answers are long overdue; the worst comes last."""
    engines = [state.engines[number] for number in sorted(model.engines)]
    overdue = [(_overdue(state, engine), engine.engine) for engine in engines if engine.asked]
    return [
        state.engines[number] for late, number in sorted(overdue) if late > state.config.straggler
    ]


def _overdue(state: State, engine: EngineState) -> float:
    """Return how long an engine's first request has taken, relative to the longest expected time.

    If the request generates tokens, this is the time of its maximum number of tokens in a full
    batch.
    """
    request = next(iter(engine.asked))
    cost_s, asked_s, _ = engine.asked[request]
    if state.request_max_new[request]:
        cost_s = state.request_prompt[request] * engine.prefill_token_s
        cost_s += state.request_max_new[request] * (
            engine.base_s + engine.max_batch * engine.sequence_s
        )
    else:
        cost_s = engine.forward_s
    return (state.now_s - asked_s) / (cost_s + engine.debt_s + 2 * state.config.round_trip_s)


def look_for_stragglers(state: State) -> None:
    """Give requests of stragglers to idle engines; called as time passes."""
    found: dict[int, list[EngineState]] = {}
    for node in sorted(state.idle):
        for number in sorted(state.idle[node]):
            engine = state.engines[number]
            rest(state, engine)
            if state.config.duplicate and not engine.asked and not engine.swapping:
                if engine.model not in found:
                    found[engine.model] = _stragglers(state, state.model(engine.model))
                _double(state, found[engine.model], engine)
