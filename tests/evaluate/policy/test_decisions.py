"""Check the policy's decisions, case by case."""

import pytest

from holdfast.evaluate.policy import feed
from holdfast.evaluate.policy.decisions import decide
from holdfast.evaluate.policy.events import (
    Answered,
    EngineLeft,
    EngineReady,
    Measure,
    Measured,
    ModelReady,
    NodeJoined,
    Recall,
    Recalled,
    RequestSpec,
    SamplesAdded,
    SampleSpec,
    SendRequests,
    Swap,
    Tick,
)
from holdfast.evaluate.policy.priors import Priors
from holdfast.evaluate.policy.state import PolicyConfig, State
from holdfast.evaluate.types.engine import Curve


def curve(max_batch=2):
    return Curve(
        prefill_tokens_per_s=1e4,
        request_s=1e-3,
        step_base_s=0.01,
        step_sequence_s=0.001,
        max_batch=max_batch,
    )


def ready(engine, *, now_s=0.0, node=0, model=0, max_batch=2):
    return EngineReady(now_s=now_s, engine=engine, node=node, model=model, curve=curve(max_batch))


def added(*specs, now_s=0.0):
    return SamplesAdded(now_s=now_s, samples=specs)


def sample(number, *, tokens=(0,), model=0, task=0, has_metric=False, affinity=0):
    """Make a sample with requests `number * 10`, `number * 10 + 1`... and limits `tokens`."""
    requests = tuple(
        RequestSpec(
            request=number * 10 + place, prompt_tokens=10, max_new_tokens=limit, affinity=affinity
        )
        for place, limit in enumerate(tokens)
    )
    return SampleSpec(
        sample=number,
        model=model,
        task=task,
        number=number,
        requests=requests,
        has_metric=has_metric,
    )


def answered(engine, request, now_s=1.0, new_tokens=1):
    return Answered(
        now_s=now_s, engine=engine, request=request, new_tokens=new_tokens, engine_s=0.5
    )


@pytest.fixture
def state():
    return State(Priors())


def asked(actions):
    return {
        action.engine: action.requests for action in actions if isinstance(action, SendRequests)
    }


def test_the_longest_is_asked_first_wherever_it_is_from(state):
    decide(
        state,
        added(sample(0, tokens=(100,)), sample(1, tokens=(900,), task=1), sample(2, tokens=(300,))),
    )
    assert asked(decide(state, ready(0, max_batch=1)))[0] == (10, 20)


def test_a_long_metric_goes_before_a_longer_answer(state):
    state.priors.observe_metric(1, 1, 60.0)
    decide(
        state, added(sample(0, tokens=(900,)), sample(1, tokens=(100,), task=1, has_metric=True))
    )
    assert asked(decide(state, ready(0, max_batch=1)))[0] == (10,)


def test_requests_of_one_input_go_together(state):
    decide(state, ready(0, max_batch=8))
    decide(state, ready(1, max_batch=8))
    given = asked(
        decide(state, added(*(sample(one, tokens=(0, 0, 0), affinity=one + 1) for one in range(6))))
    )
    where = {request: engine for engine, requests in given.items() for request in requests}
    for one in range(6):
        its = {where[request] for request in range(one * 10, one * 10 + 3) if request in where}
        assert len(its) <= 1
    assert set(given) == {0, 1}


def test_few_samples_are_spread_over_the_engines(state):
    for engine in range(4):
        decide(state, ready(engine, max_batch=8))
    given = asked(decide(state, added(*(sample(one, tokens=(100,)) for one in range(8)))))
    assert [len(given[engine]) for engine in range(4)] == [2, 2, 2, 2]


def test_what_a_lost_engine_held_is_asked_again_before_all_else(state):
    decide(state, added(*(sample(one, tokens=(100,)) for one in range(8))))
    first = asked(decide(state, ready(0)))[0]
    decide(state, EngineLeft(now_s=1.0, engine=0))
    assert set(asked(decide(state, ready(1, now_s=2.0)))[1]) <= set(first)


def test_an_answer_of_an_engine_that_was_given_up_still_counts(state):
    decide(state, ready(0))
    decide(state, added(sample(0), sample(1)))
    decide(state, EngineLeft(now_s=1.0, engine=0))
    decide(state, answered(0, 0))
    assert state.samples_done == 1
    assert asked(decide(state, ready(1, now_s=2.0))) == {1: (10,)}


def test_an_idle_engine_goes_on_to_the_next_model_and_comes_back_for_what_is_left(state):
    for engine in range(2):
        decide(state, ready(engine, max_batch=1))
    decide(state, added(sample(0, tokens=(100,)), sample(1, tokens=(900,))))
    decide(state, added(*(sample(one, tokens=(500,), model=1) for one in range(2, 40))))
    decide(state, ModelReady(now_s=0.5, node=0, model=1))
    holder = next(number for number, engine in state.engines.items() if 0 in engine.asked)
    actions = decide(state, answered(holder, 0))
    assert actions == [Swap(holder, 1)], "model 0 has a tail, but nothing to deal out"
    decide(state, ready(holder, now_s=2.0, model=1, max_batch=1))
    actions = decide(state, EngineLeft(now_s=3.0, engine=1 - holder))
    assert any(isinstance(action, Recall) and action.engine == holder for action in actions), (
        "model 0 is older"
    )
    first, *others = state.engines[holder].asked
    decide(state, Recalled(now_s=3.1, engine=holder, requests=tuple(others)))
    assert decide(state, answered(holder, first, now_s=4.0)) == [Swap(holder, 0)]


