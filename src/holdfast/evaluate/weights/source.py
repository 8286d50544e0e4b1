"""Read ranges of a model's files from a folder, a plain HTTP server, S3, GCS or Azure.

A failed read is tried again after a growing pause; an error is raised only after the last attempt.
Endpoints and credentials come from the standard environment variables (`AWS_ENDPOINT_URL`,
`AWS_ACCESS_KEY_ID`, `GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_KEY`, ...).
"""

import asyncio
import os
import random
import socket
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from holdfast.core.errors import BadUse, NotFound
from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.types.model_manifest import ModelManifest

OBJECT_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss")
HTTP_SCHEMES = ("http", "https")
READ_ATTEMPTS = 30
"""The number of attempts for each read.

If 30 % of all attempts fail, one read in 5e15 fails in this many attempts. An outage of a minute is
survived.
"""
_FIRST_PAUSE_S, _PAUSE_GROWTH, _LONGEST_PAUSE_S = 0.1, 1.5, 5.0
_DEEPEST_FOLDER = 2
"""The depth to which a folder is searched.

The files of a model are not deeper, and the given folder may be a whole disk.
"""
_CONNECT_TIMEOUT = timedelta(seconds=10)
_REQUEST_TIMEOUT = timedelta(seconds=120)

Sleep = Callable[[float], Awaitable[None]]
_T = TypeVar("_T")


class Source(Protocol):
    """A folder of files in any storage; many tasks may read it at the same time."""

    async def sizes(self) -> dict[str, int] | None:
        """Return path to size in bytes for all files; None if files cannot be listed (plain HTTP).

        Raises:
            NotFound: the folder does not exist.
            EvaluationError: every attempt failed.
        """
        ...

    async def size_bytes(self, path: str) -> int:
        """Return the size of one file in bytes.

        Raises:
            FileNotFoundError: the file does not exist.
            EvaluationError: every attempt failed.
        """
        ...

    async def read(self, path: str, offset: int, size_bytes: int) -> memoryview:
        """Read exactly `size_bytes` bytes of a file.

        Raises:
            FileNotFoundError: the file does not exist.
            EvaluationError: every attempt failed.
        """
        ...


class HeldModels(Protocol):
    """Find models in the memory of training jobs on this node, which is the fastest source."""

    def find(self, manifest: ModelManifest) -> Source | None:
        """Return a source with exactly a model's files; None if no training job holds the model.

        The files may vanish at any time.
        """
        ...


def open_source(url: str, *, attempts: int = READ_ATTEMPTS, sleep: Sleep = asyncio.sleep) -> Source:
    """Return a source for a folder or a URL (file, http, https, s3, gs, az); nothing is read yet.

    Raises:
        BadUse: there is no reader for such a URL.
    """
    scheme = url.partition("://")[0].lower() if "://" in url else ""
    retry = _Retry(attempts, sleep)
    if scheme == "file":
        return _Folder(Path(unquote(urlsplit(url).path)), retry)
    if not scheme:
        return _Folder(Path(url), retry)
    if scheme in HTTP_SCHEMES or scheme in OBJECT_SCHEMES:
        return _Remote(url, retry, can_list=scheme in OBJECT_SCHEMES)
    known = ", ".join(f"{each}://" for each in ("file", *HTTP_SCHEMES, "s3", "gs", "az"))
    raise BadUse(
        f"Holdfast cannot read {scheme}:// URLs ({url}). Give a folder, or a URL that begins with "
        f"one of {known}."
    )


def open_model(manifest: ModelManifest, *, sleep: Sleep = asyncio.sleep) -> Source:
    """Return a source for a model's files, including its adapter; see `open_source`."""
    base = open_source(manifest.source, sleep=sleep)
    if not manifest.adapter:
        return base
    return _WithAdapter(manifest, base, open_source(manifest.adapter, sleep=sleep))


class _WithAdapter:
    def __init__(self, manifest: ModelManifest, base: Source, adapter: Source) -> None:
        self._manifest = manifest
        self._sources = {manifest.source: base, manifest.adapter: adapter}

    async def sizes(self) -> dict[str, int] | None:
        return {file.path: file.size_bytes for file in self._manifest.files}

    async def size_bytes(self, path: str) -> int:
        source, inside = self._manifest.place_of(path)
        return await self._sources[source].size_bytes(inside)

    async def read(self, path: str, offset: int, size_bytes: int) -> memoryview:
        source, inside = self._manifest.place_of(path)
        return await self._sources[source].read(inside, offset, size_bytes)


