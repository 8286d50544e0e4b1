"""Convert structured files to lines: JSON of Slurm and torch elastic, and Flight Recorder dumps.

A generated line states the content of a record in plain words, so that rules can match it. Its line
number is the line of the record in the file, or 0 if there is none.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from holdfast.diagnose.logs.files import LogFile, Reading, is_flight_record, is_record
from holdfast.diagnose.logs.flight_recorder import flight_lines

_RECORD_LIMIT_BYTES: Final = 8 << 20
"""The size in bytes of the largest JSON file that is parsed; larger files are read as text."""
_TEXT_KEYS: Final = (
    "MESSAGE",
    "log",
    "message",
    "msg",
    "exc_info",
    "exception",
    "stack_trace",
    "stack",
)
"""The keys that JSON loggers use for the message and its traceback."""
_TEXT_KEYS_AS_JSON: Final = tuple(f'"{key}"'.encode() for key in _TEXT_KEYS)
_JSON_BEGINNINGS: Final = (b"\n{", b' {"', b']{"', b':{"')
_PREFIX_BYTES: Final = 160
"""The JSON in a line must begin within this number of bytes."""
_LEVELS: Final = {"error": "ERROR"} | dict.fromkeys(
    ("fatal", "critical", "panic", "emerg", "emergency"), "FATAL"
)


class RecordLine(NamedTuple):
    """A generated line, its line number in the file, and the rank that it is about."""

    number: int
    text: str
    rank: int | None = None


def record_lines(
    files: Iterable[LogFile], reading: Reading
) -> tuple[dict[Path, list[RecordLine]], list[LogFile]]:
    """Convert the record files among `files`; return their lines by file, and the other files."""
    records: dict[Path, list[RecordLine]] = {}
    dumps: list[Path] = []
    logs: list[LogFile] = []
    for file in files:
        start = _start_of(file.path)
        if is_flight_record(file.path, start):
            dumps.append(file.path)
        elif is_record(start) and (lines := _json_lines(file)) is not None:
            records[file.path] = lines
        else:
            logs.append(file)
    for path, statements in flight_lines(dumps, reading).items():
        records[path] = [RecordLine(0, text, rank) for rank, text in statements]
    return records, logs


def _start_of(path: Path) -> bytes:
    try:
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            return file.read(4096)
    except OSError:
        return b""


def _json_lines(file: LogFile) -> list[RecordLine] | None:
    """Convert a file that is one JSON record to lines; return None if the file is plain text."""
    try:
        if file.path.stat().st_size > _RECORD_LIMIT_BYTES:
            return None
        text = file.path.read_text("utf-8", "replace")
    except OSError:
        return None
    record = _parsed(text)
    if isinstance(record, dict) and isinstance(record.get("jobs"), list):
        return list(_slurm_lines(record["jobs"], text))
    if isinstance(record, dict) and isinstance(record.get("message"), dict):
        return list(_elastic_lines(record["message"], file.rank))
    return None


def _parsed(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def plain_text(block: bytes) -> bytes:
    r"""Convert lines of JSON in a block to plain text.

    Container logs, journals and JSON loggers write such lines. A message of several lines becomes
    one line with `\\r` between its parts, so that line numbers stay the same.
    """
    if not block.startswith(b"{") and not any(begin in block for begin in _JSON_BEGINNINGS):
        return block
    return b"\n".join(_as_text(line) for line in block.split(b"\n"))


def _as_text(line: bytes) -> bytes:
    """Convert a line of JSON to its message, after the line's prefix; return other lines unchanged."""
    start = line.find(b'{"', 0, _PREFIX_BYTES)
    if start < 0 or not line.endswith((b"}", b"}\r")):
        return line
    parsed = _unpacked(line[start:])
    if parsed is None:
        return line
    return parsed if start == 0 else b"\r".join(line[:start] + one for one in parsed.split(b"\r"))


def _unpacked(line: bytes) -> bytes | None:
    if not any(key in line for key in _TEXT_KEYS_AS_JSON):
        return None
    entry = _parsed(line)
    if not isinstance(entry, dict):
        return None
    found: list[str] = []
    for key in _TEXT_KEYS:
        message = entry.get(key)
        if isinstance(message, list):  # how journald writes binary data
            octets = bytes(one for one in message if isinstance(one, int) and 0 <= one < 256)
            message = octets.decode("utf-8", "replace")
        if isinstance(message, str):
            found += message.rstrip("\n").split("\n")
    if not found:
        return None
    if level := _LEVELS.get(str(entry.get("level", entry.get("severity", ""))).lower()):
        # The traceback becomes a separate line, so that rules match the words of the message
        # unchanged.
        found.append(f"{level}: {found[0]}")
    # The result has the form of syslog, whose prefix is in `dialects.yaml`.
    if isinstance(host := entry.get("_HOSTNAME"), str) and host:
        by = "kernel" if entry.get("_TRANSPORT") == "kernel" else "journal[0]"
        found = [f"Jan  1 00:00:00 {host} {by}: {one}" for one in found]
    rank = entry.get("rank")
    if isinstance(rank, int) and rank >= 0:
        found = [f"[rank{rank}]: {one}" for one in found]
    return "\r".join(found).encode("utf-8", "replace")


def _slurm_lines(jobs: list[Any], text: str) -> Iterator[RecordLine]:
    """Convert the output of `sacct --json` to lines on the ends of jobs and of job steps.

    The formats of Slurm 20.11 to 24.05 are supported.
    """
    at = 0
    for job in jobs:
        parts = [job, *(job.get("steps") or [])] if isinstance(job, dict) else []
        for part in parts:
            states = _states(part.get("state")) if isinstance(part, dict) else set()
            if not states or states & {"RUNNING", "PENDING"}:
                continue
            if "COMPLETED" in states and part is not job:
                continue
            place = text.find(f'"{min(states)}"', at)
            at = place + 1 if place >= 0 else at
            name = job.get("job_id") if part is job else _of(part.get("step"), "id")
            statement = f"slurm: job {_of(name, 'job_id') or name} state={'+'.join(sorted(states))}"
            if code := part.get("exit_code"):
                signal = _of(code, "signal")
                statement += f" exit_code={_number(_of(code, 'return_code'))}:{_number(_of(signal, 'id', 'signal_id'))}"
            statement += f" nodes={_hosts(part.get('nodes'))}"
            if failed := part.get("failed_node"):
                statement += f" failed_node={failed}"
            yield RecordLine(text.count("\n", 0, at) + 1, statement)


def _of(given: Any, *keys: str) -> Any:
    return (
        next((given[key] for key in keys if given.get(key) is not None), None)
        if isinstance(given, dict)
        else None
    )


def _states(given: Any) -> set[str]:
    current = given.get("current") if isinstance(given, dict) else given
    return {str(one) for one in (current if isinstance(current, list) else [current]) if one}


def _hosts(given: Any) -> str:
    listed = _of(given, "list") if isinstance(given, dict) else given
    if listed is None:  # a job step in Slurm 22.05 or older
        listed = _of(given, "range")
    return ",".join(map(str, listed)) if isinstance(listed, list) else str(listed or "")


def _number(given: Any) -> Any:
    return (_of(given, "number") if isinstance(given, dict) else given) or 0


def _elastic_lines(message: dict[str, Any], rank: int | None) -> Iterator[RecordLine]:
    """Convert torch elastic's error file to lines: the exception and its call stack."""
    stack = _of(message.get("extraInfo"), "py_callstack")
    message_text = stack if isinstance(stack, str) else message.get("message", "")
    for line in str(message_text).split("\n"):
        yield RecordLine(1, line, rank)
