"""Test the client over real HTTP, with correct, wrong, slow, endless and absent answers."""

import asyncio
import json
import socket

import pytest
from agents_world import endpoint_to

from holdfast.core.errors import BadUse
from holdfast.diagnose.agents.endpoint import Endpoint, Prompt, endpoint_from_environment
from holdfast.testing import FakeClock
from holdfast.testing.model_endpoint import Cut, Drip, Flood, ModelServer, Silence, Status, Words

PROMPT = Prompt(instructions="Say something.", data="The log.")
KEY = "sk-test-0123456789abcdefghij"


def one(endpoint, prompt=PROMPT):
    return endpoint.ask([prompt], temperature=0.5)[0]


def test_a_question_is_put_as_the_api_has_it():
    with ModelServer(lambda _: Words("fine"), key=KEY) as server:
        reply = one(endpoint_to(server, key=KEY))
    assert reply.text == "fine"
    assert not reply.failed
    (asked,) = server.asked
    assert asked.path == "/v1/chat/completions"
    assert asked.headers["authorization"] == f"Bearer {KEY}"
    assert asked.body["messages"] == [
        {"role": "system", "content": "Say something."},
        {"role": "user", "content": "The log."},
    ]
    assert (asked.body["model"], asked.body["temperature"]) == ("stub", 0.5)
    assert not {"tools", "functions", "tool_choice", "stream"} & set(asked.body)


def test_secrets_do_not_leave_whoever_asks():
    with ModelServer(lambda _: Words("fine")) as server:
        data = f"password=hunter2\nkey {KEY}\nAKIAIOSFODNN7EXAMPLE in jane@example.org's log"
        one(endpoint_to(server, key=KEY), Prompt(instructions="Read.", data=data))
    sent = json.dumps(server.asked[0].body)
    for secret in ("hunter2", KEY, "AKIAIOSF", "jane"):
        assert secret not in sent


def test_replies_come_in_the_order_of_the_questions():
    with ModelServer(lambda asked: Words(asked.body["messages"][1]["content"])) as server:
        prompts = [Prompt(instructions="Repeat.", data=f"number {number}") for number in range(12)]
        said = endpoint_to(server, parallel=3).ask(prompts, temperature=0.0)
    assert [reply.text for reply in said] == [f"number {number}" for number in range(12)]
    assert endpoint_to(server).ask([], temperature=0.0) == []


def test_it_can_be_asked_within_an_event_loop():
    async def inside(endpoint):
        return one(endpoint)

    with ModelServer(lambda _: Words("fine")) as server:
        assert asyncio.run(inside(endpoint_to(server))).text == "fine"


@pytest.mark.parametrize("first", [Status(429), Status(500), Status(503), Cut(), Cut(reset=True)])
def test_what_passes_is_tried_again(first):
    with ModelServer(lambda _: Words("fine")).then(first, first) as server:
        endpoint = endpoint_to(server)
        assert one(endpoint).text == "fine"
    assert len(server.asked) == 3
    assert endpoint.waits == [1.0, 2.0]


def test_the_server_names_the_time_to_wait():
    with ModelServer(lambda _: Words("fine")).then(Status(429, (("Retry-After", "7"),))) as server:
        endpoint = endpoint_to(server, clock=FakeClock())
        assert one(endpoint).text == "fine"
    assert endpoint.waits == [7.0]


@pytest.mark.parametrize(
    "named", ["9", "3600", "99999999999", "soon", "-5", "Wed, 21 Oct 2026 07:28:00 GMT"]
)
def test_no_wait_reaches_beyond_the_budget(named):
    with ModelServer(lambda _: Status(503, (("Retry-After", named),))) as server:
        endpoint = endpoint_to(server, clock=FakeClock())
        reply = one(endpoint)
    assert "overloaded or broken (status 503)" in reply.failed
    assert sum(endpoint.waits) < endpoint.budget_s


def test_tries_come_to_an_end():
    with ModelServer(lambda _: Status(502)) as server:
        reply = one(endpoint_to(server))
    assert len(server.asked) == 3
    assert "(status 502). Try again later." in reply.failed


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Status(401), "refuses the key (status 401). Check HOLDFAST_LLM_KEY."),
        (Status(403), "refuses the key (status 403)"),
        (
            Status(404),
            "has no such path or model. Check HOLDFAST_LLM_URL and HOLDFAST_LLM_MODEL (stub).",
        ),
        (
            Status(418, body=b"I am\na \x1b[1mteapot"),
            "refused the request (status 418: I am a [1mteapot)",
        ),
        (Status(200, body=b""), "answered with no text"),
        (Status(200, body=b"<html>login</html>"), "answered with no text"),
        (Status(200, body=b'{"choices": []}'), "answered with no text"),
        (Status(200, body=b'{"choices": [{"message": {"content": ""}}]}'), "answered with no text"),
        (Status(200, body=b'{"choices": [{"message": {"content": 7}}]}'), "answered with no text"),
        (
            Status(200, body=b'{"choices": [{"message": {"content": null, "tool_calls": [{}]}}]}'),
            "answered with no text",
        ),
        (
            Status(200, body=b'{"choices": [{"message": {"content": "\xff\xfe"}}]}'),
            "answered with no text",
        ),
        (Status(200, body=b"[" * 90_000), "answered with no text"),
        (
            Status(200, body=b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n'),
            "answered with no text",
        ),
        (
            Status(200, (("Content-Encoding", "gzip"),), b"\x1f\x8b" + b"0" * 90),
            "compresses its answers",
        ),
        (Status(200, body=b" " * 300_000), "answered more than 262144 bytes"),
        (Flood(), "answered more than 262144 bytes"),
    ],
)
def test_what_does_not_pass_is_said_once(answer, said):
    with ModelServer(lambda _: answer) as server:
        reply = one(endpoint_to(server, key=KEY))
    assert said in reply.failed
    assert reply.failed.startswith("The model at 127.0.0.1:")
    assert not reply.text
    assert KEY not in reply.failed
    assert len(server.asked) == 1 + (isinstance(answer, Status) and answer.code in (400, 422))


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(code):
    with ModelServer(lambda _: Words("from elsewhere")) as other, ModelServer() as server:
        server.then(Status(code, (("Location", f"{other.url}/chat/completions"),)))
        reply = one(endpoint_to(server, key=KEY))
        assert (
            "redirects to another address, which is not followed. Check HOLDFAST_LLM_URL."
            in reply.failed
        )
        assert not other.asked
    assert len(server.asked) == 1


