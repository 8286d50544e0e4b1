"""The judge's proxy: an OpenAI-compatible server on this host that lets requests through to the judge under its quota.

`python -m holdfast.evaluate.metrics.judge_server --config FILE` with the clients' token and the judge's key in the
environment. It prints one line, `{"port": N}`, when it listens, and ends with its standard input. Whatever happens to
it, the journal holds what was reserved before it was sent, so that its next life keeps to the same limits.
"""

import argparse
import asyncio
import hashlib
import hmac
import json
import math
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from holdfast.core.clock import Clock, SystemClock
from holdfast.core.errors import HoldfastError
from holdfast.evaluate.metrics.judge_journal import JudgeJournal
from holdfast.evaluate.metrics.quota import (
    Action,
    Asked,
    Came,
    Event,
    Passed,
    QuotaLimits,
    QuotaState,
    Refuse,
    Remembered,
    Send,
    Wake,
    decide,
)

ENV_TOKEN = "HOLDFAST_JUDGE_TOKEN"
PRIORITY_HEADER = "X-Holdfast-Priority"
_MESSAGE_TOKENS = 16  # what a chat template adds to a message, and more
_MAX_BODY_BYTES = 16 << 20
_LAST_ANSWERS_S = 1.0


class JudgeConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A judge and what it may be asked.

    Attributes:
        upstream: the judge's API, up to and with its version ("https://host/v1").
        journal: file of reservations and answers; one a judge and budget.
        api_key_env: the environment variable that holds the judge's key; it may be unset for a local judge.
        requests_per_minute, tokens_per_minute, cost_limit, concurrency: as `QuotaLimits`; None for no limit. The cost
            is in the currency of the prices, over the journal's whole life.
        input_price, output_price: of a million tokens.
        max_tokens: of an answer whose request names no bound; the request goes out with this one.
        timeout_s: of one try.
        give_up_s: how long a request waits and is tried again before its client hears of the failure.
        host, port: where to listen; port 0 takes a free one.
    """

    upstream: str
    journal: str
    api_key_env: str = "OPENAI_API_KEY"
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    cost_limit: float | None = None
    concurrency: int = 32
    input_price: float = 0.0
    output_price: float = 0.0
    max_tokens: int = 2048
    timeout_s: float = 300.0
    give_up_s: float = 3600.0
    host: str = "127.0.0.1"
    port: int = 0

    def limits(self) -> QuotaLimits:
        """The quota's limits."""
        return QuotaLimits(
            requests_per_minute=math.inf if self.requests_per_minute is None else self.requests_per_minute,
            tokens_per_minute=math.inf if self.tokens_per_minute is None else self.tokens_per_minute,
            cost_microdollars=math.inf if self.cost_limit is None else math.floor(self.cost_limit * 1e6),
            concurrency=self.concurrency,
        )

    def cost(self, prompt_tokens: int, new_tokens: int) -> int:
        """What tokens cost, in millionths: a price of a million tokens is the millionths that one costs."""
        return math.ceil(prompt_tokens * self.input_price + new_tokens * self.output_price)


class JudgeStatistics(msgspec.Struct, kw_only=True):
    """What a proxy did in this life; `cost` over its journal's, `waiting` now. `waited_s` sums over all requests."""

    requests: int = 0
    answered: int = 0
    reused: int = 0
    refused: int = 0
    overloaded: int = 0
    tokens: int = 0
    cost: float = 0.0
    waiting: int = 0
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Reply:
    status: int
    body: str
    retry_after: str = ""


@dataclass(slots=True)
class _Waiting:
    """A try on its way through the quota."""

    sent: "asyncio.Future[str]"  # the limit that forbids it, or "" to send
    tokens: int
    cost: int
    asked_s: float


