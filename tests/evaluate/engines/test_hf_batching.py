"""Compare free mode with exact mode: equal tokens, log-probabilities within 1e-6, in any order."""

import random

import pytest

from holdfast.evaluate.engines.hf.batching import plan_scores
from holdfast.evaluate.engines.hf.engine import TransformersEngine
from holdfast.evaluate.types.engine import EngineSpec
from holdfast.evaluate.types.requests import Request, Sampling, pack_tokens


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def engines(request, models):
    made = []
    for mode in ("exact", "free"):
        engine = TransformersEngine(
            EngineSpec(device="cpu", threads=1, mode=mode, max_batch=6 * (mode == "free"))
        )
        engine.load(models[request.param])
        made.append(engine)
    return made


def requests_of(seed, count):
    rng = random.Random(seed)

    def tokens(most):
        return pack_tokens([rng.randrange(2, 300) for _ in range(rng.randrange(1, most))])

    made = []
    for _ in range(count):
        kind = rng.choice(["score", "score", "greedy", "sampled", "penalty"])
        if kind == "score":
            made.append(Request(kind="loglikelihood", prompt=tokens(110), continuation=tokens(20)))
            continue
        sampling = Sampling(
            max_new_tokens=rng.randrange(1, 30),
            until=("e", "\n\n") if rng.random() < 0.5 else (),
            temperature=0.7 if kind == "sampled" else 0.0,
            extra={"repetition_penalty": 1.2} if kind == "penalty" else {},
        )
        made.append(Request(kind="generate", prompt=tokens(60), sampling=sampling))
    made.append(
        Request(
            kind="generate",
            prompt=tokens(9),
            sampling=Sampling(max_new_tokens=8, extra={"num_beams": 2}),
        )
    )
    return made


def run(engine, requests, *, at_a_time):
    """Return answers in order; some requests are submitted while others run."""
    found, place = {}, 0
    while len(found) < len(requests):
        if place < len(requests):
            engine.submit(list(enumerate(requests))[place : place + at_a_time])
            place += at_a_time
        for one in engine._work.step(0.0) if place < len(requests) else engine.step():
            assert not one.error
            assert one.started_s <= one.finished_s
            found[one.id] = one.answer
        # A step of no length does nothing: let a few pieces of the work be done.
        for _ in range(2):
            if engine._work._scores or engine._work._generations or engine._work._begun:
                engine._work._go_on(0.0)
    return [found[place] for place in range(len(requests))]


def test_free_answers_are_exact_ones_but_for_rounding(engines):
    exact, free = engines
    requests = requests_of(1, 60)
    want = run(exact, requests, at_a_time=60)
    for at_a_time in (5, 61):
        got = run(free, requests, at_a_time=at_a_time)
        for one, other in zip(got, want, strict=True):
            assert (one.tokens, one.finish, one.is_greedy) == (
                other.tokens,
                other.finish,
                other.is_greedy,
            )
            assert (one.prompt_tokens, one.new_tokens) == (other.prompt_tokens, other.new_tokens)
            if other.logprob is not None:
                assert one.logprob == pytest.approx(other.logprob, rel=1e-6, abs=1e-6)


def test_generations_join_and_leave_a_running_batch(engines):
    free = engines[1]
    sampling = [Sampling(max_new_tokens=count) for count in (4, 30, 12, 20, 3, 9, 25, 2)]
    requests = [
        Request(kind="generate", prompt=pack_tokens([7, place]), sampling=one)
        for place, one in enumerate(sampling)
    ]
    alone = run(engines[0], requests, at_a_time=8)
    work = free._work
    work.submit(list(enumerate(requests)))
    sizes, ended = set(), []
    while len(ended) < len(requests):
        work._go_on(0.0)
        while len(work._running) and not work._ended:
            sizes.add(len(work._running))
            for id_, answer in work._running.step():
                work._end(id_, answer)
        ended += work._ended
        work._ended = []
    assert max(sizes) == 6  # as many as fit
    assert len(sizes) > 2
    assert {one.id: one.answer for one in ended} == dict(enumerate(alone))


def test_one_bad_request_does_not_take_its_batch_with_it(engines):
    free = engines[1]
    requests = [
        Request(kind="loglikelihood", prompt=pack_tokens([5, token]), continuation=pack_tokens([3]))
        for token in (8, 100_000, 9)
    ]
    free.submit(list(enumerate(requests)))
    found = {one.id: one for one in free.step()}
    assert found[1].error
    assert found[0].answer.logprob < 0
    assert found[2].answer.logprob < 0


def test_inputs_of_like_length_go_together_within_the_memory_for_logits():
    assert plan_scores([5, 30, 7, 29, 6], 2, 300) == [[1, 3], [2, 4], [0]]
    assert plan_scores([1000] * 5, 64, 134_217) == [[0, 1], [2, 3], [4]]
    assert plan_scores([10_000_000], 64, 1000) == [[0]]
