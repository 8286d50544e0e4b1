"""Configure an OpenAI-compatible API by environment variables: URL, model and key."""

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self
from urllib.parse import SplitResult, urlsplit, urlunsplit

from holdfast.core.errors import BadUse


@dataclass(frozen=True, kw_only=True)
class Api:
    """A model that is reached through an OpenAI-compatible API.

    Each subclass has its own environment variables for URL, model and key, whose names begin with
    `ENV`.

    Raises:
        BadUse: URL, key or model cannot be used; the message never contains the key.
    """

    ENV: ClassVar[str]
    """The prefix of the names of the environment variables."""
    PATH: ClassVar[str]
    """The path of requests, relative to the base URL of the API."""

    url: str
    model: str
    key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        """Check the values, since people have set them by hand."""
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable or not self.url.isascii() or not self.url.isprintable() or " " in self.url:
            raise BadUse(
                f"{self.env_url()} is not an http or https address."
                " Set it to the API's base, such as https://host/v1."
            )
        if parts.username or parts.password:
            raise BadUse(
                f"{self.env_url()} holds a name or password."
                f" Take it out, and put the key into {self.env_key()}."
            )
        if not self.key.isascii() or not self.key.isprintable() or " " in self.key:
            raise BadUse(
                f"{self.env_key()} has characters that are invalid "
                "in a key. Set it without blanks and line ends."
            )
        if not self.model.strip() or not self.model.isprintable():
            raise BadUse(
                f"{self.env_model()} is not set."
                f" Set it to the name of a model that {self.host} serves."
            )

    @classmethod
    def env_url(cls) -> str:
        """Return the name of the variable with the API's base URL, up to and including the version."""
        return f"{cls.ENV}_URL"

    @classmethod
    def env_model(cls) -> str:
        """Return the name of the variable with the model's name."""
        return f"{cls.ENV}_MODEL"

    @classmethod
    def env_key(cls) -> str:
        """Return the name of the variable with the key, which only some servers require."""
        return f"{cls.ENV}_KEY"

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] | None = None, **more: Any
    ) -> Self | None:
        """Return the API that `environment` configures; None if no URL is set.

        Raises:
            BadUse: the URL, the model or the key cannot be used.
        """
        given = os.environ if environment is None else environment
        url, model, key = (
            given.get(name, "").strip() for name in (cls.env_url(), cls.env_model(), cls.env_key())
        )
        return cls(url=url, model=model, key=key, **more) if url else None

    @property
    def host(self) -> str:
        """Return host and port, for messages.

        Path and query are left out, since they may contain secrets.
        """
        parts = urlsplit(self.url)
        return f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)

    @property
    def request_url(self) -> str:
        """Return the URL to which requests are sent."""
        parts = urlsplit(self.url)
        path = parts.path.rstrip("/")
        path = path if path.endswith(self.PATH) else path + self.PATH
        return urlunsplit(SplitResult(parts.scheme, parts.netloc, path, parts.query, ""))

    @property
    def is_this_host(self) -> bool:
        """Return True if the host is a loopback address, for which no proxy is used."""
        host = urlsplit(self.url).hostname or ""
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

    @property
    def known_secrets(self) -> tuple[str, ...]:
        """Return the texts that no request may contain."""
        return (self.key,) if self.key else ()
