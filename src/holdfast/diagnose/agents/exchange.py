"""Send requests to an endpoint over HTTP, and return its texts; no part of a response is trusted.

A request is retried if the server is overloaded or broken (status 429 or 5xx), or if the connection
breaks. The wait before a retry is the time that the server gives, or else doubles each time. All
retries must fit into the budget. Error messages are fixed sentences, since the text of an exception
may contain the key.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Final

import httpx

from holdfast.diagnose.agents.answers import Malformed, json_object
from holdfast.diagnose.agents.endpoint import Endpoint, Prompt, Reply
from holdfast.diagnose.agents.redact import redact
from holdfast.diagnose.agents.untrusted import sentence

_PASSING: Final = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
_REFUSES_A_FIELD: Final = frozenset({400, 422})
_SAID_CHARACTERS: Final = 160


class _Failed(Exception):
    """A request failed; the message is the sentence for the user."""

    def __init__(self, message: str, *, passing: bool = False, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.passing = passing
        """True if another try may succeed."""
        self.wait_s = wait_s
        """The seconds that the server requests."""


class _RefusesAField(Exception):
    """The server does not support an optional field of the request."""


async def exchange(
    endpoint: Endpoint, prompts: Sequence[Prompt], temperature: float
) -> list[Reply]:
    """Return one reply per prompt, in the order of `prompts`, within the endpoint's budget."""
    headers = {
        "Accept": "application/json",
        "Accept-Encoding": "identity",
        "User-Agent": "holdfast",
    }
    if endpoint.key:
        headers["Authorization"] = f"Bearer {endpoint.key}"
    try:
        opened = httpx.AsyncClient(
            headers=headers,
            follow_redirects=False,
            timeout=endpoint.try_timeout_s,
            trust_env=not endpoint.is_this_host,  # proxies and certificates
            # Certificates are not needed without TLS, and loading them takes time.
            verify=not endpoint.is_plain_local,
        )
    except (ImportError, ValueError, OSError):  # an invalid proxy or certificate file
        why = (
            "cannot be reached: the environment's proxy or SSL_CERT_FILE is invalid. "
            "Fix or unset it."
        )
        return [Reply(failed=f"The model at {endpoint.host} {why}")] * len(prompts)
    async with opened as client:
        asking = _Asking(endpoint, client, temperature)
        tasks = [asyncio.create_task(asking.reply(prompt)) for prompt in prompts]
        done, late = await asyncio.wait(tasks, timeout=endpoint.budget_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        return [
            task.result() if task in done else Reply(failed=endpoint.too_late()) for task in tasks
        ]


class _Asking:
    """The state that all requests of one exchange share."""

    def __init__(self, endpoint: Endpoint, client: httpx.AsyncClient, temperature: float) -> None:
        self._endpoint = endpoint
        self._client = client
        self._latest_s = endpoint.clock.monotonic_s() + endpoint.budget_s
        self._gate = asyncio.Semaphore(endpoint.parallel)
        self._optional: dict[str, Any] = {
            "temperature": temperature,
            "max_tokens": endpoint.answer_tokens,
            "response_format": {"type": "json_object"},
        }
        """Left out of all requests once a server refuses a request: not all servers and models
        support each field."""

    async def reply(self, prompt: Prompt) -> Reply:
        """Return the reply to one prompt."""
        async with self._gate:
            try:
                return Reply(text=await self._tried_again(prompt))
            except _Failed as failed:
                return Reply(failed=f"The model at {self._endpoint.host} {failed}")

    async def _tried_again(self, prompt: Prompt) -> str:
        endpoint = self._endpoint
        for number in range(endpoint.tries):
            try:
                return await self._in_time(prompt)
            except _Failed as failed:
                wait_s = endpoint.backoff_s * 2**number if failed.wait_s is None else failed.wait_s
                too_late = endpoint.clock.monotonic_s() + wait_s >= self._latest_s
                if not failed.passing or number + 1 == endpoint.tries or too_late:
                    raise
            await endpoint.pause(wait_s)
        raise AssertionError("the last try raises")

    async def _in_time(self, prompt: Prompt) -> str:
        seconds = self._endpoint.try_timeout_s
        try:
            # The timeouts of httpx apply to each piece of a response, so a response that trickles
            # in slowly would never end. This timeout covers the whole response.
            async with asyncio.timeout(seconds):
                try:
                    return await self._reply(prompt, dict(self._optional))
                except _RefusesAField:
                    self._optional.clear()
                    return await self._reply(prompt, {})
        except (TimeoutError, httpx.TimeoutException):
            raise _Failed(
                f"gave no complete answer within {seconds:g} s. Try again, or use a faster model."
            ) from None
        except httpx.InvalidURL:
            raise _Failed(f"has an invalid address. Check {Endpoint.env_url()}.") from None
        except httpx.ConnectError:
            raise _Failed(
                f"cannot be reached. Check {Endpoint.env_url()}, and that the server runs.",
                passing=True,
            ) from None
        except (httpx.HTTPError, httpx.StreamError, OSError):
            raise _Failed(
                "closed the connection. Try again, and check the server's log.", passing=True
            ) from None

    async def _reply(self, prompt: Prompt, optional: dict[str, Any]) -> str:
        endpoint = self._endpoint
        messages = [
            {"role": "system", "content": prompt.instructions},
            {"role": "user", "content": prompt.data},
        ]
        body = json.dumps({"model": endpoint.model, "messages": messages, **optional}).encode(
            "ascii"
        )
        kind = {"Content-Type": "application/json"}
        async with self._client.stream(
            "POST", endpoint.request_url, content=body, headers=kind
        ) as response:
            raw_body = await self._body(response)
            if response.status_code in _REFUSES_A_FIELD and optional:
                raise _RefusesAField
            _check_status(endpoint, response, raw_body)
        return _text_of(raw_body)

    async def _body(self, response: httpx.Response) -> bytes:
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise _Failed(
                "compresses its answers although the "
                "request forbids it. Check the proxies in between."
            )
        body = bytearray()
        async for piece in response.aiter_raw():
            body += piece
            if len(body) > self._endpoint.answer_limit_bytes:
                raise _Failed(
                    f"answered more than {self._endpoint.answer_limit_bytes} bytes."
                    " Use another model."
                )
        return bytes(body)


def _check_status(endpoint: Endpoint, response: httpx.Response, body: bytes) -> None:
    status = response.status_code
    if status == httpx.codes.OK:
        return
    if response.is_redirect or 300 <= status < 400:
        raise _Failed(
            f"redirects to another address, which is not followed. Check {Endpoint.env_url()}."
        )
    if status in _PASSING:
        raise _Failed(
            f"is overloaded or broken (status {status}). Try again later.",
            passing=True,
            wait_s=_named_wait_s(response),
        )
    if status in (401, 403):
        raise _Failed(f"refuses the key (status {status}). Check {Endpoint.env_key()}.")
    if status == httpx.codes.NOT_FOUND:
        raise _Failed(
            "has no such path or model."
            f" Check {Endpoint.env_url()} and {Endpoint.env_model()} ({endpoint.model})."
        )
    because = sentence(
        redact(body[:4096].decode("utf-8", "replace"), endpoint.known_secrets), _SAID_CHARACTERS
    )
    raise _Failed(
        f"refused the request (status {status}: {because})."
        f" Check {Endpoint.env_model()} and the server."
    )


def _named_wait_s(response: httpx.Response) -> float | None:
    named = response.headers.get("Retry-After", "")
    return float(named) if named.isascii() and named.isdigit() and len(named) < 8 else None


def _text_of(body: bytes) -> str:
    """Return the text of the model from the body of the server's response."""
    try:
        text = json_object(body.decode("utf-8"))["choices"][0]["message"]["content"]
    except (Malformed, ValueError, LookupError, TypeError):
        text = None
    if not isinstance(text, str) or not text.strip():
        raise _Failed(
            "answered with no text of a chat completion."
            f" Check {Endpoint.env_url()}: it is the API's base."
        )
    return text
