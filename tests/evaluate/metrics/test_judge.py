"""Test the judge's proxy over real HTTP, with slow, overloaded, broken and expensive judges."""

import asyncio
import contextlib
import fcntl
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from holdfast.core.errors import BadUse
from holdfast.evaluate.metrics.judge.config import JudgeConfig
from holdfast.evaluate.metrics.judge.journal import JudgeJournal, journal_of
from holdfast.evaluate.metrics.judge.proxy import Judge
from holdfast.evaluate.metrics.judge.server import JudgeProxy
from holdfast.testing import FakeClock

TOKEN, KEY = "token-of-the-clients", "key-of-the-judge"
Answer = Callable[["Upstream", dict[str, Any]], Awaitable[web.StreamResponse]]


async def _well(upstream: "Upstream", body: dict[str, Any]) -> web.Response:
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    return web.json_response(
        {"choices": [{"message": {"content": str(upstream.asked)}}], "usage": usage}
    )


class Upstream:
    """A judge on the loopback, on the test's own clock."""

    def __init__(self, clock: FakeClock, answer: Answer = _well) -> None:
        self.clock = clock
        self.answer = answer
        self.times_s: list[float] = []
        self.keys: set[str] = set()
        self.bodies: list[dict[str, Any]] = []

    @property
    def asked(self) -> int:
        return len(self.times_s)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.times_s.append(self.clock.monotonic_s())
        self.keys.add(request.headers.get("Authorization", ""))
        body = await request.json() if request.can_read_body else {}
        self.bodies.append(body)
        return await self.answer(self, body)


@contextlib.asynccontextmanager
async def _serving(application: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def _judged(
    upstream: Upstream, journal: Path, *, evaluation_id: str = "e", **options: Any
) -> AsyncIterator[tuple[JudgeProxy, str]]:
    async def pause(seconds: float) -> None:
        """Advance the clock while everything waits."""
        await asyncio.sleep(0.01)
        upstream.clock.advance(seconds)

    application = web.Application()
    application.router.add_route("*", "/v1/{path:.*}", upstream.handle)
    async with _serving(application) as url:
        config = JudgeConfig(
            upstream=url, journal=str(journal), evaluation_id=evaluation_id, **options
        )
        proxy = JudgeProxy(config, token=TOKEN, api_key=KEY, clock=upstream.clock, pause=pause)
        async with _serving(proxy.application()) as proxy_url:
            yield proxy, proxy_url


def _body(text: str = "Is it right?", **options: Any) -> dict[str, Any]:
    return {
        "model": "judge",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 10,
        **options,
    }


async def _ask(
    url: str, body: Any, token: str = TOKEN, path: str = "/chat/completions"
) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(url + path, json=body) as response,
    ):
        return response.status, json.loads(await response.text())


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_forwards_with_its_own_key(tmp_path: Path, clock: FakeClock) -> None:
    async def scenario() -> None:
        upstream = Upstream(clock)
        async with _judged(upstream, tmp_path / "j") as (proxy, url):
            status, reply = await _ask(url, _body())
            assert (status, reply["usage"]["total_tokens"]) == (200, 15)
            assert (await _ask(url, _body(), path="/completions"))[0] == 200
            assert upstream.keys == {f"Bearer {KEY}"}
            assert (await _ask(url, _body(), token="another"))[0] == 401
            assert proxy.statistics.tokens == 30
        assert KEY not in (tmp_path / "j").read_text()
        assert TOKEN not in (tmp_path / "j").read_text()

    asyncio.run(scenario())


def test_pays_for_an_answer_once(tmp_path: Path, clock: FakeClock) -> None:
    async def scenario() -> None:
        upstream = Upstream(clock)
        for _ in range(2):  # and in its next life
            async with _judged(upstream, tmp_path / "j") as (_, url):
                together = [_ask(url, _body(temperature=0)) for _ in range(5)]
                assert len({json.dumps(reply) for _, reply in await asyncio.gather(*together)}) == 1
        assert upstream.asked == 1
        async with _judged(upstream, tmp_path / "j") as (_, url):
            await _ask(url, _body(temperature=0, model="another"))
            await _ask(url, _body(seed=1))
            await _ask(url, _body(seed=2))
            assert upstream.asked == 4
            for _ in range(2):  # drawn anew each time
                await _ask(url, _body(temperature=1))
        assert upstream.asked == 6

    asyncio.run(scenario())


