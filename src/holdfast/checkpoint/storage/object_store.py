"""Objects in a bucket, or files of a folder, behind few calls that try again: S3, GCS, Azure, and `file://`.

obstore makes the requests, several at a time, and repeats each that fails after a growing, random pause. What is left
to this module is what no single request can mend (an upload that lost its place, an answer cut short), and one sentence
for the person who must act. Endpoints and credentials come from the standard environment
(`AWS_ENDPOINT_URL`, `AWS_ACCESS_KEY_ID`, `GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_KEY`, …).
"""

import contextlib
import os
import random
import shutil
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import unquote, urlsplit

from holdfast.core.atomic import fsync_folder
from holdfast.core.errors import BadUse, NotFound, StorageFailed

SCHEMES: Final = ("file", "s3", "s3a", "gs", "az", "azure", "abfs", "abfss")
PART_BYTES: Final = 8 << 20
"""What goes in one request: large enough for the line, small enough to be sent again."""
_MOST_PARTS: Final = 10_000
"""Of one object (Amazon S3 user guide, "Multipart upload limits")."""
_PARTS_AT_ONCE: Final = 4
_CONNECT_TIMEOUT_S: Final = 10
_CREDENTIALS_SERVICE: Final = "169.254.169.254"
"""Where credentials are looked for when the environment has none."""
_REFUSALS: Final = ("PermissionDeniedError", "UnauthenticatedError")
_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
"""As S3, Azure and Google Cloud Storage say it."""

_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long storage is waited for.

    `request_timeout_s`: a request without its whole answer by then is given up and made anew. `tries`: of a request,
    none of which begins later than `retry_timeout_s` after the first. `attempts`: of an operation, each of which may be
    many requests. The pauses between both grow from the first to the longest.
    """

    request_timeout_s: float = 60.0
    tries: int = 10
    retry_timeout_s: float = 120.0
    attempts: int = 5
    first_pause_s: float = 0.1
    longest_pause_s: float = 10.0


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """An object; `modified_at_s` by the storage's own clock, in seconds since the Unix epoch."""

    size_bytes: int
    modified_at_s: float


