"""Which model may be asked, and where: any OpenAI-compatible endpoint, by URL and key from the environment.

`HOLDFAST_LLM_URL` (up to and with its version: `https://host/v1`), `HOLDFAST_LLM_MODEL`, and `HOLDFAST_LLM_KEY` where
the server wants one. What is sent is redacted here, whoever asks. Only text comes back: no tools are offered, redirects
are not followed, an answer has a largest size and all of them together a latest moment.
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
"""So long after its latest moment an exchange is waited for: a name server's silence cannot be cut short."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One question."""

    instructions: str
    """Fixed words of ours; nothing from outside."""
    data: str
    """What the question is about, from outside, made ready by `untrusted`."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What came back: a text, or why none did."""

    text: str = ""
    failed: str = ""
    """A sentence with the next step; empty where a text came."""


@dataclass(frozen=True, kw_only=True)
class Endpoint(Api):
    """A model that answers questions."""

    ENV: ClassVar[str] = "HOLDFAST_LLM"
    PATH: ClassVar[str] = "/chat/completions"

    try_timeout_s: float = 60.0
    """Of one request, to the last byte of its answer."""
    budget_s: float = 120.0
    """Of one `ask`, whatever happens."""
    tries: int = 3
    backoff_s: float = 1.0
    """Before the second try, where the server names no time; doubled before each further one."""
    parallel: int = 4
    answer_limit_bytes: int = 256 * 1024
    answer_tokens: int = 1500
    clock: Clock = field(default_factory=SystemClock, repr=False)
    pause: Callable[[float], Awaitable[None]] = field(default=asyncio.sleep, repr=False)

    @property
    def is_plain_local(self) -> bool:
        """Whether it is asked without TLS, and no proxy stands between."""
        return self.is_this_host and urlsplit(self.url).scheme == "http"

    def ask(self, prompts: Sequence[Prompt], *, temperature: float) -> list[Reply]:
        """Ask all `prompts`, some at once, and return their replies in order, within `budget_s`.

        Raises:
            HoldfastError: httpx is not installed.
        """
        if not prompts:
            return []
        try:
            from holdfast.diagnose.agents.exchange import exchange
        except ImportError as error:
            raise HoldfastError(
                "Asking a model needs httpx, which is not installed. Run: pip install httpx"
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

        # A thread of its own: the caller may stand in an event loop, where no other can run.
        Thread(target=work, name="holdfast-ask-model", daemon=True).start()
        try:
            return replies.result(timeout=self.budget_s + _GRACE_S)
        except Late:
            return [Reply(failed=self.too_late())] * len(prompts)

    def too_late(self) -> str:
        """The sentence for an answer that did not come within the budget."""
        return f"The model at {self.host} had not answered after {self.budget_s:g} s. Ask again, or a faster one."


def endpoint_from_environment(environment: Mapping[str, str] | None = None) -> Endpoint | None:
    """The endpoint that the environment names; None where `HOLDFAST_LLM_URL` is not set.

    Raises:
        BadUse: it names one that cannot be used.
    """
    return Endpoint.from_environment(environment)