def test_a_judge_that_answers_429_for_a_minute(tmp_path: Path, clock: FakeClock) -> None:
    async def overloaded(upstream: Upstream, body: dict[str, Any]) -> web.StreamResponse:
        if upstream.clock.monotonic_s() < 60:
            return web.json_response({"error": {}}, status=429, headers={"Retry-After": "7"})
        return await _well(upstream, body)

    async def scenario() -> None:
        upstream = Upstream(clock, overloaded)
        async with _judged(upstream, tmp_path / "j", concurrency=8) as (proxy, url):
            replies = await asyncio.gather(*(_ask(url, _body(str(n))) for n in range(20)))
            assert {status for status, _ in replies} == {200}
            assert proxy.statistics.answered == 20
            assert (
                proxy.statistics.overloaded == upstream.asked - 20 <= 8 + 4 + 2 + 8
            )  # halved, with the requested pause
            assert clock.monotonic_s() < 75

    asyncio.run(scenario())


def test_no_window_exceeds_the_quota_with_many_clients_and_restarts(
    tmp_path: Path, clock: FakeClock
) -> None:
    async def scenario() -> None:
        upstream = Upstream(clock)
        for life in range(3):
            async with _judged(upstream, tmp_path / "j", requests_per_minute=7) as (_, url):
                await asyncio.gather(*(_ask(url, _body(f"{life} {n}")) for n in range(15)))
        times_s = sorted(upstream.times_s)
        assert len(times_s) == 45
        assert all(
            later - earlier >= 60 for earlier, later in zip(times_s, times_s[7:], strict=False)
        )

    asyncio.run(scenario())


def test_what_was_in_flight_when_it_was_killed_counts_as_spent(
    tmp_path: Path, clock: FakeClock
) -> None:
    config = JudgeConfig(
        upstream="http://127.0.0.1:9/v1",
        journal=str(tmp_path / "j"),
        evaluation_id="e",
        cost_limit=0.001,
        output_price=50,
    )

    async def killed() -> None:
        proxy = JudgeProxy(config, token=TOKEN, clock=clock)
        proxy._journal.reserve(clock.now_s(), 0, 20, 500)
        with (tmp_path / "j").open("a") as file:
            file.write('{"what": "settl')  # cut short by the kill
        proxy._journal.close()

    async def scenario() -> None:
        upstream = Upstream(clock)
        options = {"cost_limit": 0.001, "output_price": 50, "requests_per_minute": 2}
        async with _judged(upstream, tmp_path / "j", **options) as (proxy, url):
            assert proxy.statistics.cost == 0.0005
            assert (await _ask(url, _body()))[0] == 200  # 5 tokens at 50 a million, of 500 reserved
            assert proxy.statistics.cost == 0.00075
            status, reply = await _ask(url, _body())
            assert status == 402
            assert (
                "cost limit of 0.001 is spent (0.000750; this request could cost 0.000500)"
                in reply["error"]["message"]
            )
            assert upstream.asked == 1

    asyncio.run(killed())
    asyncio.run(scenario())


def test_reserves_before_it_sends(tmp_path: Path, clock: FakeClock) -> None:
    seen = []

    async def look(upstream: Upstream, body: dict[str, Any]) -> web.StreamResponse:
        seen.append(
            [json.loads(line)["what"] for line in (tmp_path / "j").read_text().splitlines()[1:]]
        )
        return await _well(upstream, body)

    async def scenario() -> None:
        async with _judged(Upstream(clock, look), tmp_path / "j") as (_, url):
            await _ask(url, _body("a"))
            await _ask(url, _body("b"))

    asyncio.run(scenario())
    assert seen == [["reserved"], ["reserved", "settled", "reserved"]]


