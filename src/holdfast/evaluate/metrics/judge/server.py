"""Run the judge's proxy: an OpenAI-compatible server that admits requests under the quota.

The command is `python -m holdfast.evaluate.metrics.judge.server --config FILE`, with the clients'
token and the judge's API key in the environment. The proxy prints one line: `{"port": N}` once it
listens, or `{"error": TEXT}` if it must not run. The proxy ends when its standard input is closed.
Reservations are in the journal before requests are sent, so that a restarted proxy keeps the same
limits after any crash.
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

from holdfast.core.child_process import await_release
from holdfast.core.clock import Clock, SystemClock
from holdfast.core.errors import HoldfastError
from holdfast.evaluate.metrics.judge.config import ENV_TOKEN, JudgeConfig, JudgeStatistics
from holdfast.evaluate.metrics.judge.gate import JudgeGate
from holdfast.evaluate.metrics.judge.journal import JudgeJournal

_MESSAGE_TOKENS = 16  # more than a chat template adds to a message
_MAX_BODY_BYTES = 16 << 20
_LAST_ANSWERS_S = 1.0


@dataclass(frozen=True, slots=True)
class _Reply:
    status: int
    body: str
    retry_after: str = ""


class JudgeProxy:
    """Serve the requests of clients through `application`, until `close`.

    `pause` replaces `asyncio.sleep` in tests.
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
        """Open the judge's journal.

        Raises:
            BadUse: another evaluation holds the journal.
            OSError: the journal cannot be opened.
        """
        self._config = config
        self._token = token
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._journal = JudgeJournal(Path(config.journal), config.evaluation_id)
        self._gate = JudgeGate(config.limits(), self._journal, clock or SystemClock(), pause)
        self._same: dict[str, asyncio.Task[_Reply]] = {}
        self._session: aiohttp.ClientSession | None = None
        self._statistics = JudgeStatistics()

    @property
    def statistics(self) -> JudgeStatistics:
        """The statistics up to now."""
        gate = self._gate
        return msgspec.structs.replace(
            self._statistics,
            cost=gate.spent_microdollars / 1e6,
            waiting=gate.waiting,
            waited_s=gate.waited_s,
        )

    def application(self) -> web.Application:
        """Return the web application with all its routes."""
        application = web.Application(client_max_size=_MAX_BODY_BYTES)
        for prefix in ("", "/v1"):
            application.router.add_post(f"{prefix}/chat/completions", self._complete)
            application.router.add_post(f"{prefix}/completions", self._complete)
            application.router.add_get(f"{prefix}/models", self._models)
        application.router.add_get("/statistics", self._send_statistics)
        application.on_cleanup.append(self._clean_up)
        return application

    async def _clean_up(self, _: web.Application) -> None:
        self._gate.close()
        for task in self._same.values():
            task.cancel()
        if self._session:
            await self._session.close()
        self._journal.close()

    # Clients

    def _is_known(self, request: web.Request) -> bool:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(given.encode(), self._token.encode())

    async def _send_statistics(self, request: web.Request) -> web.Response:
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
            return _refusal(
                401,
                "Wrong token: clients of the judge get theirs from its proxy.",
                "invalid_api_key",
            )
        try:
            body = await request.json()
            wanted = self._bounded(body)
            tokens, cost = self._most(wanted)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return _refusal(
                400,
                f"The judge's proxy cannot read this request: {error}.",
                "invalid_request_error",
            )
        path = request.path.removeprefix("/v1")
        key = _content_key(path, wanted)
        kept = self._journal.kept(key) if key else None
        if kept is not None:
            self._statistics.reused += 1
            return web.Response(text=kept, content_type="application/json")
        task = self._same.get(key)
        if task is None:
            task = asyncio.ensure_future(self._answer(path, wanted, tokens, cost, key))
            if key:
                self._same[key] = task
                task.add_done_callback(lambda _: self._same.pop(key, None))
        else:
            self._statistics.reused += 1
        # Let the request go on if its client leaves: the answer is paid for, and is kept.
        reply = await asyncio.shield(task)
        return web.Response(status=reply.status, text=reply.body, content_type="application/json")

    def _bounded(self, body: Any) -> dict[str, Any]:
        """Return the request with a limit on its answer's tokens.

        Raises:
            ValueError, TypeError: the proxy does not accept the request.
        """
        if not isinstance(body, dict):
            raise TypeError("the body is not an object")
        if body.get("stream"):
            raise ValueError("streams are not supported; leave stream out")
        if body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
            return {**body, "max_tokens": self._config.max_tokens}
        return body

    def _most(self, body: dict[str, Any]) -> tuple[int, int]:
        """Return the largest number of tokens that a request can use, and the cost of these tokens.

        A prompt counts one token for each byte, since no tokenizer makes more tokens than bytes.
        """
        prompt = body.get("messages", body.get("prompt", ""))
        known = {
            "messages",
            "prompt",
            "model",
            "max_tokens",
            "max_completion_tokens",
            "temperature",
            "seed",
            "n",
        }
        # Other arguments that cost tokens, such as tools and response_format.
        other = {name: value for name, value in body.items() if name not in known}
        size_bytes = len(json.dumps([prompt, other], ensure_ascii=False).encode())
        prompt_tokens = size_bytes + _MESSAGE_TOKENS * (
            len(prompt) if isinstance(prompt, list) else 1
        )
        choices = max(1, int(body.get("n") or 1), int(body.get("best_of") or 1))
        prompts = len(prompt) if isinstance(prompt, list) and "messages" not in body else 1
        bound = max(int(body.get("max_tokens") or 0), int(body.get("max_completion_tokens") or 0))
        if bound < 1:
            raise ValueError("max_tokens is below 1")
        new_tokens = bound * choices * max(1, prompts)
        return prompt_tokens + new_tokens, self._config.cost(prompt_tokens, new_tokens)

    # The judge

    async def _answer(
        self, path: str, body: dict[str, Any], tokens: int, cost: int, key: str
    ) -> _Reply:
        """Send a request to the judge, and send it again while the judge is overloaded."""
        deadline_s = self._gate.now_s() + self._config.give_up_s
        while True:
            request, limit = await self._gate.admit(tokens, cost)
            if limit:
                self._statistics.refused += 1
                return self._never(limit, tokens, cost)
            self._statistics.requests += 1
            reply = await self._call("POST", path, body)
            if self._came(request, reply, tokens, cost):
                if reply.status == 200:
                    self._statistics.answered += 1
                    if key:
                        self._journal.keep(key, reply.body)
                return reply
            if self._gate.now_s() >= deadline_s:
                return reply

    def _came(self, request: int, reply: _Reply, tokens: int, cost: int) -> bool:
        """Record the use of an attempt; return True if its reply is final."""
        is_overloaded = reply.status == 429 or reply.status >= 500
        used, paid = tokens, cost  # unknown use counts as the whole reservation
        if reply.status == 200:
            usage = _usage(reply.body)
            if usage is not None:
                used, paid = sum(usage), self._config.cost(*usage)
        elif 400 <= reply.status < 500:
            used, paid = 0, 0  # refused without computation
        self._gate.settle(
            request,
            used,
            paid,
            "overloaded" if is_overloaded else "well" if reply.status == 200 else "failed",
            retry_after_s=_retry_after_s(reply.retry_after),
        )
        self._statistics.tokens += used
        self._statistics.overloaded += is_overloaded
        return not is_overloaded

    async def _call(self, method: str, path: str, body: dict[str, Any] | None) -> _Reply:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)  # the quota limits the number in flight
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
            return _Reply(
                599,
                _error(
                    f"The judge at {url} cannot be reached: {type(error).__name__}.", "unreachable"
                ),
            )

    def _never(self, limit: str, tokens: int, cost: int) -> _Reply:
        config = self._config
        if limit == "cost":
            text = (
                f"The judge's cost limit of {config.cost_limit} is spent "
                f"({self._gate.spent_microdollars / 1e6:.6f}; "
                f"this request could cost {cost / 1e6:.6f}). Raise the limit and score again: "
                "answers are kept."
            )
            return _Reply(402, _error(text, "insufficient_quota"))
        text = (
            f"A request of up to {tokens} tokens never fits the judge's limits "
            f"({config.tokens_per_minute} tokens, "
            f"{config.requests_per_minute} requests a minute). Raise them, or lower max_tokens."
        )
        return _Reply(413, _error(text, "request_too_large"))