class Objects:
    """What lies below a URL. Safe to use from several threads, not from a process forked after the first use.

    Every method raises `NotFound` where there is no such bucket or folder, and `StorageFailed` where it was refused or
    failed in all attempts.

    `gone_on` is called with each sign of life.

    Raises:
        BadUse: nothing here reads such a URL, or obstore is not installed.
        NotFound: there is no such folder.
    """

    def __init__(
        self,
        url: str,
        *,
        patience: Patience,
        sleep: Callable[[float], None],
        part_bytes: int = PART_BYTES,
        gone_on: Callable[[], None] = lambda: None,
    ) -> None:
        scheme = url.partition("://")[0].lower() if "://" in url else ""
        if scheme not in SCHEMES:
            known = ", ".join(f"{each}://" for each in ("s3", "gs", "az", "file"))
            raise BadUse(
                f"Checkpoints cannot be kept at {url!r}. Give a URL that begins with one of {known}."
            )
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as error:
            raise BadUse(
                f"{scheme}:// needs obstore. Install it with: pip install 'holdfast[remote]'."
            ) from error
        self.url = url.rstrip("/")
        self.folder = Path(unquote(urlsplit(url).path)) if scheme == "file" else None
        """Where it is on this machine, if it is."""
        if self.folder is not None and not self.folder.is_dir():
            raise NotFound(
                f"There is no folder {self.folder} on {socket.gethostname()}. Make it or mount it."
            )
        self._patience = patience
        self._sleep = sleep
        self._part_bytes = part_bytes
        self._gone_on = gone_on
        self._api = obstore
        self.signs = 0
        """Of life: grows with all that comes, goes or is checked."""
        try:
            self._store: Any = from_url(self.url, **({} if self.folder else _options(patience)))
        except (obstore.exceptions.BaseError, ValueError) as error:
            raise BadUse(
                f"{url} is no address to keep checkpoints at: {_reason(error)}. Correct it."
            ) from error

    def go_on(self, _bytes: int = 0) -> None:
        """Give a sign of life; that of two threads at once may count as one."""
        self.signs += 1
        self._gone_on()

    def folders(self) -> list[str]:
        """The names of the folders, sorted."""
        found = self._again("Listing", lambda: self._api.list_with_delimiter(self._store))
        return sorted(found["common_prefixes"])

    def list(self, folder: str) -> dict[str, StoredObject]:
        """What lies in a folder, by its path in there; nothing where there is no such folder."""

        def attempt() -> dict[str, StoredObject]:
            return {
                str(each["path"]).removeprefix(f"{folder}/"): StoredObject(
                    size_bytes=int(each["size"]), modified_at_s=each["last_modified"].timestamp()
                )
                for batch in self._api.list(self._store, folder)
                for each in batch
            }

        return self._again(f"Listing {folder}", attempt)

    def read(self, path: str) -> bytes:
        """All of an object, which should be small.

        Raises:
            FileNotFoundError: there is none.
        """
        what = f"Reading {path}"
        return self._again(
            what, lambda: bytes(self._api.get(self._store, path).bytes()), absence_is_an_answer=True
        )

    def read_range(self, path: str, offset: int, length: int) -> memoryview:
        """Exactly `length` bytes of an object.

        Raises:
            FileNotFoundError: there is none.
        """

        def attempt() -> memoryview:
            data = memoryview(self._api.get_range(self._store, path, start=offset, length=length))
            if data.nbytes != length:
                raise OSError(f"{data.nbytes} bytes came instead of {length}")
            return data

        if length == 0:
            return memoryview(b"")
        return self._again(f"Reading {path}", attempt, absence_is_an_answer=True)

    def write(self, path: str, blocks: Callable[[], Iterator[bytes]], size_bytes: int) -> None:
        """Write an object, which appears whole, or replaces another, once the last block is there; durable after.

        Memory: `_PARTS_AT_ONCE` + 1 parts. Later attempts send a part at a time, for a line too slow for several.

        Args:
            path: where.
            blocks: called for each attempt. What it raises, other than OSError, ends the write; nothing is there then.
            size_bytes: of all blocks.
        """
        part_bytes = max(self._part_bytes, -(-size_bytes // _MOST_PARTS))
        at_once = iter([_PARTS_AT_ONCE])

        def taken() -> Iterator[bytes]:
            for block in blocks():
                self.go_on()
                yield block

        def attempt() -> None:
            self._api.put(
                self._store,
                path,
                taken(),
                use_multipart=size_bytes > part_bytes,
                chunk_size=part_bytes,
                max_concurrency=next(at_once, 1),
            )
            if self.folder is not None:
                _make_durable(self.folder, path)

        self._again(f"Writing {path}", attempt)

    def delete_folder(self, folder: str, there: Collection[str], *, first: str) -> None:
        """Delete what is there in a folder, `first` before the rest; what is gone already is well."""
        if first in there:
            self._delete([f"{folder}/{first}"])
        self._delete([f"{folder}/{path}" for path in there if path != first])
        if self.folder is not None:  # with what a killed process was writing, which is not listed
            shutil.rmtree(self.folder / folder, ignore_errors=True)

    def _delete(self, paths: Sequence[str]) -> None:
        def attempt() -> None:
            try:
                self._api.delete(self._store, paths)
            except FileNotFoundError as error:  # some storage stops at the first that is gone
                if any(each in str(error) for each in _NO_BUCKET):
                    raise
                for path in paths:
                    with contextlib.suppress(FileNotFoundError):
                        self._api.delete(self._store, path)

        if paths:
            self._again(f"Deleting {paths[0]}", attempt)

    def _again(
        self, what: str, attempt: Callable[[], _T], *, absence_is_an_answer: bool = False
    ) -> _T:
        """Else absence is a failure like others: of an upload whose end was reached, and the answer lost."""
        pause_s = self._patience.first_pause_s
        for number in range(1, self._patience.attempts + 1):
            try:
                result = attempt()
            except (self._api.exceptions.BaseError, OSError) as error:
                if (refusal := _refusal(self.url, error)) is not None:
                    raise refusal from error
                if absence_is_an_answer and isinstance(error, FileNotFoundError):
                    raise
                if number == self._patience.attempts:
                    endpoint = os.environ.get("AWS_ENDPOINT_URL")
                    through = f" at {endpoint}" if endpoint and self.url.startswith("s3") else ""
                    raise StorageFailed(
                        f"{what} in {self.url}{through} failed {number} times: {_reason(error)}. Check that the "
                        f"storage can be reached from {socket.gethostname()}; then do it again."
                    ) from error
            else:
                self.go_on()
                return result
            self._sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(self._patience.longest_pause_s, pause_s * 2)
        raise AssertionError("no attempt was made")


def in_parallel(call: Callable[[_T], _R], items: Iterable[_T], *, threads: int) -> list[_R]:
    """Call a function with each item, in threads; after the first error no further call begins, and it is raised."""
    with ThreadPoolExecutor(max_workers=threads) as pool:
        futures = [pool.submit(call, item) for item in items]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in futures]


def _options(patience: Patience) -> dict[str, Any]:
    return {
        "client_options": {
            "allow_http": True,
            "connect_timeout": timedelta(
                seconds=min(_CONNECT_TIMEOUT_S, patience.request_timeout_s)
            ),
            "timeout": timedelta(seconds=patience.request_timeout_s),
        },
        "retry_config": {
            "max_retries": patience.tries - 1,
            "retry_timeout": timedelta(seconds=patience.retry_timeout_s),
            "backoff": {
                "init_backoff": timedelta(seconds=patience.first_pause_s),
                "max_backoff": timedelta(seconds=patience.longest_pause_s),
                "base": 2,
            },
        },
    }


def _make_durable(root: Path, path: str) -> None:
    """What obstore leaves out for files: fsync, of the file and of every folder above it that may be new."""
    fd = os.open(root / path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    for parent in (root / path).relative_to(root).parents:
        fsync_folder(root / parent)


def _refusal(url: str, error: Exception) -> NotFound | StorageFailed | None:
    """What to say where the answer would be the same the next time; None for any other error."""
    said = str(error)
    if any(each in said for each in _NO_BUCKET):
        return NotFound(
            f"There is no bucket {urlsplit(url).netloc} ({url}). Create it, or correct the URL."
        )
    if _CREDENTIALS_SERVICE in said:
        return StorageFailed(
            f"There are no credentials for {url} in the environment. Set those of its storage "
            "(for S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)."
        )
    if type(error).__name__ in _REFUSALS or any(
        each in said for each in ("401 Unauthorized", "403 Forbidden")
    ):
        code = said.partition("<Code>")[2].partition("</Code>")[0] or _reason(error)
        return StorageFailed(
            f"{url} refused the request ({code}). Check the credentials in the environment, and that they may list, "
            "read, write and delete there."
        )
    return None


def _reason(error: BaseException) -> str:
    """The end of the first line of what obstore says: what went wrong, without counts and times."""
    lines = str(error).strip().splitlines()
    return (
        lines[0].rpartition(" - ")[2].partition(": <")[0].rstrip(". :")
        if lines
        else type(error).__name__
    )