def test_the_newest_model_first_if_told_so():
    state = State(Priors(), PolicyConfig(newest_first=True))
    decide(state, ready(0, max_batch=1))
    decide(state, added(*(sample(one, tokens=(500,)) for one in range(30))))
    decide(state, ModelReady(now_s=0.5, node=0, model=1))
    actions = decide(state, added(*(sample(one, tokens=(500,), model=1) for one in range(30, 60))))
    assert [type(action) for action in actions] == [Recall]
    held = list(state.engines[0].asked)
    assert decide(state, Recalled(now_s=0.6, engine=0, requests=tuple(held))) == [Swap(0, 1)]


def test_a_request_is_asked_before_the_same_decision_recalls_it():
    state = State(Priors(), PolicyConfig(swap_pays_s=0.5))
    decide(state, added(sample(1, tokens=(50, 50), model=2)))
    decide(state, ready(0, model=0, max_batch=1))
    decide(state, ready(1, model=2, max_batch=1))
    decide(state, EngineLeft(now_s=0.5, engine=0))
    assert decide(state, added(sample(2, model=0), now_s=0.6)) == [Recall(1, (10,))]
    assert decide(state, ready(2, now_s=0.7, model=2)) == [SendRequests(2, (11,))]
    # Engine 2 receives what the other engine held, and is to change to the other model.
    actions = decide(state, EngineLeft(now_s=0.8, engine=1))
    assert actions == [SendRequests(2, (10,)), Recall(2, (11, 10))]


def test_a_straggler_is_helped_and_called_off_and_nothing_is_lost_when_both_leave():
    for last in ("answer", "leave"):
        state = State(Priors(), PolicyConfig(straggler=2.0))
        decide(state, ready(0))
        assert asked(decide(state, added(sample(0, tokens=(10,))))) == {0: (0,)}
        decide(state, ready(1, now_s=0.1))
        assert asked(decide(state, Tick(now_s=0.2))) == {}
        assert asked(decide(state, Tick(now_s=60.0))) == {1: (0,)}
        if last == "answer":
            assert decide(state, answered(1, 0, now_s=61.0)) == [Recall(0, (0,))]
            decide(state, answered(0, 0, now_s=62.0))
            assert (state.samples_done, state.requests_done) == (1, 1)
        else:
            assert asked(decide(state, EngineLeft(now_s=61.0, engine=0))) == {}
            decide(state, EngineLeft(now_s=62.0, engine=1))
            assert asked(decide(state, ready(2, now_s=63.0))) == {2: (0,)}


def test_metrics_run_longest_first_where_slots_are_free(state):
    decide(state, ready(0, max_batch=8))
    for place, metric_s in ((0, 1.0), (1, 9.0), (2, 3.0)):
        state.priors.observe_metric(0, place, metric_s)
    decide(state, added(*(sample(one, tokens=(5,), has_metric=True) for one in range(3))))
    for one in range(3):
        assert decide(state, answered(0, one * 10)) == []
    assert decide(state, NodeJoined(now_s=2.0, node=4, metric_slots=1)) == [Measure(1, 4)]
    assert decide(state, Measured(now_s=3.0, sample=1, metric_s=8.0)) == [Measure(2, 4)]


def test_an_engine_with_a_long_answer_keeps_its_batch_small():
    """One answer of 1,000 tokens takes 11 s alone and 42 s in a batch of 32.

    All other answers take one engine 10 s.
    """
    past = Priors(["t"])
    for one in range(200):
        past.observe_tokens(0, one, 1.0, 20 if one else 1000)
    state = State(Priors.from_history(past.history(), ["t"]))
    for engine in range(2):
        decide(state, ready(engine, max_batch=32))
    decide(state, added(*(sample(one, tokens=(1000,)) for one in range(200))))
    long = next(engine for engine in state.engines.values() if 0 in engine.asked)
    other = state.engines[1 - long.engine]
    assert len(long.asked) < 8
    assert len(other.asked) >= 32


def test_lateness_makes_few_engines_be_looked_at_anew(state, monkeypatch):
    engines, looked_at = 32, 0
    for engine in range(engines):
        decide(state, ready(engine, max_batch=32))
    running = asked(decide(state, added(*(sample(one, tokens=(8,)) for one in range(3000)))))
    open_engine = feed.open_engine

    def counted(*given):
        nonlocal looked_at
        looked_at += 1
        open_engine(*given)

    monkeypatch.setattr(feed, "open_engine", counted)
    open_requests = [
        (engine, request) for engine, requests in running.items() for request in requests
    ]
    for step in range(400):  # each of them long after all should have been done
        engine, request = open_requests.pop(7 * step % len(open_requests))
        given = asked(decide(state, answered(engine, request, now_s=1e4 + 5 * step, new_tokens=8)))
        open_requests += [(one, each) for one, requests in given.items() for each in requests]
    assert state.samples_done == 400
    assert looked_at < 5 * 400
