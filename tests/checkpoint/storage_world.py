"""Object storage for tests: buckets, a proxy that fails, and checkpoints of random bytes."""

import contextlib
import functools
import http.client
import itertools
import os
import random
import signal
import socket
import struct
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from holdfast.checkpoint.format.checksums import BLOCK_BYTES, SIDECAR_SUFFIX, file_digests
from holdfast.checkpoint.format.manifest import Manifest, describe_file, write_manifest
from holdfast.checkpoint.format.paths import step_path
from holdfast.checkpoint.storage.object_store import Patience

BRIEF = Patience(
    request_timeout_s=10, tries=2, attempts=3, first_pause_s=0.001, longest_pause_s=0.002
)
QUICK = Patience(
    request_timeout_s=10, tries=10, attempts=5, first_pause_s=0.001, longest_pause_s=0.005
)
PART_BYTES = 5 << 20
"""The smallest part that S3 accepts."""
SIZES = {
    ".metadata": 700,
    "__0_0.distcp": 2 * PART_BYTES + 3_392,
    "__1_0.distcp": PART_BYTES + 18_929,
    "empty": 0,
    "more/part": 65_536,
}
SMALL = {".metadata": 700, "__0_0.distcp": PART_BYTES + 24_464}
KINDS = ("503", "reset", "lost", "cut")
_numbers = itertools.count()


def make_checkpoint(folder, step, seed=0, sizes=None):
    path = step_path(folder, step)
    generator = random.Random(seed)
    for name, size_bytes in (sizes or SIZES).items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(generator.randbytes(size_bytes))
    seal(path, step, created_at_s=1e9 + seed)
    for name, size_bytes in (sizes or SIZES).items():  # as the engine does
        if size_bytes > BLOCK_BYTES:
            (path / f"{name}{SIDECAR_SUFFIX}").write_bytes(file_digests(path / name, size_bytes))
    return path


def seal(path, step, created_at_s=1e9):
    """Write the manifest of a folder's files."""
    files = tuple(describe_file(path, name) for name in sorted(contents(path)))
    write_manifest(
        path, Manifest(step=step, world_size=2, created_at_s=created_at_s, torch="2", files=files)
    )


def contents(path):
    return {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file()
    }


def new_bucket(endpoint):
    bucket = f"bucket-{next(_numbers)}"
    _client(endpoint).create_bucket(Bucket=bucket)
    return bucket


@functools.cache
def _client(endpoint):
    import boto3  # not in a process that only pushes, as `killed_pusher.py` is

    return boto3.client("s3", endpoint_url=endpoint)


class Proxy:
    """Forward HTTP requests; a kind from `fault(number, method, path, query)` makes one fail.

    | kind | effect |
    |---|---|
    | `503` | answer 503 |
    | `reset` | no answer |
    | `lost` | forwarded, but not answered |
    | `gone` | forwarded, but answered as unknown |
    | `cut` | half of the answer |
    | `stall` | no answer until the proxy closes |
    | `kill`, `kill-lost` | as `reset` and `lost`, after the process `victim` was killed |
    """

    def __init__(self, target, fault):
        self.fault = fault
        self.requests = []  # method, path without query, query
        self.failed = 0
        self.victim = Future()
        self._target = target.removeprefix("http://")
        self._closing = threading.Event()
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self):
                proxy._answer(self)

            def log_message(self, *_):
                pass

            def handle(self):
                with contextlib.suppress(OSError):  # the client has gone
                    super().handle()

        for method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
            setattr(Handler, f"do_{method}", Handler.answer)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}
        )
        self._thread.start()

    def close(self):
        self._closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def of(self, method):
        return [path for each, path, _query in self.requests if each == method]

    def _answer(self, handler):
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        path, _, query = handler.path.partition("?")
        with self._lock:
            self.requests.append((handler.command, path, query))
            fault = self.fault(len(self.requests), handler.command, path, query)
            self.failed += fault is not None
        if fault is not None and fault.startswith("kill"):
            os.kill(self.victim.result(timeout=90), signal.SIGKILL)
        if fault == "stall":
            self._closing.wait(600)
        if fault in ("reset", "stall", "kill"):
            return self._drop(handler)
        if fault == "503":
            status, headers, content = 503, [], b"<Error><Code>SlowDown</Code></Error>"
        else:
            status, headers, content = self._pass_on(handler, body)
        if fault == "gone":
            status, headers, content = 404, [], b"<Error><Code>NoSuchUpload</Code></Error>"
        if fault in ("lost", "kill-lost"):
            return self._drop(handler)
        handler.send_response(status)
        for name, value in headers:
            handler.send_header(name, value)
        if not any(name.lower() == "content-length" for name, _ in headers):
            handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        if fault == "cut":
            handler.wfile.write(content[: len(content) // 2])
            return self._drop(handler)
        return handler.wfile.write(content)

    def _pass_on(self, handler, body):
        connection = http.client.HTTPConnection(self._target, timeout=30)
        try:
            connection.request(handler.command, handler.path, body, dict(handler.headers))
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        skipped = ("connection", "transfer-encoding", "date", "server")
        headers = [
            (name, value) for name, value in answer.getheaders() if name.lower() not in skipped
        ]
        return answer.status, headers, content

    @staticmethod
    def _drop(handler):
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handler.close_connection = True


@contextmanager
def proxy(target, fault=lambda *_: None):
    there = Proxy(target, fault)
    try:
        yield there
    finally:
        there.close()


def by_chance(failing, seed, kinds=KINDS):
    """Return a fault for a random share of the requests, of random kinds."""
    generator = random.Random(seed)

    def fault(*_):
        kind = generator.choice(kinds)
        return kind if generator.random() < failing else None

    return fault
