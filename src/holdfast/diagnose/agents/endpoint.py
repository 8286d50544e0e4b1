"""Which model may be asked, and where: any OpenAI-compatible endpoint, by URL and key from the environment.

`HOLDFAST_LLM_URL` (up to and with its version: `https://host/v1`), `HOLDFAST_LLM_MODEL`, and `HOLDFAST_LLM_KEY` where
the server wants one. What is sent is redacted here, whoever asks. Only text comes back: no tools are offered, redirects
are not followed, an answer has a largest size and all of them together a latest moment.
"""

import asyncio
import ipaddress
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass, field
from threading import Thread
from typing import Final
from urllib.parse import SplitResult, urlsplit, urlunsplit

from holdfast.core.clock import Clock, SystemClock
from holdfast.core.errors import BadUse, HoldfastError
from holdfast.diagnose.agents.redact import redact

ENV_URL: Final = "HOLDFAST_LLM_URL"
ENV_KEY: Final = "HOLDFAST_LLM_KEY"
ENV_MODEL: Final = "HOLDFAST_LLM_MODEL"
_PATH: Final = "/chat/completions"
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
class Endpoint:
    """A model behind an OpenAI-compatible API.

    Raises:
        BadUse: URL, key or model cannot be used; the message never shows the key.
    """

    url: str
    model: str
    key: str = field(default="", repr=False)
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

    def __post_init__(self) -> None:
        """Check what a person has set."""
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable or not self.url.isascii() or not self.url.isprintable() or " " in self.url:
            raise BadUse(f"{ENV_URL} is no http or https address. Set it to the API's base, such as https://host/v1.")
        if parts.username or parts.password:
            raise BadUse(f"{ENV_URL} holds a name or password. Take it out, and put the key into {ENV_KEY}.")
        if not self.key.isascii() or not self.key.isprintable() or " " in self.key:
            raise BadUse(f"{ENV_KEY} has characters that no key has. Set it again, without blanks and line ends.")
        if not self.model or not self.model.isprintable():
            raise BadUse(f"{ENV_MODEL} is not set. Set it to the name of a model that {self.host} serves.")

    @property
    def host(self) -> str:
        """Host and port, for messages: the path and the query may say more than they should."""
        parts = urlsplit(self.url)
        return f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)

    @property
    def request_url(self) -> str:
        """Where requests go."""
        parts = urlsplit(self.url)
        path = parts.path.rstrip("/")
        path = path if path.endswith(_PATH) else path + _PATH
        return urlunsplit(SplitResult(parts.scheme, parts.netloc, path, parts.query, ""))

    @property
    def is_this_host(self) -> bool:
        """Whether it is a loopback address, to which no proxy leads."""
        host = urlsplit(self.url).hostname or ""
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

    @property
    def is_plain_local(self) -> bool:
        """Whether it is asked without TLS, and no proxy stands between."""
        return self.is_this_host and urlsplit(self.url).scheme == "http"

    @property
    def known_secrets(self) -> tuple[str, ...]:
        """What must not stand in any request's text."""
        return (self.key,) if self.key else ()

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
            raise HoldfastError("Asking a model needs httpx, which is not installed. Run: pip install httpx") from error
        clean = [Prompt(instructions=one.instructions, data=redact(one.data, self.known_secrets)) for one in prompts]
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
    given = os.environ if environment is None else environment
    url = given.get(ENV_URL, "").strip()
    if not url:
        return None
    return Endpoint(url=url, model=given.get(ENV_MODEL, "").strip(), key=given.get(ENV_KEY, "").strip())