@pytest.mark.parametrize("code", [400, 422])
def test_a_server_that_knows_less_is_asked_for_less(code):
    def picky(asked):
        return Status(code) if "response_format" in asked.body else Words("fine")

    with ModelServer(picky) as server:
        said = endpoint_to(server, parallel=1).ask([PROMPT] * 3, temperature=0.5)
    assert [reply.text for reply in said] == ["fine"] * 3
    assert [set(asked.body) - {"model", "messages"} != set() for asked in server.asked] == [
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize("answer", [Silence(), Drip(), Drip(headers=True)])
def test_one_try_ends_in_time(answer):
    with ModelServer(lambda _: answer) as server:
        reply = one(endpoint_to(server, try_timeout_s=2))
    assert "gave no complete answer within 2 s" in reply.failed
    assert len(server.asked) == 1


def test_all_tries_together_end_in_time():
    def sometimes(asked):
        return Words("fine") if asked.text.endswith("2") else Drip(headers=True)

    with ModelServer(sometimes) as server:
        prompts = [Prompt(instructions="x", data=str(number)) for number in range(4)]
        said = endpoint_to(server, budget_s=4).ask(prompts, temperature=0.5)
    assert [reply.text for reply in said] == ["", "", "fine", ""]
    assert "had not answered after 4 s" in said[0].failed


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    reply = Endpoint(url=f"http://127.0.0.1:{port}/v1", model="m", tries=1).ask(
        [PROMPT], temperature=0
    )[0]
    assert (
        reply.failed
        == f"The model at 127.0.0.1:{port} cannot be reached. Check HOLDFAST_LLM_URL, and that the server runs."
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ALL_PROXY", "socks5://10.0.0.1:1"),
        ("HTTPS_PROXY", "wrong://x"),
        ("SSL_CERT_FILE", "/no/such"),
    ],
)
def test_an_environment_that_cannot_be_used(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    reply = one(Endpoint(url="https://host.invalid/v1", model="m", tries=1))
    assert reply.failed.startswith(
        "The model at host.invalid cannot be reached: the environment's proxy"
    ), reply


def test_the_environment_names_the_endpoint():
    assert endpoint_from_environment({}) is None
    assert endpoint_from_environment({"HOLDFAST_LLM_URL": " ", "HOLDFAST_LLM_KEY": KEY}) is None
    made = endpoint_from_environment(
        {
            "HOLDFAST_LLM_URL": "https://host.example/v1/",
            "HOLDFAST_LLM_MODEL": "m",
            "HOLDFAST_LLM_KEY": f"{KEY}\n",
        }
    )
    assert (made.request_url, made.key, made.host) == (
        "https://host.example/v1/chat/completions",
        KEY,
        "host.example",
    )
    assert KEY not in repr(made)


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("http://h:1/v1", "http://h:1/v1/chat/completions"),
        ("http://h:1/v1/chat/completions", "http://h:1/v1/chat/completions"),
        ("https://h/openai/v1?api-version=2", "https://h/openai/v1/chat/completions?api-version=2"),
        ("http://[::1]:8000/v1#x", "http://[::1]:8000/v1/chat/completions"),
    ],
)
def test_where_requests_go(url, wanted):
    assert Endpoint(url=url, model="m").request_url == wanted


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"url": "host/v1"}, "HOLDFAST_LLM_URL is not an http or https address"),
        ({"url": "ftp://host"}, "HOLDFAST_LLM_URL is not an http or https address"),
        ({"url": "http://"}, "HOLDFAST_LLM_URL is not an http or https address"),
        ({"url": "http://h:99999999/v1"}, "HOLDFAST_LLM_URL is not an http or https address"),
        ({"url": "http://h/v1\r\nX: y"}, "HOLDFAST_LLM_URL is not an http or https address"),
        ({"url": f"http://user:{KEY}@h/v1"}, "holds a name or password"),
        (
            {"key": f"{KEY}\r\nX-Evil: 1"},
            "HOLDFAST_LLM_KEY has characters that are invalid in a key",
        ),
        ({"key": f"{KEY}ü"}, "HOLDFAST_LLM_KEY has characters that are invalid in a key"),
        ({"model": ""}, "HOLDFAST_LLM_MODEL is not set"),
    ],
)
def test_what_cannot_be_used_is_said_without_the_key(given, said):
    with pytest.raises(BadUse, match=said) as raised:
        Endpoint(**{"url": "http://h/v1", "model": "m", **given})
    assert KEY not in str(raised.value)
