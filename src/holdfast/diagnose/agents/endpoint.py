"""Configure the model to ask: any OpenAI-compatible endpoint, by environment variables.

The variables are `HOLDFAST_LLM_URL` (up to the version: `https://host/v1`), `HOLDFAST_LLM_MODEL`
and, if the server requires a key, `HOLDFAST_LLM_KEY`. All prompts are redacted here. Only text is
accepted in return: no tools are offered, redirects are not followed, and size and time of the
answers are limited.
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
"""The seconds to wait for an exchange beyond its budget: a name server's silence cannot be
interrupted."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One question."""

    instructions: str
    """Holdfast's own fixed text, without outside content."""
    data: str
    """The outside content of the question, prepared by `untrusted`."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The text of an answer, or the reason for its absence."""

    text: str = ""
    failed: str = ""
    """A sentence with the next step; empty if there is a text."""


@dataclass(frozen=True, kw_only=True)
class Endpoint(Api):
    """A model that answers questions."""

    ENV: ClassVar[str] = "HOLDFAST_LLM"
    PATH: ClassVar[str] = "/chat/completions"

    try_timeout_s: float = 60.0
    """Seconds for one request, to the last byte of its answer."""
    budget_s: float = 120.0
    """Seconds for one `ask`, in any case."""
    tries: int = 3
    backoff_s: float = 1.0
    """Seconds before the second try, unless the server gives a time; doubled before each further
    try."""
    parallel: int = 4
    answer_limit_bytes: int = 256 * 1024
    answer_tokens: int = 1500
    clock: Clock = field(default_factory=SystemClock, repr=False)
    pause: Callable[[float], Awaitable[None]] = field(default=asyncio.sleep, repr=False)

    @property
    def is_plain_local(self) -> bool:
        """Return True if requests use neither TLS nor a proxy."""
        return self.is_this_host and urlsplit(self.url).scheme == "http"

    def ask(self, prompts: Sequence[Prompt], *, temperature: float) -> list[Reply]:
        """Send all `prompts`, some in parallel; return the replies in order, within `budget_s`.

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

        # A separate thread: the caller may run in an event loop, where no other loop can run.
        Thread(target=work, name="holdfast-ask-model", daemon=True).start()
        try:
            return replies.result(timeout=self.budget_s + _GRACE_S)
        except Late:
            return [Reply(failed=self.too_late())] * len(prompts)

    def too_late(self) -> str:
        """Return the sentence for an answer that did not come within the budget."""
        return (
            f"The model at {self.host} had not answered after {self.budget_s:g} s."
            " Ask again, or a faster one."
        )


def endpoint_from_environment(environment: Mapping[str, str] | None = None) -> Endpoint | None:
    """Return the endpoint in the environment; None if `HOLDFAST_LLM_URL` is not set.

    Raises:
        BadUse: the endpoint cannot be used.
    """
    return Endpoint.from_environment(environment)