class JudgeProxy:
    """The proxy without its sockets' life: `application` serves, `close` ends.

    `pause` waits, `asyncio.sleep` but for tests.
    """

    def __init__(
        self,
        config: JudgeConfig,
        *,
        token: str,
        api_key: str = "",
        clock: Clock | None = None,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Open the journal. Raises BadUse, OSError."""
        self._config = config
        self._token = token
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._clock = clock or SystemClock()
        self._pause = pause
        self._journal = JudgeJournal(Path(config.journal))
        past = self._journal.past
        # Wall time as of the start, then monotonic: a clock that is set back cannot reopen a window.
        self._epoch_s = max(self._clock.now_s(), past.last_s) - self._clock.monotonic_s()
        self._quota = QuotaState(config.limits())
        for event in past.settled:
            decide(self._quota, event)
        for tokens, cost in past.unsettled:  # sent perhaps, answered perhaps: spent
            decide(self._quota, Remembered(until_s=self._now_s(), tokens=tokens, cost_microdollars=cost))
        self._next_request = past.next_request
        self._waiting: dict[int, _Waiting] = {}
        self._same: dict[str, asyncio.Task[_Reply]] = {}
        self._alarm: asyncio.Task[None] | None = None
        self._alarm_s = math.inf
        self._session: aiohttp.ClientSession | None = None
        self.statistics = JudgeStatistics(cost=self._quota.spent_microdollars / 1e6)

    def _now_s(self) -> float:
        return self._epoch_s + self._clock.monotonic_s()

    def application(self) -> web.Application:
        """The routes."""
        application = web.Application(client_max_size=_MAX_BODY_BYTES)
        for prefix in ("", "/v1"):
            application.router.add_post(f"{prefix}/chat/completions", self._complete)
            application.router.add_post(f"{prefix}/completions", self._complete)
            application.router.add_get(f"{prefix}/models", self._models)
        application.router.add_get("/statistics", self._say_statistics)
        application.on_cleanup.append(self._clean_up)
        return application

    async def _clean_up(self, _: web.Application) -> None:
        if self._alarm:
            self._alarm.cancel()
        for task in self._same.values():
            task.cancel()
        if self._session:
            await self._session.close()
        self._journal.close()

    # Clients

    def _is_known(self, request: web.Request) -> bool:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(given.encode(), self._token.encode())

    async def _say_statistics(self, request: web.Request) -> web.Response:
        if not self._is_known(request):
            return _refusal(401, "Wrong token.", "invalid_api_key")
        return web.json_response(body=msgspec.json.encode(self.statistics))

    async def _models(self, request: web.Request) -> web.Response:
        if not self._is_known(request):
            return _refusal(401, "Wrong token.", "invalid_api_key")
        reply = await self._call("GET", "/models", None)
        return web.Response(status=reply.status, text=reply.body, content_type="application/json")

    async def _complete(self, request: web.Request) -> web.Response:
        if not self._is_known(request):
            return _refusal(401, "Wrong token: clients of the judge get theirs from its proxy.", "invalid_api_key")
        try:
            body = await request.json()
            wanted = self._bounded(body)
            tokens, cost = self._most(wanted)
            priority = float(request.headers.get(PRIORITY_HEADER, "0"))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return _refusal(400, f"Not a request that the judge's proxy understands: {error}.", "invalid_request_error")
        path = request.path.removeprefix("/v1")
        key = _content_key(path, wanted)
        kept = self._journal.kept(key) if key else None
        if kept is not None:
            self.statistics.reused += 1
            return web.Response(text=kept, content_type="application/json")
        task = self._same.get(key)
        if task is None:
            task = asyncio.ensure_future(self._answer(path, wanted, tokens, cost, priority, key))
            if key:
                self._same[key] = task
                task.add_done_callback(lambda _: self._same.pop(key, None))
        else:
            self.statistics.reused += 1
        # Shielded: a client that goes away leaves an answer that is paid for, and kept.
        reply = await asyncio.shield(task)
        return web.Response(status=reply.status, text=reply.body, content_type="application/json")

    def _bounded(self, body: Any) -> dict[str, Any]:
        """The request with a bound on its answer. Raises ValueError, TypeError."""
        if not isinstance(body, dict):
            raise TypeError("the body is no object")
        if body.get("stream"):
            raise ValueError("streams are not let through; ask without")
        if body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
            return {**body, "max_tokens": self._config.max_tokens}
        return body

    def _most(self, body: dict[str, Any]) -> tuple[int, int]:
        """The most tokens and cost a request can take: no tokenizer makes more tokens than bytes."""
        prompt = body.get("messages", body.get("prompt", ""))
        known = {"messages", "prompt", "model", "max_tokens", "max_completion_tokens", "temperature", "seed", "n"}
        other = {name: value for name, value in body.items() if name not in known}  # tools, response_format
        size_bytes = len(json.dumps([prompt, other], ensure_ascii=False).encode())
        prompt_tokens = size_bytes + _MESSAGE_TOKENS * (len(prompt) if isinstance(prompt, list) else 1)
        choices = max(1, int(body.get("n") or 1), int(body.get("best_of") or 1))
        prompts = len(prompt) if isinstance(prompt, list) and "messages" not in body else 1
        bound = max(int(body.get("max_tokens") or 0), int(body.get("max_completion_tokens") or 0))
        if bound < 1:
            raise ValueError("max_tokens is below 1")
        new_tokens = bound * choices * max(1, prompts)
        return prompt_tokens + new_tokens, self._config.cost(prompt_tokens, new_tokens)

    # The judge

    async def _answer(
        self, path: str, body: dict[str, Any], tokens: int, cost: int, priority: float, key: str
    ) -> _Reply:
        """Ask the judge, again and again while it is overloaded."""
        deadline_s = self._now_s() + self._config.give_up_s
        while True:
            request, limit = await self._admitted(tokens, cost, priority)
            if limit:
                self.statistics.refused += 1
                return self._never(limit, tokens, cost)
            self._journal.reserve(self._now_s(), request, tokens, cost)
            self.statistics.requests += 1
            reply = await self._call("POST", path, body)
            if self._came(request, reply, tokens, cost):
                if reply.status == 200:
                    self.statistics.answered += 1
                    if key:
                        self._journal.keep(key, reply.body)
                return reply
            if self._now_s() >= deadline_s:
                return reply

    async def _admitted(self, tokens: int, cost: int, priority: float) -> tuple[int, str]:
        request = self._next_request
        self._next_request += 1
        sent: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        now_s = self._now_s()
        self._waiting[request] = _Waiting(sent, tokens, cost, now_s)
        self._hear(Asked(now_s=now_s, request=request, tokens=tokens, cost_microdollars=cost, priority=priority))
        return request, await sent

    def _hear(self, event: Event) -> None:
        self._act(decide(self._quota, event))
        self.statistics.cost = self._quota.spent_microdollars / 1e6
        self.statistics.waiting = len(self._waiting)

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(request) | Refuse(request):
                    waiting = self._waiting.pop(request)
                    self.statistics.waited_s += self._now_s() - waiting.asked_s
                    waiting.sent.set_result("" if isinstance(action, Send) else action.limit)
                case Wake(at_s):
                    self._wake(at_s)

    def _wake(self, at_s: float) -> None:
        if self._alarm and not self._alarm.done():
            if self._alarm_s <= at_s:
                return
            self._alarm.cancel()
        self._alarm_s = at_s
        self._alarm = asyncio.ensure_future(self._ring(at_s))

    async def _ring(self, at_s: float) -> None:
        await self._pause(max(0.0, at_s - self._now_s()))
        self._alarm = None
        self._hear(Passed(now_s=self._now_s()))

    def _came(self, request: int, reply: _Reply, tokens: int, cost: int) -> bool:
        """Settle what a try took; whether its reply is final."""
        is_overloaded = reply.status == 429 or reply.status >= 500
        used, paid = tokens, cost  # unknown counts as all that was reserved
        if reply.status == 200:
            usage = _usage(reply.body)
            if usage is not None:
                used, paid = sum(usage), self._config.cost(*usage)
        elif 400 <= reply.status < 500:
            used, paid = 0, 0  # turned away: nothing was computed
        now_s = self._now_s()
        self._journal.settle(now_s, request, used, paid)
        self.statistics.tokens += used
        self.statistics.overloaded += is_overloaded
        self._hear(
            Came(
                now_s=now_s,
                request=request,
                tokens=used,
                cost_microdollars=paid,
                outcome="overloaded" if is_overloaded else "well" if reply.status == 200 else "failed",
                retry_after_s=_retry_after_s(reply.retry_after),
            )
        )
        return not is_overloaded

    async def _call(self, method: str, path: str, body: dict[str, Any] | None) -> _Reply:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)  # the quota decides how many fly
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        timeout = aiohttp.ClientTimeout(total=self._config.timeout_s)
        url = self._config.upstream.rstrip("/") + path
        try:  # no redirects: they could carry the key elsewhere
            async with self._session.request(
                method, url, json=body, timeout=timeout, allow_redirects=False
            ) as response:
                text = (await response.read()).decode(errors="replace")
                return _Reply(response.status, text, response.headers.get("Retry-After", ""))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return _Reply(599, _error(f"The judge at {url} cannot be reached: {type(error).__name__}.", "unreachable"))

    def _never(self, limit: str, tokens: int, cost: int) -> _Reply:
        config = self._config
        if limit == "cost":
            text = (
                f"The judge's cost limit of {config.cost_limit} is spent ({self._quota.spent_microdollars / 1e6:.6f}; "
                f"this request could cost {cost / 1e6:.6f}). Raise the limit and score again: answers are kept."
            )
            return _Reply(402, _error(text, "insufficient_quota"))
        text = (
            f"A request of up to {tokens} tokens never fits the judge's limits ({config.tokens_per_minute} tokens, "
            f"{config.requests_per_minute} requests a minute). Raise them, or lower max_tokens."
        )
        return _Reply(413, _error(text, "request_too_large"))


def _content_key(path: str, body: dict[str, Any]) -> str:
    """Names a request whose answer stands for every later one; empty where it is drawn anew each time."""
    temperature = body.get("temperature")
    if temperature != 0 and body.get("seed") is None:
        return ""
    content = {name: value for name, value in body.items() if name not in {"user", "stream", "metadata"}}
    text = json.dumps([path, content], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _usage(body: str) -> tuple[int, int] | None:
    """Tokens of prompt and answer, where a reply says so."""
    try:
        usage = json.loads(body)["usage"]
        prompt_tokens, total_tokens = int(usage["prompt_tokens"]), int(usage["total_tokens"])
    except (ValueError, KeyError, TypeError):
        return None
    return (prompt_tokens, total_tokens - prompt_tokens) if 0 <= prompt_tokens <= total_tokens else None


def _retry_after_s(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None


def _error(text: str, code: str) -> str:
    return json.dumps({"error": {"message": text, "type": code, "code": code, "param": None}})


def _refusal(status: int, text: str, code: str) -> web.Response:
    return web.Response(status=status, text=_error(text, code), content_type="application/json")


async def serve(config: JudgeConfig) -> None:
    """Listen until standard input ends."""
    proxy = JudgeProxy(config, token=os.environ[ENV_TOKEN], api_key=os.environ.get(config.api_key_env, ""))
    runner = web.AppRunner(proxy.application(), access_log=None, shutdown_timeout=_LAST_ANSWERS_S)
    await runner.setup()
    site = web.TCPSite(runner, config.host, config.port)
    await site.start()
    sys.stdout.write(json.dumps({"port": runner.addresses[0][1]}) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.buffer.read)
    await runner.cleanup()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="judge_server", description="An OpenAI-compatible proxy under a quota.")
    parser.add_argument("--config", type=Path, required=True, help="a JudgeConfig as JSON")
    arguments = parser.parse_args()
    try:
        config = msgspec.json.decode(arguments.config.read_bytes(), type=JudgeConfig)
        asyncio.run(serve(config))
    except (HoldfastError, msgspec.DecodeError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
