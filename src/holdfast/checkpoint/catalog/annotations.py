"""Read and change the marks of a checkpoint: `holdfast-marks.json`, beside the manifest.

The marks record facts found after the save: verified, healthy, damaged, pinned, wanted by whom,
metrics. The manifest never changes; marks change, and are not part of its digest. Marks guide the
deletion policy and people. They do not affect whether a checkpoint can be restored. Unreadable
marks count as none, and keep the checkpoint from being deleted. This module needs no torch.
"""

import fcntl
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from holdfast.checkpoint.format.manifest import DAMAGED_JSON
from holdfast.core.atomic import write_atomic
from holdfast.core.errors import BadUse, CheckpointError, HoldfastError, NotFound

MARKS_NAME = "holdfast-marks.json"
SCHEMA = "holdfast.checkpoint-marks"
VERSION = 1
_MOST_BYTES = 1 << 20
_HELD_FOR_S = 24 * 3600.0
"""The longest hold of a reader, in case the reader is killed before it releases the hold."""
_logger = logging.getLogger("holdfast")


@dataclass(frozen=True, kw_only=True)
class Annotation:
    """A timestamped annotation.

    Attributes:
        at_s: the time, in seconds since the Unix epoch.
        by: the name of the program or person that set the annotation.
        why: the reason, if there is one.
    """

    at_s: float
    by: str
    why: str | None = None


