"""Query the HTTP API of Prometheus.

The size of answers is limited, failed requests are retried, and credentials never appear in
messages. The API is described in Prometheus' HTTP API, "Range queries" and "Format overview".
Compatible servers (Thanos, Mimir, VictoriaMetrics) give the same answers.
"""

import base64
import http.client
import json
import os
import random
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from holdfast.core.errors import BadUse, HoldfastError

MAX_POINTS: Final = 11_000
"""The most points of one series in an answer.

If a query would return more points, the server refuses it ("exceeded maximum resolution",
prometheus' web/api/v1).
"""
TOKEN_VARIABLE: Final = "HOLDFAST_PROMETHEUS_TOKEN"
PASSWORD_VARIABLE: Final = "HOLDFAST_PROMETHEUS_PASSWORD"
FIRST_TRIES: Final = 3
"""Number of tries for a server that has never answered.

Such a server is probably down, or is not a Prometheus server.
"""
PASSING: Final = frozenset({429, 500, 502, 503, 504})
"""HTTP statuses after which another try may succeed."""


class PrometheusError(HoldfastError):
    """A server cannot be reached, or does not answer after all tries."""


class AnswerTooLarge(Exception):
    """An answer is larger than this client or the server allows."""


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """A bearer token, or a user name and password. The repr shows none of these."""

    token: str = field(default="", repr=False)
    user: str = ""
    password: str = field(default="", repr=False)

    @classmethod
    def found(
        cls, *, token_file: Path | None = None, user: str = "", password_file: Path | None = None
    ) -> "Credentials":
        """Read credentials from files or from the environment.

        The environment variables are `HOLDFAST_PROMETHEUS_TOKEN` and
        `HOLDFAST_PROMETHEUS_PASSWORD`.

        Raises:
            BadUse: a file cannot be read.
        """
        return cls(
            token=_secret(token_file, TOKEN_VARIABLE) if not user else "",
            user=user,
            password=_secret(password_file, PASSWORD_VARIABLE) if user else "",
        )

    def headers(self) -> dict[str, str]:
        """Return the HTTP headers with the credentials."""
        if self.user:
            pair = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
            return {"Authorization": f"Basic {pair}"}
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}


def _secret(path: Path | None, variable: str) -> str:
    if path is None:
        return os.environ.get(variable, "")
    try:
        return path.read_text().strip()
    except OSError as error:
        raise BadUse(
            f"{path} cannot be read ({error.strerror}). Give the file that holds the secret."
        ) from error


