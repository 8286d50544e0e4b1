"""Serve remote storage: an HTTP server of byte ranges whose readers share one bandwidth.

`python -m evaluation.storage FOLDER --mib-s RATE` serves the files below FOLDER until its standard
input closes, and writes its port into `FOLDER/.address`. `GET /.sent` returns the number of bytes
of files sent.
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MIB = 1024 * 1024
PART_BYTES = 128 * 1024
"""The size of a part; readers take turns, one part each."""
START_TIMEOUT_S = 20.0


class Bucket:
    """A shared rate: `bytes / rate` seconds for each reader, one after another."""

    def __init__(self, mib_s: float) -> None:
        self._bytes_per_s = mib_s * MIB
        self._free_at_s = 0.0

    async def take(self, size_bytes: int) -> None:
        """Wait until so many more bytes have passed; with a rate of 0, do not wait."""
        if not self._bytes_per_s:
            return
        now_s = time.monotonic()
        # A late wake-up, up to 50 ms, is compensated.
        self._free_at_s = max(now_s - 0.05, self._free_at_s) + size_bytes / self._bytes_per_s
        await asyncio.sleep(max(0.0, self._free_at_s - now_s))


class RangeServer:
    """Answers HEAD, GET and ranges of GET, on connections that stay open."""

    def __init__(self, folder: Path, mib_s: float) -> None:
        self._folder = folder.resolve()
        self._bucket = Bucket(mib_s)
        self.sent_bytes = 0

    async def attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while request := await reader.readline():
                method, path, _ = request.decode("latin-1").split(" ", 2)
                wanted = ""
                while (line := (await reader.readline()).strip()) != b"":
                    name, _, value = line.decode("latin-1").partition(":")
                    if name.lower() == "range":
                        wanted = value.strip()
                await self._answer(method, path.partition("?")[0], wanted, writer)
        writer.close()

    async def _answer(
        self, method: str, path: str, wanted: str, writer: asyncio.StreamWriter
    ) -> None:
        if path == "/.sent":
            await self._say(writer, "200 OK", str(self.sent_bytes).encode())
            return
        file = (self._folder / path.lstrip("/")).resolve()
        if not file.is_relative_to(self._folder) or not file.is_file():
            await self._say(writer, "404 Not Found", b"" if method == "HEAD" else b"no such file\n")
            return
        size_bytes = file.stat().st_size
        first, last, status = 0, size_bytes - 1, "200 OK"
        headers = [
            "Accept-Ranges: bytes",
            "Last-Modified: Sat, 01 Jan 2022 00:00:00 GMT",
            f'ETag: "{size_bytes}"',
        ]
        if wanted.startswith("bytes="):
            begin, _, end = wanted.removeprefix("bytes=").partition("-")
            first, last, status = int(begin), min(int(end or last), last), "206 Partial Content"
            headers.append(f"Content-Range: bytes {first}-{last}/{size_bytes}")
        headers.append(f"Content-Length: {last - first + 1}")
        lines = [f"HTTP/1.1 {status}", *headers, "", ""]
        writer.write("\r\n".join(lines).encode())
        if method == "GET":
            with file.open("rb") as opened:
                opened.seek(first)
                left = last - first + 1
                while left:
                    part = opened.read(min(PART_BYTES, left))
                    left -= len(part)
                    await self._bucket.take(len(part))
                    writer.write(part)
                    self.sent_bytes += len(part)
                    await writer.drain()
        await writer.drain()

    async def _say(self, writer: asyncio.StreamWriter, status: str, body: bytes) -> None:
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()


class Storage:
    """A storage server in a separate process."""

    def __init__(self, url: str, pid: int) -> None:
        self.url, self.pid = url, pid

    def sent_bytes(self) -> int:
        """Return the number of bytes of files sent so far."""
        with urllib.request.urlopen(f"{self.url}/.sent", timeout=10) as answer:
            return int(answer.read())


@contextmanager
def serving(folder: Path, mib_s: float) -> Iterator[Storage]:
    """Serve the files in `folder` within the context; with `mib_s` 0, without a limit.

    The server ends with the context, or with this process.
    """
    address = folder / ".address"
    address.unlink(missing_ok=True)
    command = [sys.executable, "-m", "evaluation.storage", str(folder), "--mib-s", str(mib_s)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        cwd=Path(__file__).parents[1],
        stdout=sys.stderr,
        start_new_session=True,
    )
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not address.exists():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(
                    f"the storage server does not start (exit code {process.poll()})"
                )
            time.sleep(0.02)
        yield Storage(f"http://127.0.0.1:{address.read_text()}", process.pid)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def make_weights(folder: Path, size_bytes: int, number: int = 0) -> Path:
    """Write a folder that looks like a model's, with `size_bytes` bytes in place of weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "emulated", "number": number}))
    header = json.dumps(
        {"emulated": {"dtype": "U8", "shape": [size_bytes], "data_offsets": [0, size_bytes]}}
    ).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _ in range(0, size_bytes, MIB):
            file.write(os.urandom(min(MIB, size_bytes)))
        file.truncate(8 + len(header) + size_bytes)
    return folder


async def _serve(folder: Path, mib_s: float) -> None:
    server = await asyncio.start_server(
        RangeServer(folder, mib_s).attend, "127.0.0.1", 0, backlog=512
    )
    partial = folder / ".address.partial"
    partial.write_text(str(server.sockets[0].getsockname()[1]))
    partial.rename(folder / ".address")
    closed = asyncio.Event()
    asyncio.get_running_loop().add_reader(
        sys.stdin, lambda: closed.set() if not os.read(0, 1) else None
    )
    await closed.wait()
    os._exit(0)  # connections of readers that live on are of no interest


def main() -> None:
    """Serve the folder on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mib-s", type=float, default=0.0)
    options = parser.parse_args()
    asyncio.run(_serve(options.folder, options.mib_s))


if __name__ == "__main__":
    main()
