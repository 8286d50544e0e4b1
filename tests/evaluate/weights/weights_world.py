"""Provide storage and nodes: real HTTP servers, random models, stores in one process."""

import asyncio
import hashlib
import random
import threading
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from holdfast.evaluate.types.model_manifest import ModelFile, ModelManifest, cut
from holdfast.evaluate.weights.assign import assign
from holdfast.evaluate.weights.fetch import NodeStore
from holdfast.testing import FakeClock

TOKEN = "a-token"


async def at_once(_seconds):
    """Return at once instead of sleeping."""


class Storage:
    """Serve files over HTTP and record requests; `failing` is the share of reads that fail, seeded."""

    def __init__(self, folder, failing=0.0, buckets=False):
        self.folder = Path(folder)
        self.failing = failing
        self.sent_bytes = 0
        self.requests = []
        self.failed = 0
        self.corrupt = {}  # (path, offset) to how often its first byte is sent changed
        self._random = random.Random(5)
        self._lock = threading.Lock()
        storage = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_HEAD(self):
                storage.answer(self, head=True)

            def do_GET(self):
                if buckets and "list-type" in parse_qs(urlsplit(self.path).query):
                    storage.answer_listing(self)
                else:
                    storage.answer(self, head=False)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}
        )
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, handler, *, head):
        path = unquote(urlsplit(handler.path).path).lstrip("/")
        asked = handler.headers.get("Range")
        with self._lock:
            self.requests.append((handler.command, path, asked))
            kind = self._random.randrange(3) if self._random.random() < self.failing else -1
            self.failed += kind >= 0
        file = self.folder / path
        if kind == 0:
            return self._say(handler, 503, b"")
        if kind == 1:
            handler.close_connection = True  # not a byte of an answer
            return None
        if not file.is_file():
            return self._say(handler, 404, b"")
        data = file.read_bytes()
        extra = {"Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", "ETag": '"e"'}
        if head:
            handler.send_response(200)
            self._headers(handler, {**extra, "Content-Length": len(data)})
            return None
        status, start = 200, 0
        if asked:
            first, last = asked.removeprefix("bytes=").split("-")
            start, end = int(first), min(int(last) + 1, len(data))
            status, extra = 206, {**extra, "Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}
            data = data[start:end]
        with self._lock:
            if self.corrupt.get((path, start), 0) > 0:
                self.corrupt[path, start] -= 1
                data = bytes([data[0] ^ 1]) + data[1:]
        if kind == 2:  # half of it, then nothing
            handler.send_response(status)
            self._headers(handler, {**extra, "Content-Length": len(data)})
            handler.wfile.write(data[: len(data) // 2])
            handler.close_connection = True
            return None
        with self._lock:
            self.sent_bytes += len(data)
        return self._say(handler, status, data, extra)

    def answer_listing(self, handler):
        """Answer S3's ListObjectsV2 in one page."""
        asked = urlsplit(handler.path)
        bucket = unquote(asked.path).strip("/")
        prefix = parse_qs(asked.query).get("prefix", [""])[0]
        root = self.folder / bucket
        files = {
            file.relative_to(root).as_posix(): file
            for file in sorted(root.rglob("*"))
            if file.is_file()
        }
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{file.stat().st_size}</Size><ETag>e</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key, file in files.items()
            if key.startswith(prefix)
        )
        body = f"<ListBucketResult><Name>{bucket}</Name><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
        self._say(handler, 200, body.encode())

    def _say(self, handler, status, body, headers=None):
        handler.send_response(status)
        self._headers(handler, {**(headers or {}), "Content-Length": len(body)})
        handler.wfile.write(body)

    @staticmethod
    def _headers(handler, headers):
        for name, value in headers.items():
            handler.send_header(name, str(value))
        handler.end_headers()


@contextmanager
def storage_over_http(folder, **options):
    storage = Storage(folder, **options)
    try:
        yield storage
    finally:
        storage.close()


def make_files(folder, sizes, seed=0):
    """Make files of random bytes; return path to size."""
    generator = random.Random(seed)
    for path, size_bytes in sizes.items():
        (Path(folder) / path).parent.mkdir(parents=True, exist_ok=True)
        (Path(folder) / path).write_bytes(generator.randbytes(size_bytes))


def manifest_of(source, sizes, chunk_bytes, **more):
    files = [ModelFile(path=path, size_bytes=size_bytes) for path, size_bytes in sizes.items()]
    chunks = [
        chunk
        for number, file in enumerate(files)
        for chunk in cut(number, 0, file.size_bytes, chunk_bytes)
    ]
    return ModelManifest(source=str(source), form="huggingface", files=files, chunks=chunks, **more)


def folder_digest(folder):
    files = sorted(file for file in Path(folder).rglob("*") if file.is_file())
    return {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
    }


@asynccontextmanager
async def nodes(root, count, *, budget_bytes=1 << 30, clock=None, **options):
    """Start `count` stores; yield them with their addresses."""
    stores = [
        NodeStore(root, f"node-{number}", budget_bytes, TOKEN, clock or FakeClock(), **options)
        for number in range(count)
    ]
    try:
        yield stores, {number: await store.start() for number, store in enumerate(stores)}
    finally:
        for store in stores:
            await store.close()


async def fetch_all(stores, peers, manifest, owners=None, **options):
    owners = owners or assign(manifest, peers)
    return await asyncio.gather(
        *(
            store.fetch(0, manifest, owners, peers, number, **options)
            for number, store in enumerate(stores)
        )
    )
