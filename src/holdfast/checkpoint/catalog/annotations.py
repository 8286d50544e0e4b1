"""What became known of a checkpoint after it was written: `holdfast-marks.json`, beside the manifest.

Verified, healthy, found damaged, pinned, wanted by whom, and its metrics. The manifest never changes; marks do, and
are no part of its digest. They advise the deletion policy and people; whether a checkpoint can be restored does not
depend on them. Marks that cannot be read count as none, and keep the checkpoint from being deleted. Needs no torch.
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
"""Where nobody is left to release it."""
_logger = logging.getLogger("holdfast")


@dataclass(frozen=True, kw_only=True)
class Annotation:
    """That something is so, since `at_s` (seconds since the Unix epoch), on the word of `by`; `why` where it says."""

    at_s: float
    by: str
    why: str | None = None


@dataclass(frozen=True, kw_only=True)
class ReadHold:
    """Somebody still needs the checkpoint: since `at_s`, until `until_s` (None: until it is released)."""

    at_s: float
    until_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Annotations:
    """The marks of one checkpoint.

    `verified`: every byte was read and was right. `healthy`: what was trained from it went well. `damaged`: a
    verification found damage, `why` says which. `pinned`: never to be deleted. `wanted`: by each holder, such as an
    evaluation. `metrics`: name to value. `unreadable`: why the file tells nothing; None where it does.
    """

    verified: Annotation | None = None
    healthy: Annotation | None = None
    damaged: Annotation | None = None
    pinned: Annotation | None = None
    wanted: Mapping[str, ReadHold] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    unreadable: str | None = None

    def wanted_by(self, now_s: float | None) -> list[str]:
        """Whose wants hold at `now_s`; where the time is None, those that have ended too."""
        return [
            holder
            for holder, want in sorted(self.wanted.items())
            if now_s is None or want.until_s is None or want.until_s > now_s
        ]

    def as_dict(self) -> dict[str, Any]:
        """As JSON has them: what is not marked is left out, a metric that is no number is text (`nan`)."""
        found = {name: value for name, value in asdict(self).items() if value}
        if self.metrics:
            found["metrics"] = {
                name: value if math.isfinite(value) else str(value)
                for name, value in self.metrics.items()
            }
        return found


def read_marks(checkpoint: Path) -> Annotations:
    """The marks of a checkpoint; where they cannot be read, none, with `unreadable` set and a warning logged."""
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
    """Replace the marks by what `change` makes of them, durably; of two writers none loses what it wrote.

    Damaged marks are put aside as `holdfast-marks.json.damaged`. What they said is not known, so the checkpoint is
    pinned in their stead. `still` is asked once nobody can save its step again: whether it is the one that is meant.

    Raises:
        NotFound: the checkpoint is gone, or is another one.
        CheckpointError: another process does not let go of the marks, or a newer Holdfast wrote them.
        OSError: they could not be written; they are as they were.
    """
    path = checkpoint / MARKS_NAME
    with locked(checkpoint):
        if not still():
            raise NotFound(
                f"{checkpoint} was saved again meanwhile. Look at the one that is there now."
            )
        marks = change(_load_or_put_aside(path, now_s))
        content = {"schema": SCHEMA, "version": VERSION, **marks.as_dict()}
        content["digest"] = _digest(content)
        write_atomic(path, json.dumps(content, indent=1, allow_nan=False).encode() + b"\n")
    return marks


def note_verified(
    checkpoint: Path, *, by: str, now_s: float, still: Callable[[], bool] = lambda: True
) -> Annotations:
    """Every byte was read and was right; an earlier finding of damage is taken back."""
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
    """A verification found damage; it is neither verified nor healthy any more."""
    noted = Annotation(at_s=now_s, by=by, why=why)
    return change_marks(
        checkpoint,
        lambda marks: replace(marks, verified=None, healthy=None, damaged=noted),
        now_s=now_s,
        still=still,
    )


def note_healthy(checkpoint: Path, *, by: str, now_s: float, why: str | None = None) -> Annotations:
    """What was trained from it went well, so that a rollback may go to it."""
    noted = Annotation(at_s=now_s, by=by, why=why)
    return change_marks(checkpoint, lambda marks: replace(marks, healthy=noted), now_s=now_s)


def note_metrics(
    checkpoint: Path,
    metrics: Mapping[str, float],
    *,
    now_s: float,
    still: Callable[[], bool] = lambda: True,
) -> Annotations:
    """What an evaluation measured; a name that was there gets its new value, the others stay."""
    values = {str(name): float(value) for name, value in metrics.items()}
    return change_marks(
        checkpoint,
        lambda marks: replace(marks, metrics={**marks.metrics, **values}),
        now_s=now_s,
        still=still,
    )


def pin(checkpoint: Path, *, by: str, now_s: float, why: str | None = None) -> Annotations:
    """From here on nothing deletes it."""
    noted = Annotation(at_s=now_s, by=by, why=why)
    return change_marks(checkpoint, lambda marks: replace(marks, pinned=noted), now_s=now_s)


def unpin(checkpoint: Path, *, now_s: float) -> Annotations:
    """The deletion policy may take it again."""
    return change_marks(checkpoint, lambda marks: replace(marks, pinned=None), now_s=now_s)


def want(
    checkpoint: Path, holder: str, *, now_s: float, until_s: float | None = None
) -> Annotations:
    """Keep it for `holder`, until `until_s` or until `release`; wanting it again replaces the time.

    Wants that have ended are forgotten.

    Raises:
        BadUse: `holder` is empty, or `until_s` no time.
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
    """Want it while the block runs, for a day at most; where that cannot be noted it is logged, and the block runs."""
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
    """`holder` does not need it any more; other holders still may."""

    def without(marks: Annotations) -> Annotations:
        return replace(
            marks, wanted={name: each for name, each in marks.wanted.items() if name != holder}
        )

    return change_marks(checkpoint, without, now_s=now_s)


def inherit_claims(former: Iterable[Path], heir: Path, *, now_s: float) -> None:
    """Give a checkpoint the pin and the wants of those of its step that it replaces.

    What was found out about their bytes is not known of its own. Marks that cannot be read pin it.

    Raises:
        OSError: they could not be written.
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
    """The marks are of a version that this Holdfast does not know."""


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
        shutil.copyfile(
            path, path.with_name(f"{MARKS_NAME}.damaged")
        )  # until there are others, these keep it
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


# The lock for changing a checkpoint's annotations, or deleting a checkpoint that has none: one process at a time. It
# locks an empty file in the checkpoint's folder, since network file systems lock no folders; the kernel releases it
# when its process dies.

LOCK_NAME = ".holdfast-marks.lock"
WAIT_S = 10.0
"""Whoever holds the lock writes one small file, or renames one folder and deletes it."""
_POLL_S = 0.01


@contextmanager
def locked(checkpoint: Path, *, wait_s: float = WAIT_S) -> Iterator[None]:
    """Hold the lock of a checkpoint, which is there and has its name once the block begins.

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
            # The one who had it before may have deleted the checkpoint, or saved its step again.
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
        except (
            OSError
        ) as error:  # a file system without locks; the write itself is still whole or absent
            _logger.debug("no lock on %s: %s", checkpoint, error)
            return
        else:
            return


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
