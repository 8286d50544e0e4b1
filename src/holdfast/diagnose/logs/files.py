"""Find log files, and read files or standard input as blocks of whole lines, in bounded memory.

An unusable file raises no error, but is listed in `Found.notes` or `Reading.notes`. Examples are
logs on a broken disk, incomplete compressed files and binary files. `find_files` raises an error
only if no path exists.
"""

import glob
import os
import re
import stat
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final

from holdfast.core.errors import NotFound

LINE_LIMIT_BYTES: Final = 16 * 1024
"""The number of bytes that are kept of a line; the rest of a longer line is skipped."""
BLOCK_BYTES: Final = 1 << 20
STDIN: Final = "-"
_FILES_LIMIT: Final = 100_000
_DEPTH_LIMIT: Final = 8
_SNIFFED_BYTES: Final = 4096
_END_BYTES: Final = 64
_PACKED_BYTES: Final = 1024
"""The number of bytes of a compressed file that are decompressed at once. It must be small, since
the text can be a thousand times as long (or 32 MiB with zstd)."""
_WINDOW_BYTES: Final = 1 << 27
_BINARY_SHARE: Final = 0.1
"""A file counts as binary if at least this share of its bytes are control characters or invalid
UTF-8.
"""
_OTHER_COMPRESSION: Final = {
    b"\xfd7zXZ\x00": "xz",
    b"BZh": "bzip2",
    b"\x04\x22\x4d\x18": "lz4",
    b"PK\x03\x04": "zip",
}

_RANK_FILE = re.compile(r"^rank[-_.]?([0-9]{1,6})\b")
_RANK_FOLDER = re.compile(r"^[0-9]{1,6}$")
_ATTEMPT_FOLDER = re.compile(r"^attempt_[0-9]+$")
_ROTATED = re.compile(r"^(.*)\.([0-9]{1,6})(?:\.gz|\.zst)?$")
_LOG_NAME = re.compile(
    r"(?i)(?:\.(?:log|out|err|txt|stdout|stderr|json|jsonl)(?:[.-][\w.-]+)?$|^(?:stdout|stderr|dmesg|syslog|messages|kern|journal|sacct|slurm-)"
    r"|(?:nccl|hccl|comm_lib)_trace|(?:^|_)trace_(?:rank_)?\d+$|\.o[0-9]+$|\.e[0-9]+$)"
)
"""Matches the names of logs in an output folder. Other files, such as weights, source code and
data, are not opened.
"""
_JSON_NAME = re.compile(r"(?i)\.jsonl?(?:\.gz|\.zst)?$")
_TEXT = bytes({7, 8, 9, 10, 12, 13, 27} | set(range(0x20, 0x100)) - {0x7F})