class _Retry:
    """Repeat an operation a limited number of times, after growing random pauses."""

    def __init__(self, attempts: int, sleep: Sleep) -> None:
        self._attempts = attempts
        self._sleep = sleep

    async def __call__(
        self, what: str, attempt: Callable[[], Awaitable[_T]], *, transient: tuple[Any, ...]
    ) -> _T:
        pause_s = _FIRST_PAUSE_S
        for number in range(1, self._attempts + 1):
            try:
                return await attempt()
            except (FileNotFoundError, IsADirectoryError, PermissionError):
                raise
            except transient as error:
                if number == self._attempts or _is_refusal(error):
                    times = "" if number == 1 else f" {number} times"
                    raise EvaluationError(
                        f"{what} failed{times}: {_first_line(error)}. Check that the storage can "
                        "be reached from "
                        f"{socket.gethostname()}, and the credentials in its environment; then run "
                        "it again."
                    ) from error
            await self._sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(_LONGEST_PAUSE_S, pause_s * _PAUSE_GROWTH)
        raise AssertionError("no attempt was made")


class _Folder:
    def __init__(self, folder: Path, retry: _Retry) -> None:
        self._folder = folder
        self._retry = retry

    async def sizes(self) -> dict[str, int] | None:
        if not self._folder.is_dir():
            raise NotFound(
                f"There is no folder {self._folder} on {socket.gethostname()}. Give one that every "
                "node can see, "
                "or a URL."
            )
        found = {}
        for root, folders, names in os.walk(self._folder):
            here = Path(root).relative_to(self._folder)
            if len(here.parts) == _DEEPEST_FOLDER:
                folders.clear()
            for name in names:
                if (path := self._folder / here / name).is_file():
                    found[(here / name).as_posix()] = path.stat().st_size
        return found

    async def size_bytes(self, path: str) -> int:
        return (self._folder / path).stat().st_size

    async def read(self, path: str, offset: int, size_bytes: int) -> memoryview:
        file = self._folder / path

        def attempt() -> memoryview:
            with file.open("rb", buffering=0) as opened:
                data = os.pread(opened.fileno(), size_bytes, offset)
            return _whole(memoryview(data), size_bytes)

        async def in_a_thread() -> memoryview:
            return await asyncio.to_thread(attempt)

        return await self._retry(f"Reading {file}", in_a_thread, transient=(OSError,))


class _Remote:
    """Read through obstore: its connections and signatures, with our own retries."""

    def __init__(self, url: str, retry: _Retry, *, can_list: bool) -> None:
        import obstore
        from obstore.store import from_url

        try:
            self._store = from_url(
                url,
                client_options={
                    "allow_http": True,
                    "connect_timeout": _CONNECT_TIMEOUT,
                    "timeout": _REQUEST_TIMEOUT,
                },
                retry_config={"max_retries": 0},
            )
        except (obstore.exceptions.BaseError, ValueError) as error:
            raise BadUse(
                f"{url} is not the address of a folder: {_first_line(error)}. Correct it."
            ) from error
        self._url = url.rstrip("/")
        self._retry = retry
        self._can_list = can_list
        self._transient = (obstore.exceptions.BaseError, OSError)

    async def sizes(self) -> dict[str, int] | None:
        if not self._can_list:
            return None
        import obstore

        async def attempt() -> dict[str, int]:
            batches = obstore.list(self._store)
            return {entry["path"]: entry["size"] async for batch in batches for entry in batch}

        return await self._retry(f"Listing {self._url}", attempt, transient=self._transient)

    async def size_bytes(self, path: str) -> int:
        import obstore

        async def attempt() -> int:
            return int((await obstore.head_async(self._store, path))["size"])

        return await self._retry(
            f"Requesting {self._url}/{path}", attempt, transient=self._transient
        )

    async def read(self, path: str, offset: int, size_bytes: int) -> memoryview:
        import obstore

        if size_bytes == 0:
            return memoryview(b"")

        async def attempt() -> memoryview:
            data = await obstore.get_range_async(self._store, path, start=offset, length=size_bytes)
            return _whole(memoryview(data), size_bytes)

        return await self._retry(f"Reading {self._url}/{path}", attempt, transient=self._transient)


def _whole(data: memoryview, size_bytes: int) -> memoryview:
    if data.nbytes != size_bytes:
        raise OSError(f"{data.nbytes} bytes came instead of {size_bytes}")
    return data


def _is_refusal(error: Exception) -> bool:
    """Return True for an error that a retry cannot help: no permission, or an unknown setting."""
    names = (
        "PermissionDeniedError",
        "UnauthenticatedError",
        "NotSupportedError",
        "UnknownConfigurationKeyError",
    )
    return type(error).__name__ in names


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(". :") if lines else type(error).__name__
