import pytest

from holdfast.core.errors import BadUse
from holdfast.evaluate.engines.choose import make_engine
from holdfast.evaluate.engines.simulated import SimulatedEngine, simulated_answer
from holdfast.evaluate.types.engine import EngineSpec, Finished, SwapRefused
from holdfast.evaluate.types.requests import Request, Sampling, pack_tokens
from holdfast.testing import FakeClock

CURVE = {
    "prefill_tokens_per_s": 1000.0,
    "request_s": 0.5,
    "step_base_s": 1.0,
    "step_sequence_s": 0.25,
}


def engine_of(clock, *, max_batch=2, **options):
    spec = EngineSpec(kind="simulated", max_batch=max_batch, options={**CURVE, **options})
    return SimulatedEngine(spec, clock=clock, sleep=clock.advance)


def generation(new_tokens, *, prompt_tokens=500, seed=0):
    sampling = Sampling(max_new_tokens=1000, seed=seed, extra={"new_tokens": new_tokens})
    return Request(kind="generate", prompt=pack_tokens(range(prompt_tokens)), sampling=sampling)


def run(engine, clock, *, until=10_000.0):
    finished: list[Finished] = []
    while clock.monotonic_s() < until:
        finished += engine.step()
        if engine._next_event_s() == float("inf"):
            break
    return {done.id: done.finished_s for done in finished}


def test_a_prompt_takes_its_time_and_a_log_probability_is_done_with_it():
    clock = FakeClock()
    engine = engine_of(clock)
    engine.submit(
        [
            (
                7,
                Request(
                    kind="loglikelihood",
                    prompt=pack_tokens(range(250)),
                    continuation=pack_tokens([1]),
                ),
            )
        ]
    )
    assert run(engine, clock) == {7: pytest.approx(0.5 + 0.251)}


def test_one_generation_takes_what_the_curve_says_alone():
    clock = FakeClock()
    engine = engine_of(clock)
    engine.submit([(1, generation(10))])
    assert run(engine, clock) == {1: pytest.approx(engine.curve().alone_s(500, 10))}


def test_sequences_decode_together_and_leave_when_they_are_done():
    clock = FakeClock()
    engine = engine_of(clock)
    engine.submit([(1, generation(4)), (2, generation(10))])
    # Both are read first (1 s each); four steps of 1.5 s with two; six of 1.25 s with one.
    assert run(engine, clock) == {1: pytest.approx(2 + 6.0), 2: pytest.approx(2 + 6.0 + 7.5)}


def test_a_third_waits_for_room_and_is_read_while_the_others_stand_still():
    clock = FakeClock()
    engine = engine_of(clock)
    engine.submit([(1, generation(4)), (2, generation(10)), (3, generation(1))])
    # At 8 s the first leaves, the third is read until 9 s, decodes a step with the second; then
    # five steps alone.
    assert run(engine, clock) == {
        1: pytest.approx(8.0),
        3: pytest.approx(10.5),
        2: pytest.approx(10.5 + 5 * 1.25),
    }


def test_who_comes_in_the_middle_of_a_step_joins_at_its_end():
    clock = FakeClock()
    engine = engine_of(clock)
    engine.submit([(1, generation(4))])
    while clock.monotonic_s() < 2.9:  # read at 1.0; steps end at 2.25, 3.5, 4.75, 6.0
        engine.step()
    engine.submit([(2, generation(1))])
    # Read from 3.5 to 4.5; a step together until 6.0; one more alone until 7.25.
    assert run(engine, clock) == {2: pytest.approx(6.0), 1: pytest.approx(7.25)}


def test_a_step_waits_a_tenth_of_a_second_at_most():
    clock = FakeClock()
    engine = engine_of(clock)
    engine.submit([(1, generation(100))])
    assert engine.step() == []
    assert clock.monotonic_s() == pytest.approx(0.1)


def test_what_is_not_begun_can_be_recalled():
    clock = FakeClock()
    engine = engine_of(clock)
    engine.submit([(number, generation(3)) for number in range(5)])
    assert engine.recall([0, 3, 4, 99]) == [3, 4]
    assert set(run(engine, clock)) == {0, 1, 2}


