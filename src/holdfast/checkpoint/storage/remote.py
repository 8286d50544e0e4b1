"""Push, list, fetch, read and delete checkpoints in object storage.

This module needs no torch. To push is to upload a local checkpoint.

| module | one idea |
|---|---|
| `object_store` | read, write, list and delete objects, with retries |
| `catalog` | list the checkpoints in storage, and check whether each is complete |
| `push` | upload a local checkpoint, the manifest last |
| `fetch` | download a checkpoint; it appears once every byte is verified |
| `ranges` | read parts of files, and verify every block |
"""

import time
from collections.abc import Callable
from pathlib import Path

from holdfast.checkpoint.format.manifest import MANIFEST_NAME
from holdfast.checkpoint.storage.catalog import RemoteCheckpoint, scan_remote
from holdfast.checkpoint.storage.fetch import fetch
from holdfast.checkpoint.storage.object_store import PART_BYTES, Objects, Patience
from holdfast.checkpoint.storage.push import push
from holdfast.checkpoint.storage.ranges import RangeReader
from holdfast.core.arguments import check_whole
from holdfast.core.clock import Clock, SystemClock
from holdfast.core.errors import BadUse, DamagedCheckpoint, NotFound
from holdfast.core.rate_limit import RateLimit

_MIB = 1 << 20


class Remote:
    """Access the checkpoints below one URL in object storage.

    An instance is safe to use from several threads, but not after a fork. Every method raises
    `NotFound` if the bucket, folder or step does not exist, and `StorageFailed` if storage refused
    the request or all attempts failed.

    Args:
        url: `s3://BUCKET/PREFIX`, `gs://…`, `az://…` or `file:///FOLDER`; credentials come from the
            environment.
        max_write_mib_s: the limit on the upload rate in MiB/s; None for no limit.
        patience: how long to wait for storage; None for the defaults of `Patience`.
        clock: the clock that measures the upload rate and the age of unfinished uploads.
        sleep: the function that pauses for a number of seconds.
        part_bytes: the number of bytes in one upload request; S3 needs at least 5 MiB.

    Raises:
        BadUse: the URL's scheme is not supported, a setting is out of range, or obstore is not
            installed.
        NotFound: `url` is a folder that does not exist.
    """

    def __init__(
        self,
        url: str,
        *,
        max_write_mib_s: float | None = None,
        patience: Patience | None = None,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
        part_bytes: int = PART_BYTES,
    ) -> None:
        if max_write_mib_s is not None and not max_write_mib_s > 0:
            raise BadUse(
                f"max_write_mib_s is {max_write_mib_s}. Give a number above 0, or None for no limit."
            )
        self._clock = clock or SystemClock()
        self._sleep = sleep
        bytes_per_s = None if max_write_mib_s is None else max_write_mib_s * _MIB
        self._pace = RateLimit(bytes_per_s, self._clock.monotonic_s, sleep)
        self._objects = Objects(
            url, patience=patience or Patience(), sleep=sleep, part_bytes=part_bytes
        )
        self._reader: RangeReader | None = None

    def push(self, folder: str | Path) -> RemoteCheckpoint:
        """Upload a local checkpoint to storage.

        The checkpoint appears in storage once it is complete. Files that an earlier push of the
        same checkpoint has sent are not sent again. If storage has an earlier save of the same
        step, the pushed save replaces it. Replaced saves are deleted after a day, and so are
        objects that interrupted pushes and deletions left. A push takes about 160 MiB of memory.

        Args:
            folder: the folder of the checkpoint, named `step-NUMBER`.

        Raises:
            BadUse: `folder` is not a checkpoint, or was not saved completely.
            DamagedCheckpoint: a file does not match the manifest.
        """
        now_s = self._clock.now_s()
        return push(self._objects, Path(folder), pace=self._pace, now_s=now_s, sleep=self._sleep)

    @property
    def url(self) -> str:
        """Return the URL below which the checkpoints are stored."""
        return self._objects.url

    @property
    def signs(self) -> int:
        """Return a number that grows while an operation in another thread makes progress."""
        return self._objects.signs

    def scan(self, *, above: int = -1, patience: Patience | None = None) -> list[RemoteCheckpoint]:
        """List the checkpoints in storage, newest first, including damaged ones.

        Damage is detected only by manifest and sizes; no data is read. Of two saves of one step,
        the one pushed last comes first. The other one is deleted by a push a day later.

        Args:
            above: list only steps greater than this one.
            patience: how long to wait for this listing; None for the patience given to `Remote`.
        """
        objects = self._objects
        if patience is not None:
            objects = Objects(
                self.url, patience=patience, sleep=self._sleep, gone_on=self._objects.go_on
            )
        return scan_remote(objects, above=above)

    def find(self, step: int) -> RemoteCheckpoint:
        """Return the undamaged checkpoint of a step; of several, the one pushed last.

        Raises:
            DamagedCheckpoint: storage has the step, but every save of it is damaged.
        """
        step = check_whole("step", step, least=0)
        there = scan_remote(self._objects, step)
        for each in there:
            if each.state == "written":
                return each
        if there:
            raise DamagedCheckpoint(
                f"{there[0].url} is damaged: {there[0].reason}. Take an earlier step."
            )
        raise NotFound(
            f"{self._objects.url} has no checkpoint of step {step}. Take one that is listed there."
        )

    def fetch(self, checkpoint: int | RemoteCheckpoint, into: str | Path) -> Path:
        """Download and verify a checkpoint into a local checkpoint folder.

        The checkpoint appears in the folder once it is verified, and replaces an existing one of
        the same step. If the process is killed, a hidden folder remains until the next process
        saves into `into` for the first time. The download takes about 64 MiB of memory.

        Args:
            checkpoint: a step, or an item that `scan` returned.
            into: the local folder that contains the checkpoints.

        Raises:
            DamagedCheckpoint: the checkpoint does not match its manifest; nothing was changed in
                `into`.
            CheckpointError: `into` is full or cannot be written.
        """
        found = checkpoint if isinstance(checkpoint, RemoteCheckpoint) else self.find(checkpoint)
        return fetch(self._objects, found, Path(into))

    def read_range(self, step: int, file: str, offset: int, length: int) -> memoryview:
        """Read a part of one file of a checkpoint, and verify every block of the part.

        Raises:
            BadUse: the checkpoint has no such file, or the file is too short.
            DamagedCheckpoint: the file does not match its manifest.
            CheckpointError: an earlier version saved the checkpoint, so parts cannot be verified.
        """
        reader = self._reader
        if reader is not None and reader.checkpoint.step == step:
            try:
                return reader.read(file, offset, length)
            except FileNotFoundError:
                pass  # the save was replaced
        self._reader = reader = RangeReader(self._objects, self.find(step))
        try:
            return reader.read(file, offset, length)
        except FileNotFoundError as error:
            raise DamagedCheckpoint(
                f"{file} of {reader.checkpoint.url} is gone. Take another step."
            ) from error

    def delete(self, step: int) -> None:
        """Delete all saves of a step from storage.

        The manifest is deleted first, so that the checkpoint disappears at once. If the process is
        killed, a later push deletes the remaining objects. No other process should push the step
        during this call.
        """
        there = scan_remote(self._objects, check_whole("step", step, least=0))
        if not there:
            raise NotFound(
                f"{self._objects.url} has no checkpoint of step {step}. Take one that is listed there."
            )
        self._reader = None
        for each in there:
            self._objects.delete_folder(
                each.name, self._objects.list(each.name), first=MANIFEST_NAME
            )