@dataclass(frozen=True)
class PrometheusSeries:
    """One series in an answer."""

    labels: Mapping[str, str]
    at_us: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuse redirects, because they would send the credentials to another server."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class Prometheus:
    """A client for the HTTP API of a Prometheus server.

    Args:
        url: URL of the server, such as `http://prometheus:9090`. A user name and password in the
            URL are removed from it and used as credentials.
        credentials: credentials to send.
        pause: waits for a number of seconds; replaced in tests.
        chance: returns a random number from 0 to 1, used for the jitter of the waits.
        timeout_s: time limit for connecting, and for each read.
        tries: maximum number of tries of one request. Before the server's first answer, there are
            at most `FIRST_TRIES`.
        most_bytes: maximum size of one answer.
        waiting: called with the problem before each wait for another try.

    Raises:
        BadUse: the URL is not an http or https URL.
    """

    def __init__(
        self,
        url: str,
        credentials: Credentials | None = None,
        *,
        pause: Callable[[float], None] = time.sleep,
        chance: Callable[[], float] = random.random,
        timeout_s: float = 60.0,
        tries: int = 6,
        most_bytes: int = 64 << 20,
        waiting: Callable[[str], None] | None = None,
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or any(map(str.isspace, url))
        ):
            raise BadUse(
                "The URL of a Prometheus begins with http:// or https://. Give its URL, such as http://host:9090."
            )
        if parts.username and credentials is None:
            user, password = (
                urllib.parse.unquote(parts.username),
                urllib.parse.unquote(parts.password or ""),
            )
            credentials = Credentials(user=user, password=password)
        self.url = (
            parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="")
            .geturl()
            .rstrip("/")
        )
        """URL of the server, without a user name or password."""
        self._headers = (credentials or Credentials.found()).headers()
        self._pause, self._chance, self._timeout_s, self._tries = pause, chance, timeout_s, tries
        self._most_bytes, self._waiting = most_bytes, waiting
        self._has_answered = False
        self._opener = urllib.request.build_opener(_NoRedirects)

    def range(
        self, expression: str, *, start_s: float, end_s: float, step_s: float
    ) -> list[PrometheusSeries]:
        """Return the series of a PromQL expression over a time range.

        Points are every `step_s` seconds from `start_s` to `end_s`, both inclusive.

        Raises:
            AnswerTooLarge: the answer is too large; query a shorter time or fewer series.
            BadUse: the server refuses the expression or the credentials.
            PrometheusError: the server gives no answer after all tries.
        """
        query = {
            "query": expression,
            "start": f"{start_s:.3f}",
            "end": f"{end_s:.3f}",
            "step": f"{step_s:.3f}",
        }
        result = self._ask("query_range", query)
        with self._as_promised():
            return [_series(one["metric"], one["values"]) for one in result["result"]]

    def number_at(self, expression: str, at_s: float) -> float:
        """Return the value at one time of an expression with at most one series; 0 without one.

        Raises the same errors as `range`.
        """
        found = self._ask("query", {"query": expression, "time": f"{at_s:.3f}"})
        with self._as_promised():
            return float(found["result"][0]["value"][1]) if found["result"] else 0.0

    def label_values(self, label: str, selector: str, *, start_s: float, end_s: float) -> list[str]:
        """Return the values that a label has in the series of a selector.

        Raises the same errors as `range`.
        """
        query = {"match[]": selector, "start": f"{start_s:.3f}", "end": f"{end_s:.3f}"}
        return sorted(self._ask(f"label/{label}/values?{urllib.parse.urlencode(query)}", None))

    @contextmanager
    def _as_promised(self) -> Iterator[None]:
        """Convert errors that occur while the fields of an answer are read to PrometheusError."""
        try:
            yield
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise PrometheusError(
                f"{self.url} answered, but not like the API of Prometheus ({type(error).__name__}: {error}). "
                "Give the URL of a Prometheus, or of a server with its HTTP API."
            ) from error

    def _ask(self, path: str, query: dict[str, str] | None) -> Any:
        data = urllib.parse.urlencode(query).encode() if query is not None else None
        request = urllib.request.Request(
            f"{self.url}/api/v1/{path}", data=data, headers=self._headers
        )
        problem, attempt = "", 0
        while attempt < (self._tries if self._has_answered else min(self._tries, FIRST_TRIES)):
            if attempt:
                # Full jitter (Brooker, "Exponential backoff and jitter") keeps many waiting clients
                # from retrying at the same moment.
                pause_s = min(30.0, 0.5 * 2**attempt) * (0.5 + 0.5 * self._chance())
                if self._waiting:
                    self._waiting(f"{self.url} {problem}; trying again in {pause_s:.0f} s")
                self._pause(pause_s)
            attempt += 1
            try:
                with self._opener.open(request, timeout=self._timeout_s) as response:
                    self._has_answered = True
                    body = response.read(self._most_bytes + 1)
                    if len(body) > self._most_bytes:
                        raise AnswerTooLarge
                    if body.lstrip()[:1] == b"<":
                        raise BadUse(
                            f"{self.url} answered with a web page. Give the URL of a Prometheus' HTTP API."
                        )
                    return json.loads(body)["data"]
            except urllib.error.HTTPError as error:
                self._has_answered = True
                with error:
                    message = _error_of(error)
                if error.code not in PASSING:
                    self._refuse(error.code, message)
                problem = f"answered {error.code} {message}".strip()
            except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
                # A cut connection, a time-out, or half an answer.
                problem = f"failed ({type(error).__name__}: {error})"
                if not self._has_answered:
                    reason = getattr(error, "reason", error)
                    problem = f"cannot be reached ({getattr(reason, 'strerror', None) or reason})"
        raise PrometheusError(
            f"{self.url} {problem}, {attempt} times. Check that the server is up, then repeat the command: "
            "fetched data is kept."
        )

    def _refuse(self, status: int, message: str) -> None:
        if "too many samples" in message or "exceeded maximum resolution" in message:
            raise AnswerTooLarge
        if status in (401, 403):
            raise BadUse(
                f"{self.url} refuses the credentials ({status}). Set {TOKEN_VARIABLE}, or give a file with the token."
            )
        raise BadUse(
            f"{self.url} refuses the query ({status}): {message} Correct the query or the URL."
        )


def _error_of(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read(1 << 16))["error"])[:500]
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return str(error.reason)


def _series(labels: Mapping[str, str], points: list[tuple[float, str]]) -> PrometheusSeries:
    at_us = np.rint(np.array([at for at, _ in points]) * 1e6).astype(np.int64)
    return PrometheusSeries(labels, at_us, np.array([float(value) for _, value in points]))
