"""Checkpoints in object storage: pushed there, listed, fetched back, read in parts, deleted. Needs no torch.

| module | one idea |
|---|---|
| `objects` | objects behind few calls that try again |
| `remote_catalog` | which checkpoints lie there, and whether each is whole |
| `remote_push` | local folder → there, its manifest last |
| `remote_fetch` | there → local folder, under its name once every byte verified |
| `remote_ranges` | parts of files, every block verified |
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
    """The checkpoints below one URL. Safe to use from several threads, not after a fork.

    Every method raises `NotFound` where there is no such bucket, folder or step, and `StorageFailed` where storage
    refused, or failed in all attempts.

    Args:
        url: `s3://BUCKET/PREFIX`, `gs://…`, `az://…` or `file:///FOLDER`; the rest comes from the environment.
        max_write_mib_s: how fast to push at most, in MiB a second; None: as fast as it goes.
        patience: how long storage is waited for; None: as `Patience` says.
        clock: for the pace, and to tell what dead pushes left.
        sleep: how to pause.
        part_bytes: what is sent in one request; S3 takes no less than 5 MiB.

    Raises:
        BadUse: nothing here reads such a URL, a setting is out of range, or obstore is not installed.
        NotFound: `url` is a folder, and not there.
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
        """Put a local checkpoint there. It is a checkpoint there once this returns, and not before it is whole.

        What an earlier push of the same left is not sent again. From then on it counts, not another save of its step.
        What was replaced, or left by dead pushes and deletions, a day ago is deleted. Memory: about 160 MiB.

        Raises:
            BadUse: `folder` is no checkpoint, or was not saved whole.
            DamagedCheckpoint: a file is not what its manifest says.
        """
        now_s = self._clock.now_s()
        return push(self._objects, Path(folder), pace=self._pace, now_s=now_s, sleep=self._sleep)

    @property
    def url(self) -> str:
        """Where it is."""
        return self._objects.url

    @property
    def signs(self) -> int:
        """Of life: grows for as long as what another thread does here gets on."""
        return self._objects.signs

    def scan(self, *, above: int = -1, patience: Patience | None = None) -> list[RemoteCheckpoint]:
        """The checkpoints there, newest first, whole or damaged, by manifest and sizes; reads no data.

        Of two of one step the one pushed last comes first; the other is deleted by a push a day later. Those of steps
        up to `above` are left out, unread. `patience`: of this look; None: as of all else.
        """
        objects = self._objects
        if patience is not None:
            objects = Objects(
                self.url, patience=patience, sleep=self._sleep, gone_on=self._objects.go_on
            )
        return scan_remote(objects, above=above)

    def find(self, step: int) -> RemoteCheckpoint:
        """The checkpoint of a step; of several whole ones that which was pushed last.

        Raises:
            DamagedCheckpoint: it is there and not whole.
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
        """Download a step, or what `scan` listed, into a local checkpoint folder; there it appears once it is verified.

        One of the same step in `into` is replaced. What a kill leaves is hidden and goes with the next process's first
        save there. Memory: about 64 MiB.

        Raises:
            DamagedCheckpoint: it is not what its manifest says; nothing was changed in `into`.
            CheckpointError: `into` is full or cannot be written.
        """
        found = checkpoint if isinstance(checkpoint, RemoteCheckpoint) else self.find(checkpoint)
        return fetch(self._objects, found, Path(into))

    def read_range(self, step: int, file: str, offset: int, length: int) -> memoryview:
        """Read a part of one file of a checkpoint, every block of it verified.

        Raises:
            BadUse: the file has no such part.
            DamagedCheckpoint: it is not what its manifest says.
            CheckpointError: it was saved by a version whose files cannot be verified in parts.
        """
        reader = self._reader
        if reader is not None and reader.checkpoint.step == step:
            try:
                return reader.read(file, offset, length)
            except FileNotFoundError:
                pass  # replaced since
        self._reader = reader = RangeReader(self._objects, self.find(step))
        try:
            return reader.read(file, offset, length)
        except FileNotFoundError as error:
            raise DamagedCheckpoint(
                f"{file} of {reader.checkpoint.url} is gone. Take another step."
            ) from error

    def delete(self, step: int) -> None:
        """Delete a step: the manifest first, after which it is no checkpoint, then the rest.

        What a kill in between leaves goes with a later push. Other processes should not be pushing that step.
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
