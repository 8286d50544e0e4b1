"""Read and write the manifest of one checkpoint: its files, their sizes and their checksums.

The manifest, `holdfast.json`, is written last, so a folder with a manifest was a complete
checkpoint when the manifest was written. The field `digest` covers all other fields, so a change of
the manifest is detected. This module needs no torch.
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
"""The versions that can be read. Version 1 has `xxh3_128`, the XXH3-128 of each file's bytes."""
DAMAGED_JSON = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
"""The exceptions that damaged or forged JSON may raise when it is parsed."""
_LAST_S = datetime(9999, 1, 1, tzinfo=UTC).timestamp()


class ManifestError(Exception):
    """Report an invalid manifest, or a file that does not match it; the message names the file."""


class UnreadError(ManifestError):
    """Report that an existing file could not be read, which may be temporary and not damage."""


def unread(name: str, error: OSError) -> ManifestError:
    """Return the error for a file that cannot be read.

    A missing file counts as damage. Any other failure may be temporary, so it is an UnreadError.
    """
    kind = (
        ManifestError if isinstance(error, FileNotFoundError | NotADirectoryError) else UnreadError
    )
    return kind(f"{name} is missing or unreadable ({error.strerror})")


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Describe one file of a checkpoint.

    Attributes:
        path: the path relative to the checkpoint's folder, with `/` as the separator.
        size_bytes: the size of the file in bytes.
        checksum: the checksum of the file, see `checksums`.
    """

    path: str
    size_bytes: int
    checksum: str


@dataclass(frozen=True, kw_only=True)
class Save:
    """Identify one save; a step that is saved twice has two saves."""

    step: int
    save: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Describe a checkpoint; this is the content of `holdfast.json`.

    Attributes:
        step: the step of the checkpoint.
        world_size: the number of ranks that saved the checkpoint.
        created_at_s: the time of the save, in seconds since the Unix epoch.
        torch: the version of PyTorch that saved the checkpoint.
        save: the id of this save of the step; empty in version 1.
        run: the id of the run that saved; empty if unknown.
        parent: the save from which training continued to this one; None if unknown.
        files: the files of the checkpoint.
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
        """Return the total size of all files in bytes, without the manifest."""
        return sum(entry.size_bytes for entry in self.files)

    @property
    def digest(self) -> str:
        """Return the XXH3-128 of `content`, which through the checksums covers every file.

        The manifest file stores this value as `digest`.
        """
        return _digest(self.content())

    def content(self) -> dict[str, Any]:
        """Return the fields of the manifest file as JSON values, without `digest`.

        `run` and `parent` are left out if unknown, as in older manifests.
        """
        unknown = {name for name in ("run", "parent") if not getattr(self, name)}
        fields = {name: value for name, value in asdict(self).items() if name not in unknown}
        return {"schema": SCHEMA, "version": VERSION, **fields}


def describe_file(folder: Path, name: str) -> FileEntry:
    """Read one file of `folder`, and return its path, size and checksum.

    Raises:
        OSError: the file cannot be read.
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
        OSError: the manifest was not written.
    """
    content = {**manifest.content(), "digest": manifest.digest}
    write_atomic(folder / MANIFEST_NAME, json.dumps(content, indent=1).encode() + b"\n")


def read_manifest(folder: Path, *, step: int) -> Manifest:
    """Read and check the manifest of `folder`, which must be a checkpoint of `step`.

    Raises:
        FileNotFoundError: there is no manifest, because the save never finished or the file was
            removed.
        ManifestError: the manifest is damaged, of another version or step, or names files outside
            of `folder`.
    """
    try:
        content = (folder / MANIFEST_NAME).read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unread(MANIFEST_NAME, error) from error
    return parse_manifest(content, step=step)


def parse_manifest(raw: bytes, *, step: int) -> Manifest:
    """Parse and check the bytes of a manifest, which must be of a checkpoint of `step`.

    Raises:
        ManifestError: see `read_manifest`.
    """
    try:
        content = json.loads(raw)
        digest = content.pop("digest")
        # The digest is checked first, because the other fields of a damaged manifest mean nothing.
        if digest != _digest(content):
            raise ManifestError(f"{MANIFEST_NAME} does not match its own digest")
        if content["schema"] != SCHEMA or content["version"] not in _READABLE:
            raise UnreadError(  # the manifest of a newer Holdfast may be valid
                f"{MANIFEST_NAME} is {content['schema']} version {content['version']}, "
                f"this Holdfast reads {SCHEMA} up to version {VERSION}"
            )
        if content["step"] != step:
            raise ManifestError(f"{MANIFEST_NAME} belongs to step {content['step']}")
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
    """Check that each file is a regular file inside `folder` with the right size.

    The files' contents are not read.

    Raises:
        ManifestError: a file is missing, has another size, or is outside `folder`; the message
            names the file.
    """
    inside = folder.resolve()
    for entry in files:
        file = folder / entry.path
        try:
            found = file.resolve(strict=True)
            size_bytes = found.stat().st_size
        except RuntimeError as error:  # how Python before 3.13 reports a link in a circle
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
    """Check every byte of `files` against its checksum.

    `progress` is called in several threads, with the number of bytes read.

    Raises:
        ManifestError: a file is damaged or missing; the message names the file.
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
    """Parse a time in seconds since the Unix epoch; reject times before 1970 or after 9999."""
    at_s = float(raw)
    if not 0 <= at_s < _LAST_S:
        raise ValueError(f"{raw!r} is not a time")
    return at_s


def _parent(raw: dict[str, Any] | None) -> Save | None:
    return None if raw is None else Save(step=int(raw["step"]), save=str(raw["save"]))


def _file_entry(raw: dict[str, Any]) -> FileEntry:
    path = PurePosixPath(raw["path"])
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in raw["path"]:
        raise ManifestError(
            f"{MANIFEST_NAME} names {raw['path']!r}, which is outside of the checkpoint"
        )
    os.fsencode(path)  # raises an error for a name that no file can have
    checksum = str(raw["checksum"]) if "checksum" in raw else whole_checksum(str(raw["xxh3_128"]))
    return FileEntry(path=str(path), size_bytes=int(raw["size_bytes"]), checksum=checksum)
