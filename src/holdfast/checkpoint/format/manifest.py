"""The manifest of one checkpoint: which files it has, how large they are, and their checksums.

`holdfast.json` is written last, so a folder that has it was complete once; its `digest` covers everything
else in it, so the manifest itself cannot change unseen. Nothing here needs torch.
"""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from holdfast.checkpoint.format.checksums import (
    check_file,
    checksum_of_digests,
    file_digests,
    whole_checksum,
)
from holdfast.core.atomic import write_atomic

MANIFEST_NAME = "holdfast.json"
SCHEMA = "holdfast.checkpoint"
VERSION = 2
_READABLE = (1, 2)
"""Version 1 knew a file by the XXH3-128 of its bytes, under `xxh3_128`; it is read, and no longer written."""
DAMAGED_JSON = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
"""What taking damaged or forged JSON apart may raise."""
_LAST_S = datetime(9999, 1, 1, tzinfo=UTC).timestamp()


class ManifestError(Exception):
    """A checkpoint's manifest or one of its files is not what it should be; the message names which."""


class UnreadError(ManifestError):
    """A file that is there could not be read, which says nothing of what it holds, and may pass."""


def unread(name: str, error: OSError) -> ManifestError:
    """What to raise where a file cannot be read: one that is missing is damage, whatever else may pass."""
    kind = (
        ManifestError if isinstance(error, FileNotFoundError | NotADirectoryError) else UnreadError
    )
    return kind(f"{name} is missing or unreadable ({error.strerror})")


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint; `path` is relative to its folder, with `/`. `checksum`: see `checksums`."""

    path: str
    size_bytes: int
    checksum: str


@dataclass(frozen=True, kw_only=True)
class Save:
    """One save of one step."""

    step: int
    save: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What `holdfast.json` says; `created_at_s` in seconds since the Unix epoch, `torch` a version.

    `save` tells this save of the step from another one; empty where the manifest is of version 1. `run` is the id of
    the run that saved it, and `parent` the save that its state descends from; empty and None where that is not known.
    """

    step: int
    world_size: int
    created_at_s: float
    torch: str
    save: str = ""
    run: str = ""
    parent: Save | None = None
    files: tuple[FileEntry, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files together, without the manifest."""
        return sum(entry.size_bytes for entry in self.files)

    @property
    def digest(self) -> str:
        """XXH3-128 of all that it says, and so of every byte: `digest` in `holdfast.json` of this version."""
        return _digest(self.content())

    def content(self) -> dict[str, Any]:
        """All that it says, as JSON; without `run` and `parent` where they are not known, as older ones are."""
        unknown = {name for name in ("run", "parent") if not getattr(self, name)}
        fields = {name: value for name, value in asdict(self).items() if name not in unknown}
        return {"schema": SCHEMA, "version": VERSION, **fields}


def describe_file(folder: Path, name: str) -> FileEntry:
    """Read one file of `folder` and say what it holds.

    Raises:
        OSError: it cannot be read.
    """
    size_bytes = (folder / name).stat().st_size
    return FileEntry(
        path=name,
        size_bytes=size_bytes,
        checksum=checksum_of_digests(file_digests(folder / name, size_bytes)),
    )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `holdfast.json` into `folder`, atomically and durably.

    Raises:
        OSError: it was not written.
    """
    content = {**manifest.content(), "digest": manifest.digest}
    write_atomic(folder / MANIFEST_NAME, json.dumps(content, indent=1).encode() + b"\n")


def read_manifest(folder: Path, *, step: int) -> Manifest:
    """Read `holdfast.json` of `folder`, which should be that of `step`.

    Raises:
        FileNotFoundError: there is none: the save never finished, or somebody removed it.
        ManifestError: it is damaged, of another version or step, or names files outside of `folder`.
    """
    try:
        content = (folder / MANIFEST_NAME).read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unread(MANIFEST_NAME, error) from error
    return parse_manifest(content, step=step)


def parse_manifest(raw: bytes, *, step: int) -> Manifest:
    """What the bytes of a manifest say, which should be that of `step`.

    Raises:
        ManifestError: as `read_manifest`.
    """
    try:
        content = json.loads(raw)
        digest = content.pop("digest")
        # The digest first: only then is what the rest says worth a message of its own.
        if digest != _digest(content):
            raise ManifestError(f"{MANIFEST_NAME} does not match its own digest")
        if content["schema"] != SCHEMA or content["version"] not in _READABLE:
            raise UnreadError(  # a newer Holdfast's may be right
                f"{MANIFEST_NAME} is {content['schema']} version {content['version']}, "
                f"this Holdfast reads {SCHEMA} up to version {VERSION}"
            )
        if content["step"] != step:
            raise ManifestError(f"{MANIFEST_NAME} is that of step {content['step']}")
        return Manifest(
            step=int(content["step"]),
            world_size=int(content["world_size"]),
            created_at_s=_time_s(content["created_at_s"]),
            torch=str(content["torch"]),
            save=str(content.get("save", "")),
            run=str(content.get("run", "")),
            parent=_parent(content.get("parent")),
            files=tuple(_file_entry(entry) for entry in content["files"]),
        )
    except DAMAGED_JSON as error:
        raise ManifestError(f"{MANIFEST_NAME} is unreadable ({error!r})") from error


def check_sizes(folder: Path, files: Iterable[FileEntry]) -> None:
    """Check that each file is a regular one inside `folder` and of its size; reads no content.

    Raises:
        ManifestError: one is not; the message names it.
    """
    inside = folder.resolve()
    for entry in files:
        file = folder / entry.path
        try:
            found = file.resolve(strict=True)
            size_bytes = found.stat().st_size
        except RuntimeError as error:  # before Python 3.13
            raise ManifestError(f"{entry.path} is a link in a circle") from error
        except OSError as error:
            raise unread(entry.path, error) from error
        if not found.is_relative_to(inside) or not found.is_file():
            raise ManifestError(f"{entry.path} leads out of the checkpoint or is no regular file")
        if size_bytes != entry.size_bytes:
            raise ManifestError(
                f"{entry.path} has {size_bytes} bytes instead of {entry.size_bytes}"
            )


def check_file_contents(
    folder: Path, files: Iterable[FileEntry], progress: Callable[[int], None] = lambda _: None
) -> None:
    """Check every byte of `files` against its checksum; `progress` is told the bytes read, from several threads.

    Raises:
        ManifestError: one differs; the message names it.
    """
    for entry in files:
        check_sizes(folder, [entry])
        try:
            right = check_file(folder / entry.path, entry.size_bytes, entry.checksum, progress)
        except OSError as error:
            raise unread(entry.path, error) from error
        except ValueError as error:
            raise ManifestError(f"{entry.path} has {error}") from error
        if not right:
            raise ManifestError(f"{entry.path} does not match its checksum")


def _digest(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return xxhash.xxh3_128(canonical).hexdigest()


def _time_s(raw: Any) -> float:
    """A time that has a date."""
    at_s = float(raw)
    if not 0 <= at_s < _LAST_S:
        raise ValueError(f"{raw!r} is no time")
    return at_s


def _parent(raw: dict[str, Any] | None) -> Save | None:
    return None if raw is None else Save(step=int(raw["step"]), save=str(raw["save"]))


def _file_entry(raw: dict[str, Any]) -> FileEntry:
    path = PurePosixPath(raw["path"])
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in raw["path"]:
        raise ManifestError(
            f"{MANIFEST_NAME} names {raw['path']!r}, which is outside of the checkpoint"
        )
    os.fsencode(path)  # raises of what no file can be called
    checksum = str(raw["checksum"]) if "checksum" in raw else whole_checksum(str(raw["xxh3_128"]))
    return FileEntry(path=str(path), size_bytes=int(raw["size_bytes"]), checksum=checksum)
