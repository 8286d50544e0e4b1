"""Read and change the marks of a checkpoint, in `holdfast-marks.json` beside the manifest.

Marks are annotations that are made after the save: verified, healthy, damaged, pinned, wanted by a
reader, and metrics. The manifest never changes, so marks are not part of it or of its digest. Marks
affect which checkpoints the retention policy deletes, but not whether a checkpoint can be restored.
If the marks of a checkpoint cannot be read, the checkpoint is treated as unmarked, and it is not
deleted. This module needs no torch.
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
_MAX_BYTES = 1 << 20
_HELD_FOR_S = 24 * 3600.0
"""The limit in seconds on a reader's hold, since a killed reader never releases its hold."""
_logger = logging.getLogger("holdfast")


@dataclass(frozen=True, kw_only=True)
class Annotation:
    """Record when, by whom and why a checkpoint was marked.

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
    """Record a hold, which keeps a checkpoint from being deleted while a program uses it.

    Attributes:
        at_s: the start, in seconds since the Unix epoch.
        until_s: the end, in seconds since the Unix epoch; None if the hold lasts until `release`.
    """

    at_s: float
    until_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Annotations:
    """Hold the marks of one checkpoint; a mark that is not set is None or empty.

    Attributes:
        verified: every byte was read and matched its checksum.
        healthy: training that continued from the checkpoint made good progress.
        damaged: a verification found damage; `why` names it.
        pinned: the checkpoint must never be deleted.
        wanted: the holds, by the name of the holder, such as an evaluation.
        metrics: the value of each metric, by name.
        unreadable: the reason why the marks cannot be read; None if they can.
    """

    verified: Annotation | None = None
    healthy: Annotation | None = None
    damaged: Annotation | None = None
    pinned: Annotation | None = None
    wanted: Mapping[str, ReadHold] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    unreadable: str | None = None

    def wanted_by(self, now_s: float | None) -> list[str]:
        """Return the holders whose holds last beyond `now_s`; all holders if `now_s` is None."""
        return [
            holder
            for holder, want in sorted(self.wanted.items())
            if now_s is None or want.until_s is None or want.until_s > now_s
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the marks as JSON values.

        Marks that are not set are left out. A metric that is not finite is given as text, such as
        `nan`.
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

    If the file cannot be read, a warning is logged, and only `unreadable` is set.
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
    _logger.warning(
        "The marks of %s cannot be read, so the checkpoint is not deleted: %s.", checkpoint, why
    )
    return Annotations(unreadable=why)


def change_marks(
    checkpoint: Path,
    change: Callable[[Annotations], Annotations],
    *,
    now_s: float,
    still: Callable[[], bool] = lambda: True,
) -> Annotations:
    """Replace the marks of a checkpoint by the result of `change`, durably.

    A lock ensures that concurrent changes are not lost. If the marks are damaged, the file is
    copied to `holdfast-marks.json.damaged`. The checkpoint is then pinned, because it may have been
    pinned or held.

    Args:
        checkpoint: the folder of the checkpoint.
        change: receives the present marks, and returns the new ones.
        now_s: the time, in seconds since the Unix epoch.
        still: called while the lock is held; returns False if the step was saved again, so that the
            marks would be wrong.

    Raises:
        NotFound: the checkpoint was deleted, or `still` returns False.
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
    """Mark a checkpoint as verified, since every byte matches; remove a `damaged` mark."""
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
    """Mark a checkpoint as damaged; remove the `verified` and `healthy` marks."""
    noted = Annotation(at_s=now_s, by=by, why=why)
    return change_marks(
        checkpoint,
        lambda marks: replace(marks, verified=None, healthy=None, damaged=noted),
        now_s=now_s,
        still=still,
    )


def note_healthy(checkpoint: Path, *, by: str, now_s: float, why: str | None = None) -> Annotations:
    """Mark a checkpoint as healthy, since training from it went well, so a rollback may use it."""
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
    """Pin a checkpoint, so that Holdfast never deletes it."""
    noted = Annotation(at_s=now_s, by=by, why=why)
    return change_marks(checkpoint, lambda marks: replace(marks, pinned=noted), now_s=now_s)