def test_a_long_generation_costs_nothing_a_token():
    clock = FakeClock()
    engine = engine_of(clock)
    engine.submit([(1, generation(900))])
    events = 0
    while engine._next_event_s() != float("inf"):
        clock.advance(max(0.0, engine._next_event_s() - clock.monotonic_s()))
        engine.step()
        events += 1
    assert events == 2


def test_answers_are_the_requests_own_whatever_the_order():
    requests = [generation(5 + number, seed=number) for number in range(8)]
    answers = []
    for order in (1, -1):
        clock = FakeClock()
        engine = engine_of(clock, max_batch=3)
        engine.submit(list(enumerate(requests))[::order])
        found = {}
        while len(found) < len(requests):
            found |= {done.id: done.answer for done in engine.step()}
        answers.append(found)
    assert answers[0] == answers[1]
    assert answers[0][3] == simulated_answer(requests[3], 8)
    assert answers[0][3].new_tokens == 8
    assert len(answers[0][3].tokens) == 32


def test_without_a_length_the_hash_gives_one_within_the_limit():
    clock = FakeClock()
    engine = engine_of(clock)
    lengths = []
    for seed in range(20):
        sampling = Sampling(max_new_tokens=12, seed=seed)
        lengths.append(
            engine._length_of(Request(kind="generate", prompt=b"\0\0\0\0", sampling=sampling))
        )
    assert min(lengths) >= 1
    assert max(lengths) <= 12
    assert len(set(lengths)) > 4


def test_loading_takes_its_time_and_the_canary_is_the_contents(tmp_path):
    for name, content in (("a", b"one"), ("copy", b"one"), ("b", b"two")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
    clock = FakeClock()
    engine = engine_of(clock, load_s=30.0, swap_s=2.0)
    engine.load(tmp_path / "a")
    assert clock.monotonic_s() == pytest.approx(30.0)
    first = engine.canary()
    engine.swap(tmp_path / "b")
    assert clock.monotonic_s() == pytest.approx(32.0)
    assert engine.canary() != first
    engine.swap(tmp_path / "copy")
    assert engine.canary() == first


def test_it_fails_as_told(tmp_path):
    clock = FakeClock()
    wrong = engine_of(clock, wrong_canary=1)
    wrong.load(tmp_path)
    fresh = wrong.canary()
    wrong.swap(tmp_path)
    assert wrong.canary() != fresh
    with pytest.raises(SwapRefused):
        engine_of(clock, refuse_swap=True).swap(tmp_path)


def test_answers_depend_on_the_weights_only_if_asked_to(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    answers = []
    for by_model in (False, True):
        clock = FakeClock()
        engine = engine_of(clock, by_model=by_model)
        engine.load(tmp_path)
        engine.submit(
            [(1, Request(kind="loglikelihood", prompt=b"\0\0\0\0", continuation=b"\1\0\0\0"))]
        )
        done = []
        while not done:
            done = engine.step()
        answers.append(done[0].answer.logprob)
    assert answers[0] != answers[1]


def test_an_unknown_option_or_kind_is_said_with_what_there_is():
    with pytest.raises(BadUse, match=r"no option 'lood_s'. It has .*load_s"):
        make_engine(EngineSpec(kind="simulated", options={"lood_s": 1}))
    with pytest.raises(BadUse, match="numbers"):
        make_engine(EngineSpec(kind="simulated", options={"load_s": "soon"}))
    with pytest.raises(BadUse, match="hf has no option 'load_s'"):
        make_engine(EngineSpec(kind="hf", options={"load_s": 1}))
    with pytest.raises(BadUse, match="hf, vllm, openai, simulated"):
        make_engine(EngineSpec(kind="hff"))
    with pytest.raises(BadUse, match="no Nothing"):
        make_engine(EngineSpec(kind="json:Nothing"))
    with pytest.raises(BadUse, match="needs a package"):
        make_engine(EngineSpec(kind="no_such_module_here:Engine"))


def test_a_class_of_ones_own_is_made_by_its_name():
    kind = f"{SimulatedEngine.__module__}:{SimulatedEngine.__name__}"
    assert isinstance(make_engine(EngineSpec(kind=kind)), SimulatedEngine)
