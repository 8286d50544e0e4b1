"""Files that are not lines of text (Slurm's and torch elastic's JSON, Flight Recorder dumps) to lines with a place.

A line that is made here says in plain words what the record says, so that the same rules read it; its number is that
of the line of the file that holds it, and 0 where the file has none.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from holdfast.diagnose.flight_recorder import flight_lines
from holdfast.diagnose.read import LogFile, Reading, is_flight_record, is_record

_RECORD_LIMIT_BYTES: Final = 64 << 20
"""A larger JSON file is read as text."""
_TEXT_KEYS: Final = ("MESSAGE", "log", "message", "msg", "exc_info", "exception", "stack_trace", "stack")
"""Where JSON loggers put what was said, and the traceback that belongs to it."""


class RecordLine(NamedTuple):
    """A line and where it stands."""

    number: int
    text: str
    rank: int | None = None


def record_lines(files: Iterable[LogFile], reading: Reading) -> tuple[dict[Path, list[RecordLine]], list[LogFile]]:
    """What the records among `files` say, by file, and the files that are plain logs."""
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
    for path, said in flight_lines(dumps, reading).items():
        records[path] = [RecordLine(0, text, rank) for rank, text in said]
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
    """What a file of JSON says; None where it is no record, and to be read as text."""
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
    return _lines_of_json(text, file.rank)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _lines_of_json(text: str, rank: int | None) -> list[RecordLine] | None:
    """A JSON object a line (`journalctl -o json`, containers' logs, JSON loggers); None where most lines are none."""
    found: list[RecordLine] = []
    lines, objects = text.splitlines(), 0
    for number, line in enumerate(lines, 1):
        entry = _parsed(line) if line.startswith("{") else None
        said = list(_said(entry)) if isinstance(entry, dict) else []
        objects += bool(said)
        found += [RecordLine(number, one, rank) for one in said or [line]]
    return found if 2 * objects > len(lines) else None


def _said(entry: dict[str, Any]) -> Iterator[str]:
    host = entry.get("_HOSTNAME")
    kernel = entry.get("_TRANSPORT") == "kernel"
    # As syslog would have it: the dialects know its prefix.
    prefix = f"Jan  1 00:00:00 {host} {'kernel' if kernel else 'journal'}: " if isinstance(host, str) and host else ""
    for key in _TEXT_KEYS:
        message = entry.get(key)
        if isinstance(message, list):  # journald's form of what is not text
            octets = bytes(one for one in message if isinstance(one, int) and 0 <= one < 256)
            message = octets.decode("utf-8", "replace")
        if isinstance(message, str):
            yield from (prefix + line for line in message.splitlines())


def _slurm_lines(jobs: list[Any], text: str) -> Iterator[RecordLine]:
    """`sacct --json`: how a job and its steps ended. Fields differ between Slurm 20.11 and 24.05; all are known."""
    at = 0
    for job in jobs:
        parts = [job, *(job.get("steps") or [])] if isinstance(job, dict) else []
        for part in parts:
            states = _states(part.get("state")) if isinstance(part, dict) else set()
            if not states or states & {"COMPLETED", "RUNNING", "PENDING"}:
                continue
            place = text.find(f'"{min(states)}"', at)
            at = place + 1 if place >= 0 else at
            name = job.get("job_id") if part is job else _of(part.get("step"), "id")
            said = f"slurm: job {_of(name, 'job_id') or name} state={'+'.join(sorted(states))}"
            if code := part.get("exit_code"):
                signal = _of(code, "signal")
                said += f" exit_code={_number(_of(code, 'return_code'))}:{_number(_of(signal, 'id', 'signal_id'))}"
            said += f" nodes={_hosts(part.get('nodes'))}"
            if failed := part.get("failed_node"):
                said += f" failed_node={failed}"
            yield RecordLine(text.count("\n", 0, at) + 1, said)


def _of(given: Any, *keys: str) -> Any:
    return next((given[key] for key in keys if given.get(key) is not None), None) if isinstance(given, dict) else None


def _states(given: Any) -> set[str]:
    current = given.get("current") if isinstance(given, dict) else given
    return {str(one) for one in (current if isinstance(current, list) else [current]) if one}


def _hosts(given: Any) -> str:
    listed = _of(given, "list") if isinstance(given, dict) else given
    return ",".join(map(str, listed)) if isinstance(listed, list) else str(listed or "")


def _number(given: Any) -> Any:
    return (_of(given, "number") if isinstance(given, dict) else given) or 0


def _elastic_lines(message: dict[str, Any], rank: int | None) -> Iterator[RecordLine]:
    """Torch elastic's error file: the exception of the rank that wrote it, with its call stack."""
    stack = _of(message.get("extraInfo"), "py_callstack")
    said = stack if isinstance(stack, str) else message.get("message", "")
    for line in str(said).splitlines():
        yield RecordLine(1, line, rank)