def unpin(checkpoint: Path, *, now_s: float) -> Annotations:
    """Remove the pin of a checkpoint, so that the retention policy may delete it."""
    return change_marks(checkpoint, lambda marks: replace(marks, pinned=None), now_s=now_s)


def want(
    checkpoint: Path, holder: str, *, now_s: float, until_s: float | None = None
) -> Annotations:
    """Keep a checkpoint from being deleted for `holder`, until `until_s` or until `release`.

    Another call for the same holder sets a new end. Holds that have ended are removed.

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
    """Keep a checkpoint from being deleted while the block runs, but no longer than a day.

    If the hold cannot be recorded, a warning is logged, and the block runs without a hold.
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
            _logger.info(
                "%s is still marked as wanted by %s, or was deleted: %s", checkpoint, holder, error
            )


def release(checkpoint: Path, holder: str, *, now_s: float) -> Annotations:
    """Remove the hold of `holder`; the holds of others stay."""

    def without(marks: Annotations) -> Annotations:
        return replace(
            marks, wanted={name: each for name, each in marks.wanted.items() if name != holder}
        )

    return change_marks(checkpoint, without, now_s=now_s)


def inherit_claims(former: Iterable[Path], heir: Path, *, now_s: float) -> None:
    """Copy the pins and holds of replaced saves of a step to the new save.

    Marks that describe the content (verified, damaged, …) are not copied. If the marks of a
    replaced save cannot be read, the new save is pinned.

    Args:
        former: the folders of the replaced saves.
        heir: the folder of the new save.
        now_s: the time, in seconds since the Unix epoch.

    Raises:
        OSError: the marks could not be written.
    """
    found = [read_marks(path) for path in former]
    pins = [marks.pinned for marks in found if marks.pinned is not None]
    for marks in found:
        if marks.unreadable is not None:
            why = f"the marks of the replaced checkpoint cannot be read ({marks.unreadable})"
            pins.append(Annotation(at_s=now_s, by="holdfast", why=why))
    wanted = {holder: each for marks in found for holder, each in marks.wanted.items()}
    if pins or wanted:
        pinned = pins[0] if pins else None
        change_marks(heir, lambda marks: replace(marks, pinned=pinned, wanted=wanted), now_s=now_s)


class _NewerError(Exception):
    """Report marks of a newer version than this Holdfast can read."""


def _load(path: Path) -> Annotations:
    with path.open("rb") as file:
        return _parse(file.read(_MAX_BYTES + 1))


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
        # The damaged file is copied and not moved. It stays in place until it is replaced, and
        # keeps the checkpoint from being deleted until then.
        shutil.copyfile(path, path.with_name(f"{MARKS_NAME}.damaged"))
        return Annotations(
            pinned=Annotation(
                at_s=now_s, by="holdfast", why=f"its marks were damaged and are lost ({error})"
            )
        )


def _parse(data: bytes) -> Annotations:
    if len(data) > _MAX_BYTES:
        raise ValueError(f"it is larger than {_MAX_BYTES} bytes")
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


# A process holds this lock while it changes a checkpoint's annotations or deletes the checkpoint.
# Only one process at a time can hold it. The lock is on an empty file in the checkpoint's folder,
# since network file systems cannot lock folders. If the process dies, the kernel releases the lock.

LOCK_NAME = ".holdfast-marks.lock"
WAIT_S = 10.0
"""Seconds to wait for the lock; its holder writes one small file or renames one folder."""
_POLL_S = 0.01


@contextmanager
def locked(checkpoint: Path, *, wait_s: float = WAIT_S) -> Iterator[None]:
    """Hold the lock of a checkpoint inside the `with` block.

    Raises:
        NotFound: the checkpoint was deleted before the lock was acquired.
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
