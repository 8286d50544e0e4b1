"""Compare exact mode with stock lm-eval: the same bits in any order."""

import random

import pytest
import torch

from holdfast.evaluate.engines.hf.engine import TransformersEngine
from holdfast.evaluate.types.engine import EngineSpec
from holdfast.evaluate.types.requests import Request, Sampling, pack_tokens, unpack_tokens

LENGTH = 96
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "Question",
    "what",
    "is",
    "it",
    "Answer",
    "42",
]


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def engine(models, name):
    engine = TransformersEngine(EngineSpec(device="cpu", threads=1))
    engine.load(models[name])
    return engine


def run(engine, requests, *, order=None):
    """Return answers in the order of requests, submitted in another order, in pieces."""
    order = order or list(range(len(requests)))
    found = {}
    for start in range(0, len(order), 7):
        engine.submit([(place, requests[place]) for place in order[start : start + 7]])
        found |= {one.id: one for one in engine.step()}
    while len(found) < len(requests):
        found |= {one.id: one for one in engine.step()}
    assert not [one.error for one in found.values() if one.error]
    return [found[place].answer for place in range(len(requests))]


def shuffled(count, seed):
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


def scored(pairs):
    return [
        Request(
            kind="loglikelihood",
            prompt=pack_tokens(context),
            continuation=pack_tokens(continuation),
        )
        for context, continuation in pairs
    ]


def random_pairs():
    """Make pairs: short, long, beyond the model's length, and groups with one input."""
    rng = random.Random(5)

    def tokens(count):
        return [rng.randrange(2, 300) for _ in range(count)]

    pairs = [(tokens(rng.randrange(1, 60)), tokens(rng.randrange(1, 20))) for _ in range(40)]
    pairs += [(tokens(rng.randrange(90, 140)), tokens(rng.randrange(1, 30))) for _ in range(6)]
    pairs += [(tokens(2), tokens(LENGTH)), (tokens(1), tokens(LENGTH))]
    for _ in range(8):
        context = tokens(rng.randrange(5, 50))
        pairs += [(context, [choice]) for choice in tokens(4)]
        pairs += [(context[:-3], [*context[-3:-1], choice]) for choice in tokens(3)]
    return pairs


def test_log_probabilities_have_the_bits_of_stock_in_any_order(engine, stock, name):
    pairs = random_pairs()
    want = stock(name)._loglikelihood_tokens([(None, *pair) for pair in pairs], disable_tqdm=True)
    for seed in range(3):
        got = run(engine, scored(pairs), order=shuffled(len(pairs), seed))
        assert [(answer.logprob, answer.is_greedy) for answer in got] == want


def test_one_input_cut_in_different_places_is_answered_as_stock_answers_each_by_itself(
    engine, stock, name
):
    """Stock lm-eval takes wrong rows for shorter continuations in one call: its gather starts at 0."""
    context = [5, 9, 17, 33, 65]
    pairs = [(context, [7]), (context[:-3], [*context[-3:], 7]), (context[:-1], [context[-1], 9])]
    want = [
        stock(name)._loglikelihood_tokens([(None, *pair)], disable_tqdm=True)[0] for pair in pairs
    ]
    got = run(engine, scored(pairs))
    assert [(answer.logprob, answer.is_greedy) for answer in got] == want


def test_greedy_continuations_are_told(engine, stock, name):
    context = [5, 6, 7, 8]
    with torch.no_grad():
        tokens = stock(name).model.generate(
            torch.tensor([context]),
            max_new_tokens=4,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    continuation = tokens[0, 4:].tolist()
    pairs = [(context, continuation), (context, [*continuation[:-1], (continuation[-1] + 1) % 300])]
    assert [answer.is_greedy for answer in run(engine, scored(pairs))] == [True, False]


def test_rolling_windows_have_the_bits_of_stock(engine, stock, name):
    from lm_eval import utils
    from lm_eval.api.instance import Instance

    lm = stock(name)
    texts = [" ".join(random.Random(seed).choices(WORDS, k=60 * (seed + 1))) for seed in range(3)]
    instances = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in texts]
    want = lm.loglikelihood_rolling(instances, disable_tqdm=True)
    for text, total in zip(texts, want, strict=True):
        windows = utils.get_rolling_token_windows(
            token_list=lm.tok_encode(text),
            prefix_token=lm.prefix_token_id,
            max_seq_len=lm.max_length,
            context_len=1,
        )
        got = run(engine, scored([utils.make_disjoint_window(window) for window in windows]))
        assert sum(answer.logprob for answer in got) == total


