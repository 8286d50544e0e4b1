"""Serve S3 over HTTP with moto's server, behind a proxy that returns the errors of real stores.

The name of a bucket selects its error: `denied` 403 AccessDenied, `badkey` 403 InvalidAccessKeyId,
`slow` 503 SlowDown, `broken` 500 InternalError, `hung` no answer, `cut` a closed connection. The
bucket `empty` exists and is empty. Moto answers requests for all other buckets. The texts of the
errors are from the S3 API reference, "Error responses".
"""

import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_ERRORS = {
    "denied": ("403 Forbidden", "AccessDenied", "Access Denied"),
    "badkey": (
        "403 Forbidden",
        "InvalidAccessKeyId",
        "The AWS Access Key Id you provided does not exist.",
    ),
    "slow": ("503 Slow Down", "SlowDown", "Please reduce your request rate."),
    "broken": (
        "500 Internal Server Error",
        "InternalError",
        "We encountered an internal error. Please try again.",
    ),
}
_Start = Callable[[str, list[tuple[str, str]]], Any]


@contextmanager
def serve() -> Iterator[str]:
    """Run an S3 endpoint until the end of the block, and yield its URL."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, type: str, message: str, *args: object) -> None:  # noqa: A002
            """Log nothing, because a program's log must not contain the endpoint's requests."""

    front = _Front(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, front, threaded=True, request_handler=Quiet)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
    )
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        urllib.request.urlopen(
            urllib.request.Request(f"{url}/empty", method="PUT"), timeout=30
        ).close()
        yield url
    finally:
        front.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Front:
    """Return errors for the failing buckets, and forward all other requests to moto."""

    def __init__(self, behind: Any) -> None:
        self.closing = threading.Event()
        self._behind = behind

    def __call__(self, environ: dict[str, Any], start: _Start) -> Iterable[bytes]:
        bucket, _, key = environ["PATH_INFO"].lstrip("/").partition("/")
        if bucket == "hung":
            self.closing.wait(60)
        if bucket in {"hung", "cut"}:
            environ["werkzeug.socket"].shutdown(2)
            return []
        if bucket not in _ERRORS:
            handed_on: Iterable[bytes] = self._behind(environ, start)
            return handed_on
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        status, code, message = _ERRORS[bucket]
        body = (
            '<?xml version="1.0" encoding="UTF-8"?>\n'
            f"<Error><Code>{code}</Code><Message>{message}</Message><Key>{key}</Key>"
            "<RequestId>4442587FB7D0A2F9</RequestId><HostId>uuLTqKJ3Ju0e</HostId></Error>"
        ).encode()
        start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]
