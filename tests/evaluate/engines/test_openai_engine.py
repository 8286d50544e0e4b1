"""Test the engine for OpenAI-compatible servers against a real HTTP server with faults."""

import asyncio
import json
import threading

import pytest
from openai_stand_in import TOKENS, StandIn, logprob_of, text_of

from holdfast.core.errors import BadUse
from holdfast.evaluate.engines.openai import OpenAIEngine, _retry_after_s
from holdfast.evaluate.engines.openai_calls import path_and_body
from holdfast.evaluate.types.engine import EngineSpec, SwapRefused
from holdfast.evaluate.types.requests import Request, Sampling, pack_tokens, unpack_tokens


@pytest.fixture
def server(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with StandIn() as server:
        yield server


@pytest.fixture
def engine_for(tmp_path):
    """Return a function that makes loaded engines; `slept` collects their sleeps."""
    made = []

    def make(server, **given):
        slept = []

        async def sleep(seconds):
            slept.append(seconds)
            await asyncio.sleep(0)

        options = given.pop("options", {})
        engine = OpenAIEngine(
            EngineSpec(kind="openai", url=server.url, options=options, **given), sleep=sleep
        )
        made.append(engine)
        engine.slept = slept
        engine.load(tmp_path)
        return engine

    yield make
    for engine in made:
        engine.close()


def run(engine, requests):
    engine.submit(list(enumerate(requests)))
    found = {}
    while len(found) < len(requests):
        found |= {one.id: one for one in engine.step()}
    return [found[place] for place in range(len(requests))]


def generation(seed=0, **sampling):
    settings = {"max_new_tokens": 9, "until": ("\n", "")} | sampling
    return Request(kind="generate", prompt=pack_tokens([4, 5, seed]), sampling=Sampling(**settings))


def test_log_probabilities_of_tokens_are_those_of_the_continuation(server, engine_for):
    engine = engine_for(server)
    tokens = [11, 12, 13, 14, 15, 16]
    for split in range(1, 6):
        request = Request(
            kind="loglikelihood",
            prompt=pack_tokens(tokens[:split]),
            continuation=pack_tokens(tokens[split:]),
        )
        answer = run(engine, [request])[0].answer
        values = [logprob_of(b"", tokens, place) for place in range(split, 6)]
        assert answer.logprob == pytest.approx(sum(values))
        assert answer.is_greedy == all(value > -4 for value in values)
    path, body = server.seen[-1]
    assert path == "/v1/completions"
    assert {
        "prompt": tokens,
        "max_tokens": 1,
        "echo": True,
        "logprobs": 1,
        "temperature": 0,
    }.items() <= body.items()


def test_what_is_too_long_is_cut_from_the_left_as_lm_eval_does(server, engine_for):
    engine = engine_for(server)  # the server's limit is 64
    assert engine.max_length() == 64
    tokens = list(range(100, 200))
    request = Request(
        kind="loglikelihood", prompt=pack_tokens(tokens[:90]), continuation=pack_tokens(tokens[90:])
    )
    answer = run(engine, [request])[0].answer
    sent = server.seen[-1][1]["prompt"]
    assert sent == tokens[-63:]
    assert answer.logprob == pytest.approx(
        sum(logprob_of(b"", sent, place) for place in range(53, 63))
    )
    long = Request(
        kind="generate", prompt=pack_tokens(tokens), sampling=Sampling(max_new_tokens=10)
    )
    run(engine, [long])
    assert server.seen[-1][1]["prompt"] == tokens[-54:]


@pytest.mark.parametrize(("text", "first"), [("abcdef", 2), ("abcde", 1)])
def test_log_probabilities_of_text_begin_with_the_token_that_reaches_into_the_continuation(
    server, engine_for, text, first
):
    request = Request(kind="loglikelihood", text=text, continuation_text="ghijkl")
    answer = run(engine_for(server), [request])[0].answer
    whole = text + "ghijkl"
    pieces = [whole[at : at + 3] for at in range(0, len(whole), 3)]
    want = sum(logprob_of(b"", pieces, place) for place in range(first, len(pieces)))
    assert answer.logprob == pytest.approx(want)


def test_generations_come_as_tokens_where_tokens_were_asked(server, engine_for):
    engine = engine_for(server)
    extra = {"repetition_penalty": 1.1, "do_sample": True}
    answer = run(engine, [generation(temperature=0.5, top_p=0.9, top_k=3, extra=extra)])[0].answer
    assert list(unpack_tokens(answer.tokens)) == list(range(7, 7 + TOKENS))
    assert (answer.finish, answer.new_tokens) == ("length", TOKENS)
    sent = server.seen[-1][1]
    assert (sent["max_tokens"], sent["stop"], sent["temperature"]) == (9, ["\n"], 0.5)
    assert (sent["top_p"], sent["top_k"], sent["repetition_penalty"]) == (0.9, 3, 1.1)
    assert "do_sample" not in sent


def test_generations_of_text_and_chats_come_as_text(server, engine_for):
    engine = engine_for(server)
    text = Request(kind="generate", text="once", sampling=Sampling(max_new_tokens=4))
    messages = [{"role": "user", "content": "hello there"}]
    stops = tuple("abcdef")
    chat = Request(
        kind="chat", text=json.dumps(messages), sampling=Sampling(max_new_tokens=4, until=stops)
    )
    said = run(engine, [text, chat])
    assert said[0].answer.text == text_of("once")
    assert said[1].answer.text == text_of("hello there")
    assert not said[0].answer.tokens
    (sent,) = [body for path, body in server.seen if path == "/v1/chat/completions"]
    assert sent["messages"] == messages
    assert sent["stop"] == list("abcd")


def test_a_server_without_token_ids_needs_a_tokenizer(server, engine_for, models):
    server.token_ids = False
    said = run(engine_for(server), [generation()])[0]
    assert "tokenizer" in said.error
    engine = engine_for(server, options={"tokenizer": str(models["llama"])})
    answer = run(engine, [generation()])[0].answer
    from transformers import AutoTokenizer

    assert (
        AutoTokenizer.from_pretrained(models["llama"]).decode(list(unpack_tokens(answer.tokens)))
        == answer.text
    )


def test_the_seed_is_of_the_request_and_its_repeat():
    bodies = [
        path_and_body(generation(temperature=1.0, repeat=repeat), "m", 64)[1]
        for repeat in (0, 1, 0)
    ]
    assert bodies[0]["seed"] == bodies[2]["seed"] != bodies[1]["seed"]


def test_no_more_are_in_flight_than_allowed_and_what_waits_can_be_recalled(server, engine_for):
    server.hold = threading.Event()
    engine = engine_for(server, max_batch=3)
    engine.submit([(place, generation(place)) for place in range(10)])
    while server.in_flight < 3:
        engine.step()
    assert sorted(engine.recall(list(range(10)))) == list(range(3, 10))
    server.hold.set()
    found = []
    while len(found) < 3:
        found += engine.step()
    assert sorted(one.id for one in found) == [0, 1, 2]
    assert server.most_in_flight == 3


def test_a_storm_of_refusals_is_waited_out_as_the_server_asks(server, engine_for):
    engine = engine_for(server, max_batch=4)
    server.script = [(429, [("Retry-After", "7")], b"slow down")] * 20
    said = run(engine, [generation(seed) for seed in range(8)])
    assert all(one.answer for one in said)
    assert len(server.seen) == 28
    assert max(engine.slept) == pytest.approx(7.0, abs=0.2)
    assert (
        sum(slept > 6 for slept in engine.slept) > 20
    )  # those that were not refused themselves wait, too


def test_what_passes_is_tried_again_later_and_later(server, engine_for):
    engine = engine_for(server)
    server.script = [500, 503, "cut", b"<html>a proxy</html>", 502]
    said = run(engine, [generation()])[0]
    assert said.answer.new_tokens == TOKENS
    assert len(engine.slept) == 5
    assert engine.slept == sorted(engine.slept)


def test_a_call_that_hangs_is_cut_and_tried_again(server, engine_for):
    engine = engine_for(server, options={"timeout_s": 0.2})
    server.script = ["hang"]
    assert run(engine, [generation()])[0].answer.new_tokens == TOKENS


def test_patience_ends(server, engine_for):
    engine = engine_for(server, options={"patience_s": 20})
    server.script = [503] * 100
    said = run(engine, [generation()])[0]
    assert "503" in said.error
    assert "tried for 20 s" in said.error
    assert 3 < len(server.seen) < 20


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"choices": []},
        {
            "choices": [
                {"logprobs": {"token_logprobs": [None, -1.0], "top_logprobs": [None, {"a": -1.0}]}}
            ]
        },
        {
            "choices": [
                {
                    "logprobs": {
                        "token_logprobs": [None, None, -1],
                        "top_logprobs": [None, None, {"a": -1.0}],
                    }
                }
            ]
        },
    ],
)
def test_a_malformed_answer_is_an_error_of_that_request(server, engine_for, reply):
    engine = engine_for(server)
    server.script = [reply] * 3
    request = Request(kind="loglikelihood", prompt=pack_tokens([5]), continuation=pack_tokens([6]))
    said = run(engine, [request])[0]
    assert "unusable answer" in said.error
    assert run(engine, [request])[0].answer.logprob < 0