@pytest.mark.parametrize("kind", ["not json", "no usage", "cut off", "redirect", "error 500"])
def test_judges_that_misbehave(tmp_path: Path, clock: FakeClock, kind: str) -> None:
    async def misbehave(upstream: Upstream, body: dict[str, Any]) -> web.StreamResponse:
        match kind:
            case "not json":
                return web.Response(text="<html>")
            case "no usage":
                return web.json_response({"choices": []})
            case "redirect":
                return web.Response(status=302, headers={"Location": "http://127.0.0.1:9/"})
            case "error 500" if upstream.asked > 2:
                return await _well(upstream, body)
            case "cut off" if upstream.asked > 2:
                return await _well(upstream, body)
            case "error 500":
                return web.Response(status=500, text="oh")
        raise ConnectionResetError

    async def scenario() -> None:
        upstream = Upstream(clock, misbehave)
        async with _judged(upstream, tmp_path / "j", output_price=1.0) as (proxy, url):
            headers = {"Authorization": f"Bearer {TOKEN}"}
            async with (
                aiohttp.ClientSession(headers=headers) as session,
                session.post(f"{url}/chat/completions", json=_body()) as response,
            ):
                assert response.status == (302 if kind == "redirect" else 200)
            if kind in {"error 500", "cut off"}:
                assert upstream.asked == 3
            else:
                assert upstream.asked == 1
                assert proxy.statistics.cost == 10 / 1e6  # unknown counts as all of max_tokens

    asyncio.run(scenario())


def test_gives_up_on_a_judge_that_is_not_there(tmp_path: Path, clock: FakeClock) -> None:
    async def scenario() -> None:
        upstream = Upstream(clock)
        async with _judged(upstream, tmp_path / "j", give_up_s=100.0) as (proxy, url):
            proxy._config = msgspec.structs.replace(proxy._config, upstream="http://127.0.0.1:9/v1")
            status, reply = await _ask(url, _body())
            assert status == 599
            assert "cannot be reached" in reply["error"]["message"]
            assert clock.monotonic_s() >= 100

    asyncio.run(scenario())


def test_refuses_what_it_cannot_bound(tmp_path: Path, clock: FakeClock) -> None:
    async def scenario() -> None:
        upstream = Upstream(clock)
        async with _judged(upstream, tmp_path / "j", tokens_per_minute=1000, max_tokens=77) as (
            _,
            url,
        ):
            assert (await _ask(url, _body(stream=True)))[0] == 400
            assert (await _ask(url, [1]))[0] == 400
            assert (await _ask(url, _body(max_tokens=0)))[0] == 400
            assert (await _ask(url, _body(max_tokens=2000)))[0] == 413
            assert (await _ask(url, _body(n=200)))[0] == 413
            assert upstream.asked == 0
            assert (await _ask(url, _body(max_tokens=None)))[0] == 200
            assert upstream.bodies[0]["max_tokens"] == 77

    asyncio.run(scenario())


def test_each_evaluation_has_the_whole_cost_limit_and_one_that_goes_on_keeps_its_own(
    tmp_path: Path, clock: FakeClock
) -> None:
    async def scenario() -> None:
        upstream = Upstream(clock)
        statuses = []
        for evaluation_id in (
            "a",
            "b",
            "a",
        ):  # of which each answer costs 0.00025, and may cost 0.0005
            options = {"cost_limit": 0.0009, "output_price": 50}
            async with _judged(
                upstream, tmp_path / "j", evaluation_id=evaluation_id, **options
            ) as (proxy, url):
                statuses.append([(await _ask(url, _body()))[0] for _ in range(2)])
                assert proxy.statistics.cost == 0.0005
        assert statuses == [[200, 200], [200, 200], [402, 402]]

    asyncio.run(scenario())


def test_the_limits_a_minute_are_the_judges_whoever_asks(tmp_path: Path, clock: FakeClock) -> None:
    async def scenario() -> None:
        upstream = Upstream(clock)
        for evaluation_id in "ab":
            async with _judged(
                upstream, tmp_path / "j", evaluation_id=evaluation_id, requests_per_minute=1
            ) as (
                _,
                url,
            ):
                assert (await _ask(url, _body(evaluation_id)))[0] == 200
        assert upstream.times_s[1] - upstream.times_s[0] >= 60

    asyncio.run(scenario())