GENERATIONS = [
    {"until": ["\n\n"], "max_gen_toks": 24},
    {"until": ["\n\n", "Question:", "e"], "max_gen_toks": 40},
    {"until": [], "max_gen_toks": 12},
    {"until": ["never said"], "max_gen_toks": 70},
    {"until": ["\n"], "max_gen_toks": 1},
    {"until": ["th"], "max_gen_toks": 30, "repetition_penalty": 1.3},
    {"until": ["th"], "max_gen_toks": 10, "num_beams": 2},
    {"until": ["x"], "max_gen_toks": 10, "no_repeat_ngram_size": 2},
    {"until": ["x"], "max_gen_toks": 10, "min_new_tokens": 6},
]


def stock_generations(lm):
    """Return stock lm-eval's generations, and the same as requests."""
    from lm_eval.api.instance import Instance

    rng = random.Random(3)
    asked = []
    for place in range(2 * len(GENERATIONS)):
        prompt = " ".join(rng.choices(WORDS, k=rng.randrange(1, 40)))
        asked.append((prompt, GENERATIONS[place % len(GENERATIONS)]))
    instances = [Instance("generate_until", {}, one, 0) for one in asked]
    want = lm.generate_until(instances, disable_tqdm=True)
    requests = []
    for prompt, settings in asked:
        extra = {
            key: value for key, value in settings.items() if key not in ("until", "max_gen_toks")
        }
        sampling = Sampling(
            max_new_tokens=settings["max_gen_toks"], until=tuple(settings["until"]), extra=extra
        )
        requests.append(
            Request(kind="generate", prompt=pack_tokens(lm.tok_encode(prompt)), sampling=sampling)
        )
    return requests, want


def text_of(lm, request, answer):
    from lm_eval.models.utils import postprocess_generated_text

    stop = [*request.sampling.until, "</s>"]
    return postprocess_generated_text(lm.tok_decode(list(unpack_tokens(answer.tokens))), stop, None)


def test_generations_are_those_of_stock_in_any_order(engine, stock, name):
    lm = stock(name)
    requests, want = stock_generations(lm)
    got = run(engine, requests, order=shuffled(len(requests), 1))
    assert [
        text_of(lm, request, answer) for request, answer in zip(requests, got, strict=True)
    ] == want
    assert {answer.finish for answer in got} == {"stop", "length"}


def test_every_token_is_that_of_generate(engine, stock, name):
    """Tokens, not only text, are equal, for all prompt lengths up to the model's."""
    lm = stock(name)
    for length in (1, 17, 64):
        prompt = torch.randint(2, 300, (1, length), generator=torch.Generator().manual_seed(length))
        most = LENGTH - length
        with torch.no_grad():
            want = lm._model_generate(
                prompt, max_length=length + most, stop=["</s>"], attention_mask=prompt * 0 + 1
            )
        sampling = Sampling(max_new_tokens=most)
        request = Request(
            kind="generate", prompt=pack_tokens(prompt[0].tolist()), sampling=sampling
        )
        assert list(unpack_tokens(run(engine, [request])[0].tokens)) == want[0, length:].tolist()


def test_the_end_of_sequence_token_ends_a_generation(engine, stock, name):
    lm, model = stock(name), stock(name).model
    prompt = [5, 6, 7]
    sampling = Sampling(max_new_tokens=20)
    request = Request(kind="generate", prompt=pack_tokens(prompt), sampling=sampling)
    free = list(unpack_tokens(run(engine, [request])[0].tokens))
    engine._model.generation_config.eos_token_id = [1, free[3]]
    model.generation_config.eos_token_id = [1, free[3]]
    try:
        repeated = Sampling(
            max_new_tokens=20, extra={"remove_invalid_values": False}
        )  # a recipe worked out anew
        got = run(
            engine, [Request(kind="generate", prompt=pack_tokens(prompt), sampling=repeated)]
        )[0]
        tensor = torch.tensor([prompt])
        want = lm._model_generate(
            tensor, max_length=23, stop=["</s>"], attention_mask=tensor * 0 + 1
        )
    finally:
        engine._model.generation_config.eos_token_id = model.generation_config.eos_token_id = 1
    assert list(unpack_tokens(got.tokens)) == want[0, 3:].tolist()
    assert got.tokens[-4:] == pack_tokens([free[3]])
    assert got.finish == "stop"