@pytest.mark.parametrize("listing", [403, 404, 405, 501])
def test_a_server_that_lists_no_models_is_asked_for_the_one_that_is_named(
    server, engine_for, listing
):
    server.listing = listing
    assert run(engine_for(server, model_name="tiny"), [generation()])[0].answer
    with pytest.raises(BadUse, match=f"answers {listing}: no listing"):
        engine_for(server)


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": "n/a", "completion_tokens": "n/a"},
        {"prompt_tokens": -5, "completion_tokens": 10**12},
        {"prompt_tokens": float("nan"), "completion_tokens": True},
        "n/a",
        None,
    ],
)
def test_counts_that_are_none_are_passed_over(server, engine_for, usage):
    engine = engine_for(server)
    server.script = [{"choices": [{"text": "abc", "token_ids": [1, 2]}], "usage": usage}]
    answer = run(engine, [generation()])[0].answer
    assert (answer.text, answer.prompt_tokens, answer.new_tokens) == ("abc", 3, 2)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([{"type": "image_url", "image_url": {}}, "c"], "c"),
        (None, ""),
    ],
)
def test_a_chat_may_answer_in_parts(server, engine_for, content, text):
    engine = engine_for(server)
    server.script = [{"choices": [{"message": {"content": content}}]}]
    chat = Request(kind="chat", text="[]", sampling=Sampling(max_new_tokens=9))
    assert run(engine, [chat])[0].answer.text == text


