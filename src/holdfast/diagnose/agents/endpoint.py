"""Configure the language model, any OpenAI-compatible endpoint, by environment variables.

The variables are `HOLDFAST_LLM_URL` (up to and including the version, such as `https://host/v1`),
`HOLDFAST_LLM_MODEL` and, if the server requires a key, `HOLDFAST_LLM_KEY`. Secrets are removed from
all prompts here. The model can only return text, since it is offered no tools. Redirects are not
followed, and the size and the time of answers are limited.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass, field
from threading import Thread
from typing import ClassVar, Final
from urllib.parse import urlsplit

from holdfast.core.clock import Clock, SystemClock
from holdfast.core.errors import HoldfastError
from holdfast.diagnose.agents.openai_api import Api
from holdfast.diagnose.agents.redact import redact

_GRACE_S: Final = 2.0
"""The seconds to wait for the end of an exchange after its budget is spent. A name lookup cannot be
interrupted, so the wait must be limited separately."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One question."""

    instructions: str
    """The instructions, a fixed text of Holdfast without content from outside."""
    data: str
    """The content from outside, such as log lines, prepared by `untrusted`."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The text of an answer, or the reason why there is no answer."""

    text: str = ""
    failed: str = ""
    """Why there is no answer, in a sentence with the next step; empty if there is an answer."""


@dataclass(frozen=True, kw_only=True)
class Endpoint(Api):
    """A model that answers questions."""

    ENV: ClassVar[str] = "HOLDFAST_LLM"
    PATH: ClassVar[str] = "/chat/completions"

    try_timeout_s: float = 60.0
    """The limit in seconds for one request, to the last byte of the answer."""
    budget_s: float = 120.0
    """The limit in seconds for one call of `ask`, with all retries."""
    tries: int = 3
    backoff_s: float = 1.0
    """The seconds before the first retry, doubled before each further one. A time that the server
    gives takes precedence."""
    parallel: int = 4
    answer_limit_bytes: int = 256 * 1024
    answer_tokens: int = 1500
    clock: Clock = field(default_factory=SystemClock, repr=False)
    pause: Callable[[float], Awaitable[None]] = field(default=asyncio.sleep, repr=False)

    @property
    def is_plain_local(self) -> bool:
        """True if requests use neither TLS nor a proxy."""
        return self.is_this_host and urlsplit(self.url).scheme == "http"

    def ask(self, prompts: Sequence[Prompt], *, temperature: float) -> list[Reply]:
        """Send `prompts`, several in parallel; return one reply per prompt within `budget_s`.

        Raises:
            HoldfastError: httpx is not installed.
        """
        if not prompts:
            return []
        try:
            from holdfast.diagnose.agents.exchange import exchange
        except ImportError as error:
            raise HoldfastError(
                "A model endpoint needs httpx, which is not installed. Run: pip install httpx"
            ) from error
        clean = [
            Prompt(instructions=one.instructions, data=redact(one.data, self.known_secrets))
            for one in prompts
        ]
        replies: Future[list[Reply]] = Future()

        def work() -> None:
            try:
                replies.set_result(asyncio.run(exchange(self, clean, temperature)))
            except BaseException as error:
                replies.set_exception(error)

        # The exchange runs in a separate thread, since the caller may run in an event loop, in
        # whose thread no second event loop can run.
        Thread(target=work, name="holdfast-ask-model", daemon=True).start()
        try:
            return replies.result(timeout=self.budget_s + _GRACE_S)
        except Late:
            return [Reply(failed=self.too_late())] * len(prompts)

    def too_late(self) -> str:
        """Return the sentence that reports an answer later than `budget_s`."""
        return (
            f"The model at {self.host} had not answered after {self.budget_s:g} s. Try "
            "again, or use a faster model."
        )


def endpoint_from_environment(environment: Mapping[str, str] | None = None) -> Endpoint | None:
    """Return the endpoint that `environment` configures; None if `HOLDFAST_LLM_URL` is not set.

    Raises:
        BadUse: the URL, the model or the key cannot be used.
    """
    return Endpoint.from_environment(environment)