def test_what_is_sampled_depends_on_the_request_alone(engine):
    def sampled(repeat, **other):
        sampling = Sampling(max_new_tokens=12, temperature=0.8, repeat=repeat, **other)
        return Request(kind="generate", prompt=pack_tokens([5, 6, 7]), sampling=sampling)

    requests = [
        sampled(0),
        sampled(1),
        sampled(2),
        sampled(0, top_p=0.9),
        sampled(0, top_k=5),
        sampled(0, seed=4),
    ]
    requests.append(sampled(0, extra={"no_repeat_ngram_size": 2}))  # through `generate` itself
    first = run(engine, requests)
    torch.manual_seed(99)
    again = run(engine, requests, order=shuffled(len(requests), 1))
    assert [answer.tokens for answer in first] == [answer.tokens for answer in again]
    assert len({answer.tokens for answer in first}) == len(requests)


def test_what_cannot_be_answered_is_an_error_of_its_own(engine):
    good = scored([([5, 6], [7])])[0]
    bad = {
        1: Request(
            kind="loglikelihood", prompt=pack_tokens([100_000]), continuation=pack_tokens([1])
        ),
        2: Request(
            kind="generate", prompt=pack_tokens([5]), sampling=Sampling(max_new_tokens=LENGTH)
        ),
        3: Request(kind="chat", text="[]", sampling=Sampling(max_new_tokens=5)),
        4: scored([([5], [1] * (LENGTH + 1))])[0],
        5: Request(kind="loglikelihood", prompt=pack_tokens([5])),
        6: Request(
            kind="generate",
            prompt=pack_tokens([5]),
            sampling=Sampling(max_new_tokens=5, extra={"no_such_thing": 1}),
        ),
        7: Request(kind="generate", prompt=b"", sampling=Sampling(max_new_tokens=5)),
    }
    engine.submit([(0, good), *bad.items()])
    found = {}
    while len(found) < 8:
        found |= {one.id: one for one in engine.step()}
    assert found[0].answer.logprob < 0
    assert all(found[place].error and found[place].answer is None for place in bad)
    assert f"between 1 and {LENGTH - 1}" in found[2].error
    assert "no_such_thing" in found[6].error
    assert engine.step() == []


def test_recalled_requests_are_gone_and_the_others_are_answered(engine):
    engine.submit(list(enumerate(scored([([5, 6], [7]), ([5, 6], [8]), ([9, 6], [8])]))))
    sampling = Sampling(max_new_tokens=3)
    engine.submit([(3, Request(kind="generate", prompt=pack_tokens([5]), sampling=sampling))])
    assert engine.recall([1, 2, 3, 77]) == [1, 2, 3]
    assert [one.id for one in engine.step()] == [0]
    assert engine.step() == []
    assert engine.recall([0]) == []


def test_stop_strings_stop_where_those_of_lm_eval_do(stock):
    """The stop is equal token for token, also for strings over several tokens."""
    from lm_eval.models.utils_hf import stop_sequences_criteria

    from holdfast.evaluate.engines.hf.sampling import StopStrings

    tokenizer = stock("llama").tokenizer
    rng = random.Random(0)
    strings = ["e", "th", "\n\n", "Question:", "</s>", "a b", "lazy dog"]
    stops = StopStrings(tokenizer)
    seen = set()
    for _ in range(60):
        until = rng.sample(strings, k=2)
        tokens = tokenizer.encode(
            " ".join(rng.choices([*WORDS, "\n\n", "Question:", "lazy dog"], k=6))
        )
        tokens = [token for token in tokens for _ in range(rng.choice([1, 1, 2]))]
        is_stop = stops.watch(until)
        for length in range(1, len(tokens) + 1):
            # New at each length, so that the criterion has no memory.
            theirs = stop_sequences_criteria(tokenizer, until, 0, 1)(
                torch.tensor([tokens[:length]]), None
            )
            assert is_stop(tokens[:length]) == bool(theirs)
            seen.add(bool(theirs))
    assert seen == {True, False}
