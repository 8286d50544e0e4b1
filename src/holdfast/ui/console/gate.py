"""Refuse requests from a foreign page, for a foreign host name, or without a session.

Deny by default: a request passes only if a rule allows it. GET and HEAD only read, POST acts, and
all other methods are refused.
"""

from collections.abc import Collection
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.core.channel import is_token
from holdfast.ui.console.sessions import Sessions
from holdfast.ui.console.static_files import path_of

BODY_LIMIT_BYTES = 16 * 1024
URL_LIMIT_BYTES = 2048
OPEN_PATHS = frozenset({"/enter", *map(path_of, ("console.css", "console.js", "icon.svg"))})
"""The paths for people who are not signed in yet."""
METRICS_PATH = "/metrics"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The allowed senders of each request."""

    hosts: Collection[str]
    """The values of `Host`, with the port, that name this console."""
    proxies: Collection[str] = ()
    """The addresses whose `X-Forwarded-For` and `X-Forwarded-Proto` count."""
    reading_is_open: bool = False
    """True if pages can be read without a session. Actions never can."""
    scraper_token: str
    """The token that opens the metrics, and nothing else."""


class Gate:
    """The ASGI application around the console's routes."""

    def __init__(self, app: ASGIApp, rules: Rules, sessions: Sessions) -> None:
        self._app = app
        self._rules = rules
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse the request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # no WebSocket is served
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = _single(scope["headers"])
        address, scheme = self._origin_of(scope, headers)
        refused = self._refusal(scope, headers, scheme)
        if refused is None:
            secret = _cookie(headers, self._sessions.cookie)
            session = self._sessions.of(secret)
            scope["state"] = {**scope.get("state", {}), "session": session, "address": address,
                              "scheme": scheme, "secret": secret, "asked": scope["path"]}  # fmt: skip
            refused = self._without_session(scope, headers, session is not None)
        if refused is not None:
            status, message = refused
            more = {"WWW-Authenticate": "Bearer"} if status == 401 else None
            response = PlainTextResponse(f"{message}\n", status, more)
            await _with_headers(response, scope, receive, send)
            return
        body = None if scope["method"] != "POST" else await _body(receive)
        if scope["method"] == "POST":
            if body is None:
                message = f"The request's body is longer than {BODY_LIMIT_BYTES} bytes."
                await _with_headers(PlainTextResponse(f"{message}\n", 413), scope, receive, send)
                return
            receive = _replayed(body, receive)
        await _with_headers(self._app, scope, receive, send)

    def _origin_of(self, scope: Scope, headers: dict[str, str]) -> tuple[str, str]:
        """Return the browser's address and the scheme that the browser uses."""
        client = scope.get("client")
        address = str(client[0]) if client else "unknown"
        if address not in self._rules.proxies:
            return address, "http"
        forwarded = headers.get("x-forwarded-for", "").rpartition(",")[2].strip()[:64]
        scheme = "https" if headers.get("x-forwarded-proto") == "https" else "http"
        return forwarded or address, scheme

    def _refusal(
        self, scope: Scope, headers: dict[str, str], scheme: str
    ) -> tuple[int, str] | None:
        """Return the status and the reason of a refusal; None if the request may pass."""
        host, method = headers.get("host", ""), scope["method"]
        if host.lower() not in self._rules.hosts:
            return (
                421,
                "This console has another name. Use an address that `holdfast ui` printed, or --allow-host.",
            )
        if (
            len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
            > URL_LIMIT_BYTES
        ):
            return 414, f"The address is longer than {URL_LIMIT_BYTES} bytes."
        if "\0" in scope["path"] or b"%00" in scope.get("query_string", b""):
            return 400, "The address holds a NUL character."
        if method not in ("GET", "HEAD", "POST"):
            return 405, "Only GET, HEAD and POST are served."
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        is_own = origin is None or origin == f"{scheme}://{host}"
        if not is_own:
            return 403, "Another page sent this request."
        if method == "POST":
            if site not in ("same-origin", None) or (site is None and origin is None):
                return 403, "Only a page of this console may act. Open the console and act there."
            if (
                headers.get("content-type", "").partition(";")[0].strip()
                != "application/x-www-form-urlencoded"
            ):
                return 415, "Only forms of this console are read."
        elif site not in ("same-origin", "none", None):
            # A link in a message may open a page; no foreign page may fetch or embed one.
            mode, target = headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")
            if (mode, target) != ("navigate", "document"):
                return 403, "Another page sent this request."
        return None

    def _without_session(
        self, scope: Scope, headers: dict[str, str], is_signed_in: bool
    ) -> tuple[int, str] | None:
        path, reads = scope["path"], scope["method"] != "POST"
        if is_signed_in or path in OPEN_PATHS or (reads and self._rules.reading_is_open):
            return None
        if path == METRICS_PATH:
            kind, _, given = headers.get("authorization", "").partition(" ")
            if kind.lower() == "bearer" and is_token(
                given.strip().encode(), self._rules.scraper_token.encode()
            ):
                return None
            return 401, "Send the token of the file `metrics-token` in the console's HOLDFAST_HOME."
        if reads and path != "/stream" and not path.endswith(".json"):
            scope["path"], scope["raw_path"] = "/enter", b"/enter"
            return None
        return 401, "Sign in first, with the link that `holdfast ui` printed."


def _single(pairs: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the headers by name; a header that came twice counts as neither of its values."""
    found: dict[str, str] = {}
    for name, value in pairs:
        key = name.decode("latin-1").lower()
        found[key] = (
            ""
            if key in found and key in ("host", "origin", "sec-fetch-site")
            else value.decode("latin-1")
        )
    return found


def _cookie(headers: dict[str, str], name: str) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")[:4096]).get(name)
    except CookieError:
        return ""
    return "" if found is None else found.value


async def _body(receive: Receive) -> bytes | None:
    """Return the body of a request; None if the body is over the limit."""
    body = b""
    while True:
        message: Message = await receive()
        if message["type"] != "http.request":
            return None
        body += bytes(message.get("body", b""))
        if len(body) > BODY_LIMIT_BYTES:
            return None
        if not message.get("more_body", False):
            return body


def _replayed(body: bytes, receive: Receive) -> Receive:
    was_read = False

    async def replay() -> Message:
        nonlocal was_read
        if was_read:
            return await receive()
        was_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _with_headers(app: Any, scope: Scope, receive: Receive, send: Send) -> None:
    async def guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            names = {name for name, _ in HEADERS}
            kept = [pair for pair in message.get("headers", ()) if pair[0].lower() not in names]
            message = {**message, "headers": [*kept, *HEADERS]}
        await send(message)

    await app(scope, receive, guarded)