def test_what_a_killed_evaluation_had_in_flight_is_its_cost_and_fills_one_window(
    tmp_path: Path, clock: FakeClock
) -> None:
    killed = JudgeJournal(tmp_path / "j", "killed")
    killed.reserve(clock.now_s(), 0, 20, 500)
    killed.close()
    clock.advance(1000.0)
    waited_s = []

    async def life(evaluation_id: str) -> None:
        upstream = Upstream(clock)
        before_s = clock.monotonic_s()
        async with _judged(
            upstream, tmp_path / "j", evaluation_id=evaluation_id, requests_per_minute=1
        ) as (
            proxy,
            url,
        ):
            await _ask(url, _body(str(before_s)))
            waited_s.append(upstream.times_s[0] - before_s)
            assert proxy.statistics.cost == (0.0005 if evaluation_id == "killed" else 0.0)
        clock.advance(100.0)

    for evaluation_id in ("other", "other", "killed"):
        asyncio.run(life(evaluation_id))
    assert waited_s == pytest.approx([60.0, 0.0, 0.0])


def test_one_evaluation_at_a_time_asks_a_judge(
    tmp_path: Path, clock: FakeClock, monkeypatch: Any
) -> None:
    first = JudgeJournal(tmp_path / "j", "first")
    with (tmp_path / "j").open("ab") as file:
        file.write(b'{"what":"opened","evalu')  # being written
    with pytest.raises(
        BadUse,
        match=r"^The evaluation first uses this judge, whose limits .* Wait for it, or stop it.$",
    ):
        JudgeJournal(tmp_path / "j", "second")
    flock, waited = fcntl.flock, []

    def end_then_lock(file: int, how: int) -> None:
        if not how & fcntl.LOCK_NB:
            waited.append(True)
            first.close()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", end_then_lock)
    again = JudgeJournal(tmp_path / "j", "first")  # whose proxy of before is about to end
    assert waited
    again.close()
    JudgeJournal(tmp_path / "j", "second").close()


def test_another_address_is_another_judge(tmp_path: Path) -> None:
    here = journal_of("http://a/v1", tmp_path)
    assert here == journal_of("http://a/v1/", tmp_path)
    assert here != journal_of("http://b/v1", tmp_path)
    assert here.parent == tmp_path


def test_a_process_of_its_own_killed_and_started_again(
    tmp_path: Path, clock: FakeClock, monkeypatch: Any
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)

    async def scenario() -> None:
        upstream = Upstream(clock)
        application = web.Application()
        application.router.add_route("*", "/v1/{path:.*}", upstream.handle)
        async with _serving(application) as url:
            config = JudgeConfig(
                upstream=url,
                journal=str(tmp_path / "j"),
                evaluation_id="e",
                api_key_env="JUDGE_KEY",
                requests_per_minute=2,
            )
            with await asyncio.to_thread(Judge, config, tmp_path) as judge:
                environment = judge.environment()
                assert KEY not in environment.values()
                for text in "ab":
                    status, _ = await _ask(
                        environment["OPENAI_BASE_URL"],
                        _body(text, temperature=0),
                        environment["OPENAI_API_KEY"],
                    )
                    assert status == 200
                assert upstream.keys == {f"Bearer {KEY}"}
                statistics = await asyncio.to_thread(judge.statistics)
                assert (statistics.requests, statistics.answered, statistics.tokens) == (2, 2, 30)
                another = msgspec.structs.replace(config, evaluation_id="another")
                with pytest.raises(BadUse, match="The evaluation e uses this judge"):
                    await asyncio.to_thread(Judge, another, tmp_path)
                judge._running.process.kill()
                judge._running.process.wait()
                assert not judge.is_running()
                await asyncio.to_thread(judge.restart)
                token = judge.environment()["OPENAI_API_KEY"]
                assert (await _ask(judge.url, _body("a", temperature=0), token))[0] == 200  # kept
                assert upstream.asked == 2
                waiting = asyncio.ensure_future(_ask(judge.url, _body("c"), token))
                while not (statistics := await asyncio.to_thread(judge.statistics)).waiting:
                    assert statistics.requests == 0, "the quota of its first life was forgotten"
                waiting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await waiting
        assert upstream.asked == 2

    asyncio.run(scenario())