@pytest.mark.parametrize(
    ("logprobs", "missing"),
    [
        (None, "logprobs is null"),
        ({"token_logprobs": None, "top_logprobs": None}, "token_logprobs is null"),
        ({"token_logprobs": [None, -1.0, -1.0], "top_logprobs": None}, "top_logprobs is null"),
        ({"token_logprobs": [None, -1.0], "top_logprobs": [None, None]}, "top_logprobs is null"),
    ],
)
def test_a_server_without_log_probabilities_is_said_to_be_one(
    server, engine_for, logprobs, missing
):
    engine = engine_for(server)
    server.script = [{"choices": [{"logprobs": logprobs}]}]
    request = Request(kind="loglikelihood", prompt=pack_tokens([5]), continuation=pack_tokens([6]))
    assert (
        f"returns no log-probabilities of a prompt ({missing})" in run(engine, [request])[0].error
    )
    assert engine.slept == [], "the next try would say the same"


def test_log_probabilities_that_are_no_numbers_are_not_kept(server, engine_for):
    engine = engine_for(server)
    logprobs = {"token_logprobs": [None, float("nan"), 0], "top_logprobs": [None, {"a": 0}, {}]}
    server.script = [{"choices": [{"logprobs": logprobs}]}] * 3
    request = Request(kind="loglikelihood", prompt=pack_tokens([5]), continuation=pack_tokens([6]))
    assert "not numbers" in run(engine, [request])[0].error


def test_a_stream_that_nobody_asked_for_is_named(server, engine_for):
    engine = engine_for(server)
    headers = [("Content-Type", "text/event-stream")]
    server.script = [(200, headers, b'data: {"choices": []}\n\ndata: [DONE]\n\n')]
    assert "stream of events" in run(engine, [generation()])[0].error


def test_a_page_in_the_place_of_an_answer_is_tried_again_and_then_said(server, engine_for):
    engine = engine_for(server, options={"patience_s": 1})
    server.script = [b"<html>busy</html>"] * 9
    assert "sends an answer that is not JSON: <html>busy" in run(engine, [generation()])[0].error
    server.script = [b"<html>busy</html>"]
    assert run(engine, [generation()])[0].answer


def test_an_error_in_the_body_of_a_200_counts_as_its_status(server, engine_for):
    engine = engine_for(server)
    server.script = [
        {"error": {"message": "overloaded", "code": code}} for code in (429, "503")
    ] * 3
    assert run(engine, [generation()])[0].answer
    server.script = [{"error": {"message": "no such thing", "code": 400}}]
    assert "answers 400: no such thing" in run(engine, [generation()])[0].error


def test_a_bad_request_is_not_tried_again(server, engine_for):
    engine = engine_for(server)
    server.script = [400]
    assert "400: scripted 400" in run(engine, [generation()])[0].error
    assert len(server.seen) == 1
    assert engine.slept == []


def test_the_key_is_from_the_environment_alone(server, engine_for, monkeypatch):
    server.key = "secret-key"
    with pytest.raises(BadUse, match=r"401: Incorrect API key.*OPENAI_API_KEY"):
        engine_for(server)
    monkeypatch.setenv("OTHER_KEY", "secret-key")
    engine = engine_for(server, options={"api_key_env": "OTHER_KEY"})
    assert run(engine, [generation()])[0].answer
    with pytest.raises(BadUse, match="NO_SUCH_KEY holds no key"):
        engine_for(server, options={"api_key_env": "NO_SUCH_KEY"})


def test_a_wrong_model_or_address_is_said_with_what_there_is(server, engine_for):
    with pytest.raises(BadUse, match=r"does not serve big. It has tiny"):
        engine_for(server, model_name="big")
    assert engine_for(server).numerics() == f"openai {server.url} tiny"
    with pytest.raises(BadUse, match="--url"):
        OpenAIEngine(EngineSpec(kind="openai")).load(None)
    with StandIn() as gone:
        pass
    with pytest.raises(BadUse, match="cannot be reached"):
        engine_for(gone, options={"patience_s": 1})


def test_its_weights_are_not_ours_to_swap(server, engine_for, tmp_path):
    engine = engine_for(server)
    assert engine.canary() == []
    with pytest.raises(SwapRefused):
        engine.swap(tmp_path)


def test_retry_after_is_seconds_or_a_date():
    assert _retry_after_s("12") == 12.0
    assert _retry_after_s(None) is None
    assert _retry_after_s("soon") is None
    assert _retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
