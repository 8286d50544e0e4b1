"""Use any OpenAI-compatible server (vLLM, SGLang, llama.cpp, a hosted API).

Many calls are in flight at the same time. A thread with an event loop makes the calls, with
`aiohttp`, which lm-eval depends on through `datasets`. A call is repeated if the server is busy
(429), fails (5xx) or cannot be reached. The pauses between the attempts grow, or are as long as the
server's `Retry-After`. During such a `Retry-After` all calls wait, so that a server that throttles
gets no further load.
"""

import asyncio
import contextlib
import email.utils
import json
import os
import random
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.core.errors import BadUse
from holdfast.evaluate.engines.openai_calls import (
    MalformedReply,
    NotSupported,
    Tokenize,
    answer_of,
    path_and_body,
)
from holdfast.evaluate.types.engine import Curve, EngineSpec, Finished, SwapRefused
from holdfast.evaluate.types.requests import Answer, Request

if TYPE_CHECKING:
    from aiohttp import ClientSession

DEFAULT_KEY_ENV = "OPENAI_API_KEY"
_STEP_S = 0.1
_MAX_BATCH = 32
_MAX_LENGTH = 2048  # lm-eval's default for a server that does not state its limit
_AGAIN_STATUSES = {408, 409, 425, 429, 500, 502, 503, 504, 529}
_NO_LISTING = {403, 404, 405, 501}  # statuses of GET /models on servers and gateways without a list
_BACK_OFF_S = (0.5, 30.0)
_LONGEST_WAIT_S = 120.0  # the longest `Retry-After` that is obeyed
_LOAD_PATIENCE_S = 60.0
_MALFORMED_TRIES = 3


class Unanswerable(Exception):
    """The server will not answer this request.

    `status` is the HTTP status of the server's reply; 0 if the status is not the reason.
    """

    def __init__(self, why: str, status: int = 0) -> None:
        super().__init__(why)
        self.status = status


