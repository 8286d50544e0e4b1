"""Serve an OpenAI-compatible API on loopback with scripted answers: right, wrong, slow, or none.

    with ModelServer() as server:
        server.then(Status(429), Words('{"answer": 1}'))  # then `otherwise`
        ... send requests to server.url ...
        assert server.asked[0].body["model"] == "stub"

All traffic is real HTTP. The server does not wait longer than its client, nor beyond the end of the
block.
"""

import json
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, TypeAlias

_WAIT_LIMIT_S: Final = 30.0


@dataclass(frozen=True)
class ReceivedRequest:
    """A request that the server received."""

    path: str
    headers: dict[str, str]
    """The headers of the request, with their names in lower case."""
    body: Any

    @property
    def text(self) -> str:
        """The text of all messages in the request, joined."""
        return "\n".join(str(one["content"]) for one in self.body["messages"])


@dataclass(frozen=True)
class Words:
    """Answer with a chat completion that contains this text."""

    text: str


@dataclass(frozen=True)
class Status:
    """Answer with the given status, headers and body."""

    code: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b'{"error": {"message": "scripted"}}'


@dataclass(frozen=True)
class Cut:
    """Close the connection in the middle of the body; with `reset`, reset it before the body."""

    reset: bool = False


@dataclass(frozen=True)
class Drip:
    """Send one byte at a time, slowly and without end; with `headers`, in the headers."""

    every_s: float = 0.02
    headers: bool = False


@dataclass(frozen=True)
class Flood:
    """Send a body without end, as fast as the client reads it."""


@dataclass(frozen=True)
class Silence:
    """Send no answer."""


Answer: TypeAlias = Words | Status | Cut | Drip | Flood | Silence


class ModelServer(ThreadingHTTPServer):
    """An HTTP server at `url` with scripted answers.

    Args:
        otherwise: returns the answer to a request when the script is empty; the default answer is
            `{}`.
        key: the only API key that is accepted; empty to accept any.
    """

    daemon_threads = True

    def __init__(
        self, otherwise: Callable[[ReceivedRequest], Answer] | None = None, *, key: str = ""
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.otherwise = otherwise or (lambda _: Words("{}"))
        self.key = key
        self.asked: list[ReceivedRequest] = []
        """The requests in the order of their arrival."""
        self._script: list[Answer] = []
        self._lock = threading.Lock()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self) -> str:
        """The base URL of the API."""
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def then(self, *answers: Answer) -> "ModelServer":
        """Answer the next requests with these answers, in this order."""
        self._script.extend(answers)
        return self

    def take(self, request: ReceivedRequest) -> Answer:
        """Record a request, and return the answer to send."""
        with self._lock:
            self.asked.append(request)
            return self._script.pop(0) if self._script else self.otherwise(request)

    def wait(self, seconds: float) -> bool:
        """Wait for `seconds`, but not beyond the end of the block; return True if it has ended."""
        return self._left.wait(seconds)

    def __enter__(self) -> "ModelServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors, which come from clients that have closed their connection."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ModelServer

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        answer = self.server.take(ReceivedRequest(self.path, headers, json.loads(data)))
        if self.server.key and headers.get("authorization") != f"Bearer {self.server.key}":
            answer = Status(401)
        match answer:
            case Words(text):
                choice = {
                    "index": 0,
                    "message": {"role": "assistant", "content": text},
                    "finish_reason": "stop",
                }
                self._send(
                    200, (), json.dumps({"object": "chat.completion", "choices": [choice]}).encode()
                )
            case Status(code, given, body):
                self._send(code, given, body)
            case Cut(reset):
                self._cut(reset=reset)
            case Drip(every_s, in_headers):
                self._drip(every_s, in_headers=in_headers)
            case Flood():
                self._flood()
            case Silence():
                self.server.wait(_WAIT_LIMIT_S)
                self.close_connection = True

    def _send(self, code: int, headers: tuple[tuple[str, str], ...], body: bytes) -> None:
        self.send_response(code)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _cut(self, *, reset: bool) -> None:
        if reset:  # with a linger time of 0, `close` sends a reset
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            self.wfile.write(b'HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n{"choices": [')
        self.close_connection = True
        self.connection.close()

    def _drip(self, every_s: float, *, in_headers: bool) -> None:
        self.wfile.write(
            b"HTTP/1.1 200 OK\r\nX-Slow: " if in_headers else b"HTTP/1.1 200 OK\r\n\r\n"
        )
        self.close_connection = True
        while not self.server.wait(every_s):
            self.wfile.write(b"x" if in_headers else b" ")

    def _flood(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
        self.close_connection = True
        while not self.server.wait(0):
            self.wfile.write(b" " * 65536)
