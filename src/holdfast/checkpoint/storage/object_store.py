"""Access objects in a bucket or files in a folder, with retries: S3, GCS, Azure and `file://`.

The library obstore sends the requests, several at a time, and repeats a failed request after a
random pause that grows. This module handles faults that repeating one request cannot repair, such
as an interrupted upload or a truncated response. The message of each error is one sentence with the
next step. Endpoints and credentials come from the standard environment (`AWS_ENDPOINT_URL`,
`AWS_ACCESS_KEY_ID`, `GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_KEY`, …).
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
"""The bytes of one request: large enough for a fast network, small enough to be sent again."""
_MAX_PARTS: Final = 10_000
"""The limit on the parts of one object (Amazon S3 user guide, "Multipart upload limits")."""
_PARTS_AT_ONCE: Final = 4
_CONNECT_TIMEOUT_S: Final = 10
_CREDENTIALS_SERVICE: Final = "169.254.169.254"
"""The address where obstore looks for credentials if the environment has none."""
_REFUSALS: Final = ("PermissionDeniedError", "UnauthenticatedError")
_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
"""Error texts of S3, Azure and Google Cloud Storage for a missing bucket."""

_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Limit how long to wait for storage and how often to try again.

    A request is one HTTP request. An operation, such as an upload, may need many requests; an
    attempt is one execution of the whole operation. The pause before each new try of a request, or
    before each new attempt, grows from `first_pause_s` to `longest_pause_s`.

    Attributes:
        request_timeout_s: seconds to wait for a complete response before the request is sent again.
        tries: how often a request is sent at most.
        retry_timeout_s: seconds after the first try of a request during which further tries may
            begin.
        attempts: how often an operation is attempted at most.
        first_pause_s: the first pause, in seconds.
        longest_pause_s: the longest pause, in seconds.
    """

    request_timeout_s: float = 60.0
    tries: int = 10
    retry_timeout_s: float = 120.0
    attempts: int = 5
    first_pause_s: float = 0.1
    longest_pause_s: float = 10.0


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """Describe an object; `modified_at_s` is in seconds since 1970, by the storage's clock."""

    size_bytes: int
    modified_at_s: float


class Objects:
    """Read, write, list and delete the objects below a URL.

    An instance is safe to use from several threads, but not from a process forked after the first
    use. Every method raises `NotFound` if the bucket or folder does not exist, and `StorageFailed`
    if storage refused the request or all attempts failed.

    `gone_on` is called whenever an operation makes progress.

    Raises:
        BadUse: the URL's scheme is not supported, or obstore is not installed.
        NotFound: the folder does not exist.
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
        """The folder on this machine, for a `file://` URL."""
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
        """A number that grows with each part that is sent, received or checked."""
        try:
            self._store: Any = from_url(self.url, **({} if self.folder else _options(patience)))
        except (obstore.exceptions.BaseError, ValueError) as error:
            raise BadUse(
                f"{url} is not a valid address for checkpoints: {_reason(error)}. Correct it."
            ) from error

    def go_on(self, _bytes: int = 0) -> None:
        """Record that an operation makes progress.

        If two threads call this method at once, the calls may count as one.
        """
        self.signs += 1
        self._gone_on()

    def folders(self) -> list[str]:
        """List the names of the folders directly below the URL, sorted."""
        found = self._again("Listing", lambda: self._api.list_with_delimiter(self._store))
        return sorted(found["common_prefixes"])

    def list(self, folder: str) -> dict[str, StoredObject]:
        """List the objects in a folder, by their path relative to the folder.

        The result is empty if the folder does not exist.
        """

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
        """Read a whole object into memory; use this method for small objects.

        Raises:
            FileNotFoundError: there is no such object.
        """
        what = f"Reading {path}"
        return self._again(
            what, lambda: bytes(self._api.get(self._store, path).bytes()), absence_is_an_answer=True
        )

    def read_range(self, path: str, offset: int, length: int) -> memoryview:
        """Read exactly `length` bytes of an object.

        Raises:
            FileNotFoundError: there is no such object.
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
        """Write an object durably; it becomes visible only once it is complete.

        An object of the same path is replaced. The write takes memory for `_PARTS_AT_ONCE` + 1
        parts. Attempts after the first send one part at a time, because the network may be too slow
        for several parts at once.

        Args:
            path: the path of the object.
            blocks: called for each attempt; returns the content of the object. If the iterator
                raises an error other than OSError, the write ends and no object appears.
            size_bytes: the total size of all blocks.
        """
        part_bytes = max(self._part_bytes, -(-size_bytes // _MAX_PARTS))
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
        """Delete the objects `there` from a folder, and `first` before all others.

        An object that does not exist any more is not an error.
        """
        if first in there:
            self._delete([f"{folder}/{first}"])
        self._delete([f"{folder}/{path}" for path in there if path != first])
        if self.folder is not None:
            # Also delete unfinished files of a killed process, which are not listed.
            shutil.rmtree(self.folder / folder, ignore_errors=True)

    def _delete(self, paths: Sequence[str]) -> None:
        def attempt() -> None:
            try:
                self._api.delete(self._store, paths)
            except FileNotFoundError as error:  # some storage stops at the first missing object
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
        """Attempt an operation until it succeeds, with growing pauses; return its result.

        With `absence_is_an_answer`, FileNotFoundError is raised at once. Otherwise, a missing
        object leads to another attempt like any other error. For example, a repeated upload may not
        find its parts because the first upload was completed and only its response was lost.
        """
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
                        f"storage can be reached from {socket.gethostname()}; then try again."
                    ) from error
            else:
                self.go_on()
                return result
            self._sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(self._patience.longest_pause_s, pause_s * 2)
        raise AssertionError("no attempt was made")


def in_parallel(call: Callable[[_T], _R], items: Iterable[_T], *, threads: int) -> list[_R]:
    """Call a function with each item, in threads, and return the results in order.

    After the first error, no further call begins, and that error is raised.
    """
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
    """Sync a file and all folders above it to disk, because obstore does not.

    A folder may be new, so its entry in the parent folder must be durable, too.
    """
    fd = os.open(root / path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    for parent in (root / path).relative_to(root).parents:
        fsync_folder(root / parent)


def _refusal(url: str, error: Exception) -> NotFound | StorageFailed | None:
    """Return the error to raise if another attempt would fail for the same reason, else None."""
    reason = str(error)
    if any(each in reason for each in _NO_BUCKET):
        return NotFound(
            f"There is no bucket {urlsplit(url).netloc} ({url}). Create it, or correct the URL."
        )
    if _CREDENTIALS_SERVICE in reason:
        return StorageFailed(
            f"There are no credentials for {url} in the environment. Set the credentials of its storage "
            "(for S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)."
        )
    if type(error).__name__ in _REFUSALS or any(
        each in reason for each in ("401 Unauthorized", "403 Forbidden")
    ):
        code = reason.partition("<Code>")[2].partition("</Code>")[0] or _reason(error)
        return StorageFailed(
            f"{url} refused the request ({code}). Check the credentials in the environment, and that they may list, "
            "read, write and delete there."
        )
    return None


def _reason(error: BaseException) -> str:
    """Return the cause of an error, taken from the first line of obstore's message.

    The counts and times in that line are left out.
    """
    lines = str(error).strip().splitlines()
    return (
        lines[0].rpartition(" - ")[2].partition(": <")[0].rstrip(". :")
        if lines
        else type(error).__name__
    )
