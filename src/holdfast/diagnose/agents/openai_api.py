"""Where an OpenAI-compatible API is, and what may be said of it: URL, model and key, as the environment names them."""

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self
from urllib.parse import SplitResult, urlsplit, urlunsplit

from holdfast.core.errors import BadUse


@dataclass(frozen=True, kw_only=True)
class Api:
    """A model behind an OpenAI-compatible API, as `ENV_URL`, `ENV_MODEL` and `ENV_KEY` of the environment name it.

    Raises:
        BadUse: URL, key or model cannot be used; the message never shows the key.
    """

    ENV: ClassVar[str]
    """What the names of its variables begin with."""
    PATH: ClassVar[str]
    """What is asked, below the API's base."""

    url: str
    model: str
    key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        """Check what a person has set."""
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable or not self.url.isascii() or not self.url.isprintable() or " " in self.url:
            raise BadUse(
                f"{self.env_url()} is no http or https address. Set it to the API's base, such as https://host/v1."
            )
        if parts.username or parts.password:
            raise BadUse(
                f"{self.env_url()} holds a name or password. Take it out, and put the key into {self.env_key()}."
            )
        if not self.key.isascii() or not self.key.isprintable() or " " in self.key:
            raise BadUse(
                f"{self.env_key()} has characters that no key has. Set it again, without blanks and line ends."
            )
        if not self.model.strip() or not self.model.isprintable():
            raise BadUse(
                f"{self.env_model()} is not set. Set it to the name of a model that {self.host} serves."
            )

    @classmethod
    def env_url(cls) -> str:
        """The variable with the API's base, up to and with its version."""
        return f"{cls.ENV}_URL"

    @classmethod
    def env_model(cls) -> str:
        """The variable with the model's name."""
        return f"{cls.ENV}_MODEL"

    @classmethod
    def env_key(cls) -> str:
        """The variable with the key, where the server wants one."""
        return f"{cls.ENV}_KEY"

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] | None = None, **more: Any
    ) -> Self | None:
        """What the environment names; None where no URL is set.

        Raises:
            BadUse: it names one that cannot be used.
        """
        given = os.environ if environment is None else environment
        url, model, key = (
            given.get(name, "").strip() for name in (cls.env_url(), cls.env_model(), cls.env_key())
        )
        return cls(url=url, model=model, key=key, **more) if url else None

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
        path = path if path.endswith(self.PATH) else path + self.PATH
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
    def known_secrets(self) -> tuple[str, ...]:
        """What must not stand in any request's text."""
        return (self.key,) if self.key else ()