@dataclass(frozen=True, kw_only=True)
class LogFile:
    """One log file, or one part of a rotated log."""

    path: Path
    group: str
    """The path without the number of a rotated part. All parts with the same group are one log."""
    part: int
    """The number of the rotated part: 0 for the newest, larger for older parts."""
    rank: int | None
    """The rank that wrote the log, taken from the file name (`rank-N.log`) or from torchrun's
    folders (`attempt_0/N/stderr.log`); None if unknown."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The files of a job, with older parts of a rotated log first, and notes on unusable files."""

    files: tuple[LogFile, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Reading:
    """The progress of reading files, and notes on problems."""

    bytes_in: int = 0
    """The number of bytes read, after decompression."""
    notes: list[str] = field(default_factory=list)


def find_files(paths: Iterable[str | os.PathLike[str]]) -> Found:
    """Find the log files at `paths`.

    Args:
        paths: files, folders (searched for logs), glob patterns, or `-` for standard input.

    Raises:
        NotFound: none of the paths exists.
    """
    given = [os.fspath(path) for path in paths]
    found: dict[Path, LogFile] = {}
    notes: list[str] = []
    any_exists = False
    for name in given:
        for path in _expanded(name):
            try:
                any_exists |= name == STDIN or path.exists()
                inside = list(_walk(path, notes)) if path.is_dir() else [path]
            except OSError as error:
                any_exists = True
                notes.append(f"{path}: not readable ({error.strerror}); skipped.")
                continue
            for file in inside:
                if note := _unusable(file, named=file == path and not glob.has_magic(name)):
                    notes.append(note)
                elif (
                    len(found) < _FILES_LIMIT
                    and file.exists() | (file == Path(STDIN))
                    and not file.is_dir()
                ):
                    found.setdefault(
                        file if file == Path(STDIN) else file.resolve(), _log_file(file)
                    )
    if not any_exists:
        names = ", ".join(given) or "(no path given)"
        raise NotFound(
            f"There is no log at {names}. Give a log file, or the folder of the job's logs."
        )
    files = sorted(found.values(), key=lambda file: (file.group, -file.part))
    return Found(files=tuple(files), notes=tuple(note for note in notes if note != _SILENT))


def _expanded(name: str) -> list[Path]:
    if name == STDIN or os.path.lexists(name) or not glob.has_magic(name):
        return [Path(name)]
    # glob.glob also accepts absolute patterns
    return [Path(one) for one in sorted(glob.glob(name, recursive=True))]  # noqa: PTH207


def _walk(folder: Path, notes: list[str]) -> Iterator[Path]:
    def cannot(error: OSError) -> None:
        notes.append(f"{error.filename}: not readable ({error.strerror}); skipped.")

    for root, folders, names in os.walk(folder, onerror=cannot):
        here = Path(root)
        if len(here.relative_to(folder).parts) >= _DEPTH_LIMIT:
            folders.clear()
        folders.sort()
        yield from (here / name for name in sorted(names) if _LOG_NAME.search(name))


_SILENT: Final = " "


def _unusable(file: Path, *, named: bool) -> str:
    """Return a sentence on why a file cannot be used; an empty text if it can."""
    if file == Path(STDIN):
        return ""
    try:
        if not file.exists():
            return f"{file}: there is no such file; skipped."
        if not file.is_file():  # a pipe can be read only once
            return "" if named else _SILENT
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            start = os.pread(opened.fileno(), _SNIFFED_BYTES, 0)
            places = (
                (_SNIFFED_BYTES, size // 2),
                (_SNIFFED_BYTES, size - _SNIFFED_BYTES),
                (_END_BYTES, size - _END_BYTES),
            )
            others = [os.pread(opened.fileno(), count, at) for count, at in places if at > 0]
    except OSError as error:
        return f"{file}: not readable ({error.strerror}); skipped."
    if _compression(start) or not start or is_flight_record(file, start):
        return ""
    if _JSON_NAME.search(file.name) and not named and not is_record(start):
        return _SILENT  # JSON that is a configuration or a result, not a log
    if other := next(
        (name for magic, name in _OTHER_COMPRESSION.items() if start.startswith(magic)), None
    ):
        return f"{file}: compressed with {other}. Unpack it first; skipped."
    # After a crash or a rotation, a log may begin with NUL bytes. So the middle and the end are
    # sampled, too.
    if all(map(_strange, (start, *others))):
        return f"{file}: a binary file, not a log; skipped."
    return ""


def _strange(sample: bytes) -> bool:
    unknown = sample.decode("utf-8", "replace").count("\ufffd")
    return unknown + len(sample.translate(None, _TEXT)) > _BINARY_SHARE * len(sample)


def is_record(start: bytes) -> bool:
    """Return True if a file with the first bytes `start` is a JSON record.

    Records are `sacct --json`, torch elastic's error file, journal exports and container logs.
    """
    keys = (b'"jobs"', b'"message"', b'"MESSAGE"', b'"log"')
    return start.lstrip()[:1] in (b"{", b"[") and any(key in start for key in keys)


def is_flight_record(file: Path, start: bytes) -> bool:
    """Return True if a file is a Flight Recorder dump: a pickle with the usual name."""
    return start[:1] == b"\x80" and (
        "trace" in file.name or "nccl" in file.name or file.suffix in (".pkl", ".pickle")
    )


def rank_by_name(name: str) -> int | None:
    """Return the rank in the name of a file, such as `rank-3.log`, or of its rotated parts."""
    rank = _RANK_FILE.search(name)
    return int(rank[1]) if rank else None


def _log_file(path: Path) -> LogFile:
    rank = rank_by_name(path.name)
    parents = path.parent.name, path.parent.parent.name
    if rank is None and _RANK_FOLDER.search(parents[0]) and _ATTEMPT_FOLDER.search(parents[1]):
        rank = int(parents[0])
    rotated = _ROTATED.search(str(path))
    return LogFile(
        path=path,
        group=rotated[1] if rotated else str(path),
        part=int(rotated[2]) if rotated else 0,
        rank=rank,
    )


def read_blocks(path: Path, reading: Reading | None = None) -> Iterator[tuple[bytes, int]]:
    r"""Yield blocks of whole lines, each with the number of its first line.

    Text that is appended during the call is not read. A carriage return also ends a line, since
    progress bars are redrawn with it, but only `\n` counts in line numbers, as in editors. If the
    file becomes unreadable, no more blocks follow, and `reading` has a note.
    """
    reading = Reading() if reading is None else reading
    try:
        if path == Path(STDIN):
            raw = _chunks(sys.stdin.buffer.read, None)
            yield from _whole_lines(_unpacked_if_need_be(raw, path, reading), reading)
            return
        with path.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            regular = stat.S_ISREG(status.st_mode)
            raw = _chunks(
                lambda count: os.read(file.fileno(), count), status.st_size if regular else None
            )
            yield from _whole_lines(_unpacked_if_need_be(raw, path, reading), reading)
    except OSError as error:  # such as a broken disk: the part before the error is used
        reading.notes.append(
            f"{path}: not readable to its end ({error.strerror}); used up to that point."
        )


def _chunks(read: Callable[[int], bytes], size_bytes: int | None) -> Iterator[bytes]:
    left = sys.maxsize if size_bytes is None else size_bytes
    while left > 0 and (data := read(min(BLOCK_BYTES, left))):
        left -= len(data)
        yield data


def _compression(start: bytes) -> str:
    if start[:2] == b"\x1f\x8b":
        return "gz"
    return "zst" if start[:4] == b"\x28\xb5\x2f\xfd" else ""


def _unpacked_if_need_be(raw: Iterator[bytes], path: Path, reading: Reading) -> Iterator[bytes]:
    first = next(raw, b"")
    raw, how = chain([first], raw), _compression(first)
    if not how:
        yield from raw
        return
    try:
        yield from _unpacked(raw, _gunzip if how == "gz" else _unzstd())
    except ImportError:
        reading.notes.append(
            f"{path}: .zst needs the package zstandard. Install it: pip install 'holdfast[diagnose]'."
        )
    except (EOFError, ValueError):
        reading.notes.append(f"{path}: damaged or cut short; what could be unpacked is used.")


def _gunzip() -> Any:
    return zlib.decompressobj(zlib.MAX_WBITS | 16)


def _unzstd() -> Callable[[], Any]:
    import zstandard

    return lambda: zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).decompressobj()


def _unpacked(raw: Iterator[bytes], begin: Callable[[], Any]) -> Iterator[bytes]:
    """Decompress a file that may consist of several members, since log rotation appends members.

    All text before an error is yielded before the error is raised.

    Raises:
        EOFError: the last member of the file is incomplete.
        ValueError: the data are damaged.
    """
    stream, within = begin(), False
    text = bytearray()
    try:
        for chunk in raw:
            for at in range(0, len(chunk), _PACKED_BYTES):
                data = chunk[at : at + _PACKED_BYTES]
                while data:
                    text += _decompressed(stream, data)
                    within, data = not stream.eof, b""
                    if stream.eof:
                        data, stream = stream.unused_data, begin()
                while len(text) >= BLOCK_BYTES:
                    yield bytes(text[:BLOCK_BYTES])
                    del text[:BLOCK_BYTES]
    except ValueError:
        yield bytes(text)
        raise
    yield bytes(text)
    if within:
        raise EOFError


def _decompressed(stream: Any, data: bytes) -> bytes:
    try:
        found: bytes = stream.decompress(data)
    except Exception as error:  # the errors of zlib and zstandard
        raise ValueError(str(error)) from error
    return found


def _whole_lines(chunks: Iterable[bytes], reading: Reading) -> Iterator[tuple[bytes, int]]:
    number = 1
    carry = b""
    cutting = False  # the incomplete line has reached its limit: skip to its end
    for chunk in chunks:
        data = chunk
        reading.bytes_in += len(data)
        if cutting:
            ends = [end for end in (data.find(b"\n"), data.find(b"\r")) if end >= 0]
            if not ends:
                continue
            data, cutting = data[min(ends) :], False
        data = carry + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        block, carry = data[:end], data[end:]
        if len(carry) > LINE_LIMIT_BYTES:
            carry, cutting = carry[:LINE_LIMIT_BYTES], True
        if block:
            yield block, number
            number += block.count(b"\n")
    if carry:
        yield carry, number