def _content_key(path: str, body: dict[str, Any]) -> str:
    """Return a key by which an answer is reused; empty if the answer is sampled at random."""
    temperature = body.get("temperature")
    if temperature != 0 and body.get("seed") is None:
        return ""
    content = {
        name: value for name, value in body.items() if name not in {"user", "stream", "metadata"}
    }
    text = json.dumps([path, content], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _usage(body: str) -> tuple[int, int] | None:
    """Return the numbers of tokens of prompt and answer; None if the reply does not state them."""
    try:
        usage = json.loads(body)["usage"]
        prompt_tokens, total_tokens = int(usage["prompt_tokens"]), int(usage["total_tokens"])
    except (ValueError, KeyError, TypeError):
        return None
    return (
        (prompt_tokens, total_tokens - prompt_tokens)
        if 0 <= prompt_tokens <= total_tokens
        else None
    )


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
    """Run the proxy until its parent closes the proxy's standard input or dies."""
    proxy = JudgeProxy(
        config, token=os.environ[ENV_TOKEN], api_key=os.environ.get(config.api_key_env, "")
    )
    runner = web.AppRunner(proxy.application(), access_log=None, shutdown_timeout=_LAST_ANSWERS_S)
    await runner.setup()
    site = web.TCPSite(runner, config.host, config.port)
    await site.start()
    sys.stdout.write(json.dumps({"port": runner.addresses[0][1]}) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(await_release)
    await runner.cleanup()


def main() -> None:
    """Run the proxy from the command line."""
    parser = argparse.ArgumentParser(
        prog="judge_server", description="An OpenAI-compatible proxy under a quota."
    )
    parser.add_argument("--config", type=Path, required=True, help="a JudgeConfig as JSON")
    arguments = parser.parse_args()
    try:
        config = msgspec.json.decode(arguments.config.read_bytes(), type=JudgeConfig)
        asyncio.run(serve(config))
    except HoldfastError as error:
        sys.stdout.write(json.dumps({"error": str(error)}) + "\n")
        sys.exit(error.exit_code)
    except (msgspec.DecodeError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