class OpenAIEngine:
    """Send requests to an OpenAI-compatible server; the methods implement `Engine`.

    The options are:

    - `api_key_env`: the environment variable with the API key;
    - `timeout_s` (600): the seconds that one call may take;
    - `patience_s` (900): the seconds for all attempts of a request;
    - `tokenizer`: a folder with the tokenizer for replies to requests with token ids.
    """

    def __init__(
        self, spec: EngineSpec, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._spec = spec
        self._sleep = sleep
        self._url = spec.url.rstrip("/")
        self._model = spec.model_name
        self._max_length = spec.max_length or _MAX_LENGTH
        self._max_batch = spec.max_batch or _MAX_BATCH
        self._timeout_s = float(spec.options.get("timeout_s") or 600)
        self._patience_s = float(spec.options.get("patience_s") or 900)
        self._tokenize: Tokenize | None = None
        self.wake = threading.Event()
        self._lock = threading.Lock()
        self._waiting: dict[int, Request] = {}
        self._finished: deque[Finished] = deque()
        self._in_flight: set[asyncio.Task[None]] = set()
        self._not_before_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None

    def load(self, folder: Path) -> None:  # noqa: ARG002 - the server has its own
        """Read the server's list of models; the server has its own weights.

        Raises:
            BadUse: the server does not answer, refuses the API key, or does not serve the model.
        """
        if not self._url.startswith(("http://", "https://")):
            raise BadUse(
                f"The engine openai needs a server; its url is {self._spec.url!r}. Give --url "
                "http://HOST/v1."
            )
        self._connect()
        self._choose_model()
        if tokenizer := self._spec.options.get("tokenizer"):
            self._tokenize = _tokenizer_of(Path(str(tokenizer)))

    def swap(self, folder: Path) -> None:
        """Raise SwapRefused, since the server's weights belong to its owner."""
        raise SwapRefused(f"The server {self._url} cannot load the weights of {folder}.")

    def canary(self) -> list[float]:
        """Return an empty list, since the server's weights are unknown."""
        return []

    def numerics(self) -> str:
        """See `Engine.numerics`; the server's address and model name replace the weights."""
        return f"openai {self._url} {self._model}"

    def max_length(self) -> int:
        """See `Engine.max_length`; returns the server's limit if the server states one."""
        return self._max_length

    def curve(self) -> Curve:
        """Return a guess of the cost curve, which observed times will correct."""
        return Curve(
            prefill_tokens_per_s=20_000.0,
            request_s=0.005,
            step_base_s=0.02,
            step_sequence_s=0.0002,
            max_batch=self._max_batch,
        )

    def submit(self, requests: Sequence[tuple[int, Request]]) -> None:
        """See `Engine.submit`."""
        with self._lock:
            self._waiting |= dict(requests)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._fill)

    def recall(self, ids: Sequence[int]) -> list[int]:
        """See `Engine.recall`."""
        with self._lock:
            return [id_ for id_ in ids if self._waiting.pop(id_, None) is not None]

    def step(self) -> list[Finished]:
        """See `Engine.step`; waits at most 0.1 s for an answer."""
        if not self._finished:
            self.wake.wait(_STEP_S)
        self.wake.clear()
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def close(self) -> None:
        """See `Engine.close`."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._hang_up(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._loop = None

    # The calls from the main thread

    def _connect(self) -> None:
        headers = self._authorization()
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._loop.run_forever, name="server", daemon=True
            )
            self._thread.start()
            self._session = asyncio.run_coroutine_threadsafe(
                self._open(headers), self._loop
            ).result()

    async def _open(self, headers: dict[str, str]) -> "ClientSession":
        from aiohttp import ClientSession, ClientTimeout, TCPConnector

        timeout = ClientTimeout(total=self._timeout_s, sock_connect=10.0)
        return ClientSession(connector=TCPConnector(limit=0), timeout=timeout, headers=headers)

    def _authorization(self) -> dict[str, str]:
        named = self._spec.options.get("api_key_env")
        key = os.environ.get(str(named or DEFAULT_KEY_ENV), "")
        if named and not key:
            raise BadUse(f"The variable {named} holds no key. Set it where the engines run.")
        return {"Authorization": f"Bearer {key}"} if key else {}

    async def _hang_up(self) -> None:
        with self._lock:
            self._waiting.clear()
        for task in list(self._in_flight):
            task.cancel()
        await asyncio.gather(*self._in_flight, return_exceptions=True)
        await self._session.close()

    def _call(
        self,
        method: str,
        url: str,
        body: dict[str, Any] | None = None,
        *,
        patience_s: float,
        optional: bool = False,
    ) -> Any:
        """Make one call from the main thread, with retries.

        Returns:
            The reply as JSON values; None if `optional` and the server lacks this endpoint.

        Raises:
            BadUse: the call failed for good.
        """
        assert self._loop is not None
        called = asyncio.run_coroutine_threadsafe(
            self._ask(method, url, body, patience_s), self._loop
        )
        try:
            return called.result()
        except Unanswerable as error:
            if optional and error.status in _NO_LISTING:
                return None
            raise BadUse(str(error)) from error

    def _choose_model(self) -> None:
        listed = self._call(
            "GET",
            f"{self._url}/models",
            patience_s=min(_LOAD_PATIENCE_S, self._patience_s),
            optional=bool(self._model),
        )
        models = (
            {str(one.get("id")): one for one in listed.get("data", [])}
            if isinstance(listed, dict)
            else {}
        )
        if not self._model and len(models) == 1:
            (self._model,) = models
        if not self._model or (models and self._model not in models):
            names = ", ".join(sorted(models)) or "none"
            raise BadUse(
                f"{self._url} does not serve {self._model or 'one model alone'}. It has {names}; "
                "name one."
            )
        limit = models.get(self._model, {}).get("max_model_len")  # reported by vLLM and SGLang
        if limit and not self._spec.max_length:
            self._max_length = int(limit)

    # Everything below runs in the event loop's thread.

    def _fill(self) -> None:
        """Send waiting requests while fewer than `max_batch` are in flight."""
        assert self._loop is not None
        while len(self._in_flight) < self._max_batch:
            with self._lock:
                if not self._waiting:
                    return
                id_ = next(iter(self._waiting))
                request = self._waiting.pop(id_)
            task = self._loop.create_task(self._answer(id_, request))
            self._in_flight.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        self._fill()

    async def _answer(self, id_: int, request: Request) -> None:
        started_s = time.monotonic()
        answer, error = None, ""
        try:
            answer = await self._ask_for(request)
        except Unanswerable as why:
            error = str(why)
        except Exception as why:  # our bug, or a request beyond JSON: only this request fails
            error = f"{type(why).__name__}: {why}"
        self._finished.append(
            Finished(
                id=id_, answer=answer, error=error, started_s=started_s, finished_s=time.monotonic()
            )
        )
        self.wake.set()

    async def _ask_for(self, request: Request) -> Answer:
        path, body = path_and_body(request, self._model, self._max_length)
        for tried in range(_MALFORMED_TRIES):
            reply = await self._ask("POST", f"{self._url}/{path}", body, self._patience_s)
            try:
                return answer_of(request, reply, self._max_length, self._tokenize)
            except NotSupported as error:
                raise Unanswerable(str(error)) from error
            except MalformedReply as error:
                if tried == _MALFORMED_TRIES - 1:
                    raise Unanswerable(
                        f"{self._url}/{path} sends an unusable answer: {error}."
                    ) from error
                await self._sleep(_BACK_OFF_S[0])
        raise AssertionError("the loop returns or raises")

    async def _ask(
        self, method: str, url: str, body: dict[str, Any] | None, patience_s: float
    ) -> Any:
        """Make a call, and repeat the call after failures until `patience_s` is over.

        Returns:
            The reply as JSON values; {} if the reply is empty.

        Raises:
            Unanswerable: the server will not answer.
        """
        import aiohttp

        waited_s, wait_s, why = 0.0, _BACK_OFF_S[0], ""
        while True:
            if (pause_s := self._not_before_s - time.monotonic()) > 0:
                await self._sleep(pause_s)
            try:
                async with self._session.request(
                    method, url, json=body, allow_redirects=False
                ) as reply:
                    text = await reply.text()
                    status = reply.status
                    asked_s = _retry_after_s(reply.headers.get("Retry-After"))
                    if status == 200 and reply.content_type == "text/event-stream":
                        raise Unanswerable(
                            f"{url} answers with a stream of events (text/event-stream), which was "
                            "not requested. "
                            "Turn streaming off at the server, or at the gateway before it."
                        )
                if status == 200:
                    try:
                        parsed = json.loads(text) if text else {}
                    except ValueError:
                        why = f"{url} sends an answer that is not JSON: {_brief(text)}"
                    else:
                        if (status := _stated_status(parsed)) == 200:
                            return parsed
                if status != 200:
                    why = f"{url} answers {status}: {_brief(text)}"
                    if status not in _AGAIN_STATUSES:
                        raise Unanswerable(_refusal(status, why, self._model), status)
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                why, asked_s = f"{url} cannot be reached: {type(error).__name__}: {error}", None
            pause_s = (
                min(_LONGEST_WAIT_S, asked_s)
                if asked_s is not None
                else wait_s * random.uniform(0.75, 1.25)
            )
            if asked_s is not None:
                self._not_before_s = max(self._not_before_s, time.monotonic() + pause_s)
            waited_s += max(pause_s, _BACK_OFF_S[0])
            if waited_s > patience_s:
                raise Unanswerable(
                    f"{why}. The engine tried for {patience_s:.0f} s. Check that the server works."
                )
            await self._sleep(pause_s)
            wait_s = min(_BACK_OFF_S[1], 2 * wait_s)


def _stated_status(reply: Any) -> int:
    """Return the HTTP status stated in the body of a reply; 200 if none is stated.

    Some gateways send a reply 200 with an error in its body.
    """
    error = reply.get("error") if isinstance(reply, dict) and "choices" not in reply else None
    code = str(error.get("code")) if isinstance(error, dict) else ""
    status = int(code) if code.isdecimal() else 200  # some gateways send a string
    return status if 400 <= status < 600 else 200


def _refusal(status: int, why: str, model: str) -> str:
    if status in (401, 403):
        return f"{why}. Put the server's key into the environment ({DEFAULT_KEY_ENV}, or the option api_key_env)."
    if status == 404:
        return f"{why}. Check that the URL ends with the API's version (/v1) and that {model!r} is served there."
    return f"{why}."


def _brief(text: str) -> str:
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        reply = json.loads(text)
        reply = reply.get("error", reply)
        text = str(reply.get("message", reply) if isinstance(reply, dict) else reply)
    return " ".join(text.split())[:300].rstrip(".")


def _retry_after_s(header: str | None) -> float | None:
    """Return the seconds of a `Retry-After` header; None if it is missing or malformed.

    The header states seconds or a date (RFC 9110, 10.2.3).
    """
    if header is None:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(header))
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    return None


def _tokenizer_of(folder: Path) -> Tokenize:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise BadUse(f"{folder} has no tokenizer that transformers can load: {error}") from error

    def tokenize(text: str) -> list[int]:
        tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return tokens

    return tokenize