@dataclass(frozen=True, kw_only=True)
class ReadHold:
    """A hold that keeps a checkpoint from being deleted.

    Attributes:
        at_s: the start, in seconds since the Unix epoch.
        until_s: the end; None for a hold until `release`.
    """

    at_s: float
    until_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Annotations:
    """The marks of one checkpoint.

    Attributes:
        verified: every byte was read and matched its checksum.
        healthy: training that continued from the checkpoint went well.
        damaged: a verification found damage; `why` names it.
        pinned: the checkpoint must never be deleted.
        wanted: the holds, by holder, such as an evaluation.
        metrics: the value of each metric, by name.
        unreadable: why the file cannot be read; None if it can.
    """

    verified: Annotation | None = None
    healthy: Annotation | None = None
    damaged: Annotation | None = None
    pinned: Annotation | None = None
    wanted: Mapping[str, ReadHold] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    unreadable: str | None = None

    def wanted_by(self, now_s: float | None) -> list[str]:
        """Return the holders whose holds are in force at `now_s`; all holders for None."""
        return [
            holder
            for holder, want in sorted(self.wanted.items())
            if now_s is None or want.until_s is None or want.until_s > now_s
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the marks as JSON values.

        Absent marks are left out, and a metric that is not finite is text (`nan`).
        """
        found = {name: value for name, value in asdict(self).items() if value}
        if self.metrics:
            found["metrics"] = {
                name: value if math.isfinite(value) else str(value)
                for name, value in self.metrics.items()
            }
        return found


def read_marks(checkpoint: Path) -> Annotations:
    """Read the marks of a checkpoint.

    If the file is unreadable, a warning is logged, and only `unreadable` is set.
    """
    path = checkpoint / MARKS_NAME
    try:
        return _load(path)
    except FileNotFoundError:
        return Annotations()
    except _NewerError as error:
        why = str(error)
    except OSError as error:
        why = error.strerror or str(error)
    except DAMAGED_JSON as error:
        why = f"{MARKS_NAME} is damaged ({error})"
    _logger.warning("The marks of %s cannot be read, so it is not deleted: %s.", checkpoint, why)
    return Annotations(unreadable=why)


def change_marks(
    checkpoint: Path,
    change: Callable[[Annotations], Annotations],
    *,
    now_s: float,
    still: Callable[[], bool] = lambda: True,
) -> Annotations:
    """Replace the marks by the result of `change`, durably; concurrent changes are not lost.

    Damaged marks are set aside as `holdfast-marks.json.damaged`. Since their content is lost, the
    checkpoint is pinned.

    Args:
        checkpoint: the folder of the checkpoint.
        change: returns the new marks.
        now_s: the time, in seconds since the Unix epoch.
        still: called under the lock; returns whether the checkpoint is still the save that is
            meant.

    Raises:
        NotFound: the checkpoint is gone, or `still` returns False.
        CheckpointError: another process holds the lock, or a newer Holdfast wrote the marks.
        OSError: the marks could not be written, and are unchanged.
    """
    path = checkpoint / MARKS_NAME
    with locked(checkpoint):
        if not still():
            raise NotFound(f"{checkpoint} was saved again meanwhile. Inspect the new save.")
        marks = change(_load_or_put_aside(path, now_s))
        content = {"schema": SCHEMA, "version": VERSION, **marks.as_dict()}
        content["digest"] = _digest(content)
        write_atomic(path, json.dumps(content, indent=1, allow_nan=False).encode() + b"\n")
    return marks


def note_verified(
    checkpoint: Path, *, by: str, now_s: float, still: Callable[[], bool] = lambda: True
) -> Annotations:
    """Mark a checkpoint as verified: every byte matches. This removes a `damaged` mark."""
    noted = Annotation(at_s=now_s, by=by)
    return change_marks(
        checkpoint,
        lambda marks: replace(marks, verified=noted, damaged=None),
        now_s=now_s,
        still=still,
    )


def note_damaged(
    checkpoint: Path, why: str, *, by: str, now_s: float, still: Callable[[], bool] = lambda: True
) -> Annotations:
    """Mark a checkpoint as damaged. This removes the `verified` and `healthy` marks."""
    noted = Annotation(at_s=now_s, by=by, why=why)
    return change_marks(
        checkpoint,
        lambda marks: replace(marks, verified=None, healthy=None, damaged=noted),
        now_s=now_s,
        still=still,
    )


def note_healthy(checkpoint: Path, *, by: str, now_s: float, why: str | None = None) -> Annotations:
    """Mark a checkpoint as healthy: training from it went well, so a rollback may use it."""
    noted = Annotation(at_s=now_s, by=by, why=why)
    return change_marks(checkpoint, lambda marks: replace(marks, healthy=noted), now_s=now_s)


def note_metrics(
    checkpoint: Path,
    metrics: Mapping[str, float],
    *,
    now_s: float,
    still: Callable[[], bool] = lambda: True,
) -> Annotations:
    """Add metrics to a checkpoint; a metric of the same name is replaced."""
    values = {str(name): float(value) for name, value in metrics.items()}
    return change_marks(
        checkpoint,
        lambda marks: replace(marks, metrics={**marks.metrics, **values}),
        now_s=now_s,
        still=still,
    )


def pin(checkpoint: Path, *, by: str, now_s: float, why: str | None = None) -> Annotations:
    """Pin a checkpoint, so that nothing deletes it."""
    noted = Annotation(at_s=now_s, by=by, why=why)
    return change_marks(checkpoint, lambda marks: replace(marks, pinned=noted), now_s=now_s)


def unpin(checkpoint: Path, *, now_s: float) -> Annotations:
    """Remove the pin, so that the deletion policy may delete the checkpoint."""
    return change_marks(checkpoint, lambda marks: replace(marks, pinned=None), now_s=now_s)


def want(
    checkpoint: Path, holder: str, *, now_s: float, until_s: float | None = None
) -> Annotations:
    """Hold a checkpoint for `holder`, until `until_s` or until `release`.

    Another call for the same holder replaces the end. Holds that have ended are removed.

    Raises:
        BadUse: `holder` is empty, or `until_s` is not finite.
        NotFound, CheckpointError, OSError: see `change_marks`.
    """
    if not holder:
        raise BadUse(
            "A want needs the name of its holder. Give one, such as the id of the evaluation."
        )
    if until_s is not None and not math.isfinite(until_s):
        raise BadUse(
            f"until_s is {until_s!r}; allowed are seconds since the epoch, or None for without end."
        )
    wanted = ReadHold(at_s=now_s, until_s=until_s)

    def with_it(marks: Annotations) -> Annotations:
        holders = marks.wanted_by(now_s)
        return replace(
            marks,
            wanted={**{name: marks.wanted[name] for name in holders}, holder: wanted},
        )

    return change_marks(checkpoint, with_it, now_s=now_s)


@contextmanager
def held_for_reading(
    checkpoint: Path, holder: str, *, clock_s: Callable[[], float] = time.time
) -> Iterator[None]:
    """Hold a checkpoint while the block runs, for a day at most.

    If the hold cannot be recorded, a warning is logged, and the block runs without.
    """
    now_s = clock_s()
    try:
        want(checkpoint, holder, now_s=now_s, until_s=now_s + _HELD_FOR_S)
    except (HoldfastError, OSError) as error:
        _logger.warning("%s may be deleted while %s reads it: %s", checkpoint, holder, error)
        yield
        return
    try:
        yield
    finally:
        try:
            release(checkpoint, holder, now_s=clock_s())
        except (HoldfastError, OSError) as error:
            _logger.info("%s is not released by %s, or gone: %s", checkpoint, holder, error)


def release(checkpoint: Path, holder: str, *, now_s: float) -> Annotations:
    """Remove the hold of `holder`; other holds stay."""

    def without(marks: Annotations) -> Annotations:
        return replace(
            marks, wanted={name: each for name, each in marks.wanted.items() if name != holder}
        )

    return change_marks(checkpoint, without, now_s=now_s)


def inherit_claims(former: Iterable[Path], heir: Path, *, now_s: float) -> None:
    """Copy the pins and holds of replaced checkpoints of a step to the new one.

    Marks about the bytes (verified, damaged, …) are not copied. Unreadable marks pin the new
    checkpoint.

    Args:
        former: the folders of the replaced checkpoints.
        heir: the folder of the new checkpoint.
        now_s: the time, in seconds since the Unix epoch.

    Raises:
        OSError: the marks could not be written.
    """
    found = [read_marks(path) for path in former]
    pins = [marks.pinned for marks in found if marks.pinned is not None]
    for marks in found:
        if marks.unreadable is not None:
            why = f"the marks of the one that it replaced are not known ({marks.unreadable})"
            pins.append(Annotation(at_s=now_s, by="holdfast", why=why))
    wanted = {holder: each for marks in found for holder, each in marks.wanted.items()}
    if pins or wanted:
        pinned = pins[0] if pins else None
        change_marks(heir, lambda marks: replace(marks, pinned=pinned, wanted=wanted), now_s=now_s)


class _NewerError(Exception):
    """The marks are of a newer version than this Holdfast reads."""


def _load(path: Path) -> Annotations:
    with path.open("rb") as file:
        return _parse(file.read(_MOST_BYTES + 1))


def _load_or_put_aside(path: Path, now_s: float) -> Annotations:
    try:
        return _load(path)
    except FileNotFoundError:
        return Annotations()
    except _NewerError as error:
        raise CheckpointError(
            f"The marks of {path.parent} cannot be changed: {error}. Use that Holdfast."
        ) from error
    except DAMAGED_JSON as error:
        # A copy: the damaged file stays in place, and protects the checkpoint, until it is
        # replaced.
        shutil.copyfile(path, path.with_name(f"{MARKS_NAME}.damaged"))
        return Annotations(
            pinned=Annotation(
                at_s=now_s, by="holdfast", why=f"its marks were damaged and are not known ({error})"
            )
        )


def _parse(data: bytes) -> Annotations:
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it is larger than {_MOST_BYTES} bytes")
    content = json.loads(data)
    digest = content.pop("digest", None)
    if digest != _digest(content):
        raise ValueError("it does not match its own digest")
    if content["schema"] != SCHEMA:
        raise ValueError(f"it is {content['schema']}")
    if content["version"] != VERSION:
        raise _NewerError(
            f"{MARKS_NAME} is of version {content['version']}, this Holdfast reads version {VERSION}"
        )
    return Annotations(
        verified=_noted(content.get("verified")),
        healthy=_noted(content.get("healthy")),
        damaged=_noted(content.get("damaged")),
        pinned=_noted(content.get("pinned")),
        wanted={str(holder): _want(raw) for holder, raw in content.get("wanted", {}).items()},
        metrics={str(name): float(value) for name, value in content.get("metrics", {}).items()},
    )


def _noted(raw: dict[str, Any] | None) -> Annotation | None:
    if raw is None:
        return None
    why = raw.get("why")
    return Annotation(
        at_s=float(raw["at_s"]), by=str(raw["by"]), why=None if why is None else str(why)
    )


def _want(raw: dict[str, Any]) -> ReadHold:
    until_s = raw.get("until_s")
    return ReadHold(at_s=float(raw["at_s"]), until_s=None if until_s is None else float(until_s))


def _digest(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return str(xxhash.xxh3_128_hexdigest(canonical))


# The lock for changing a checkpoint's annotations, or deleting a checkpoint without any: one
# process at a time. The lock is on an empty file in the checkpoint's folder, since network file
# systems cannot lock folders. The kernel releases the lock when its process dies.

LOCK_NAME = ".holdfast-marks.lock"
WAIT_S = 10.0
"""Seconds to wait for the lock; a holder writes one small file, or renames one folder."""
_POLL_S = 0.01


@contextmanager
def locked(checkpoint: Path, *, wait_s: float = WAIT_S) -> Iterator[None]:
    """Hold the lock of a checkpoint; when the block begins, the checkpoint is in its folder.

    Raises:
        NotFound: the checkpoint is gone.
        CheckpointError: another process has held the lock for `wait_s` seconds.
        OSError: the folder cannot be written.
    """
    path = checkpoint / LOCK_NAME
    deadline_s = time.monotonic() + wait_s
    while True:
        fd = _open(path)
        try:
            _lock(fd, checkpoint, deadline_s, wait_s)
            # The former holder may have deleted the checkpoint, or replaced it by another save.
            if _is_at(fd, path):
                yield
                return
        finally:
            os.close(fd)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(
            f"There is no checkpoint {path.parent} (any more). `holdfast checkpoint ls` lists those there are."
        ) from error


def _lock(fd: int, checkpoint: Path, deadline_s: float, wait_s: float) -> None:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() >= deadline_s:
                raise CheckpointError(
                    f"Another process has held the marks of {checkpoint} for {wait_s:.0f} s. See who has "
                    f"{LOCK_NAME} open there (`fuser`), and try again."
                ) from error
            time.sleep(_POLL_S)
        # The file system has no locks; each write is still atomic.
        except OSError as error:
            _logger.debug("no lock on %s: %s", checkpoint, error)
            return
        else:
            return


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
