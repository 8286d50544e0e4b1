"""Study one job's logs: make the diagnosis, and collect the material that explains it."""

import io
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from holdfast.core.errors import BadUse
from holdfast.core.words import clean, shorten
from holdfast.diagnose.explain.answer import conclude
from holdfast.diagnose.explain.compress import Compressed, compress
from holdfast.diagnose.explain.diagnosis import Diagnosis, LogLine
from holdfast.diagnose.explain.explain import Explanation, explain, first_end
from holdfast.diagnose.explain.scan import Event, scan
from holdfast.diagnose.logs.files import (
    LINE_LIMIT_BYTES,
    STDIN,
    LogFile,
    Reading,
    find_files,
    is_flight_record,
    read_blocks,
)
from holdfast.diagnose.logs.filters import Filter
from holdfast.diagnose.logs.lines import CITED_LIMIT, clean_line
from holdfast.diagnose.rules.rules import RuleSet

Progress = Callable[[str, float, float | None], None]
"""A function that shows progress, called as `progress(task, done, total)`; `total` is None if it is
unknown.
"""

BEFORE: Final = 5
AFTER: Final = 3
"""The numbers of lines that are shown before and after the root."""
_NOTES_TOLD: Final = 5
_MAGIC_BYTES: Final = 4
_PACKED: Final = (b"\x1f\x8b", b"\x28\xb5")
"""The first bytes of gzip and zstd files."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """The results of studying one job."""

    diagnosis: Diagnosis
    explanation: Explanation
    """The explanation from which the rules chose the root."""
    files: Sequence[LogFile] = ()
    bytes_in: int = 0
    """The number of bytes of text that were read."""
    around: Sequence[tuple[int, str]] = ()
    """Numbered lines around the root in its file; empty if they were not requested, or if the file
    cannot be read again."""
    compressed: Compressed | None = None

    @property
    def by_rules(self) -> bool:
        """True if the answer comes from the rules, and not from the memory or a model."""
        ranked = self.explanation.ranked
        return bool(ranked) and ranked[0].first.rule.id in self.diagnosis.decided_by[:1]


class _Watched(Reading):
    """A `Reading` that reports its progress."""

    def __init__(self, notes: Iterable[str], on_progress: Callable[[int], None]) -> None:
        self._on_progress = on_progress
        super().__init__(notes=list(notes))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "bytes_in":
            self._on_progress(value)


def with_own_rules(rules: RuleSet, folder: Path | None) -> RuleSet:
    """Add the topic files in `folder` to `rules`, after testing their examples.

    Raises:
        BadUse: the folder does not exist or is empty, or a file is broken; the message names the
            file and the rule.
    """
    if folder is None:
        return rules
    from holdfast.diagnose.memory.own_rules import faults_of, read_topic

    files = sorted(folder.glob("*.yaml")) if folder.is_dir() else []
    if not files:
        raise BadUse(
            f"There are no rules in {folder}. Give a folder of .yaml files as in docs/diagnosis.md."
        )
    own = [read_topic(file) for file in files]
    for topic in own:
        for fault in faults_of(topic, own):
            raise BadUse(f"{topic.name}: {fault}")
    return RuleSet((*rules.topics, *own))


def study(
    paths: Sequence[str],
    rules: RuleSet,
    show: Progress,
    *,
    compressed: bool = False,
    filters: Sequence[Filter] = (),
) -> Study:
    """Read the logs of one job and diagnose why the job failed.

    Args:
        paths: files and folders of the job's logs.
        rules: the rules to apply.
        show: called to show the progress.
        compressed: True to also compress the log to the few lines that matter.
        filters: filters for routine lines, which the compressed log leaves out.

    Raises:
        NotFound: none of the paths exists.
        BadUse: no file can be read as a log, or all files are empty; the message states why.
    """
    found = find_files(paths)
    if not found.files:
        why = " ".join(found.notes[:_NOTES_TOLD]) or f"There is no log in {', '.join(paths)}."
        raise BadUse(f"{why} Give a log file, or the folder of the job's logs.")
    reading = _Watched(found.notes, _on_progress(show, "Reading", found.files))
    events = scan(found.files, rules, reading)
    if not reading.bytes_in and all(
        file.path == Path(STDIN) or _size_bytes(file.path) == 0 for file in found.files
    ):
        raise BadUse(f"{_names(paths)} empty. Give the log that the job's own output went to.")
    diagnosis = replace(conclude(events), notes=tuple(dict.fromkeys(reading.notes)))
    if compressed:
        show("Compressing", 0, None)
    return Study(
        diagnosis=diagnosis,
        explanation=explain(events, first_end(events)),
        files=found.files,
        bytes_in=reading.bytes_in,
        compressed=_compressed(found.files, events, filters) if compressed else None,
    )


def _names(paths: Sequence[str]) -> str:
    """Return the paths as the subject of a sentence, together with "has" or "have"."""
    named = ["Standard input" if path == STDIN else path for path in paths]
    return f"{', '.join(named)} {'is' if len(named) == 1 else 'are'}"


@contextmanager
def stdin_kept(show: Progress) -> Iterator[None]:
    """Copy a pipe on standard input to a temporary file, so that it can be read more than once."""
    source = sys.stdin.buffer
    if source.seekable() and source.tell() == 0:
        yield
        return
    with tempfile.TemporaryFile() as copy:
        while data := source.read(1 << 20):
            copy.write(data)
            show("Reading standard input", copy.tell(), None)
        copy.seek(0)
        kept = io.TextIOWrapper(copy)
        before, sys.stdin = sys.stdin, kept
        try:
            yield
        finally:
            sys.stdin = before
            kept.detach()


def surroundings(root: LogLine, show: Progress) -> list[tuple[int, str]]:
    """Return the lines around `root` in its file, cleaned and shortened.

    Memory is bounded for files of any size.
    """
    path = Path(root.file)
    if not _read_again(path):
        return []
    wanted = range(max(1, root.line - BEFORE), root.line + AFTER + 1)
    lines: dict[int, bytes] = {}
    stating: bytes | None = None
    file = LogFile(path=path, group=root.file, part=0, rank=None)
    for block, first in read_blocks(
        path, _Watched((), _on_progress(show, "Looking up the root", [file]))
    ):
        beyond = first + block.count(b"\n")
        for number, raw in enumerate(block.split(b"\n"), first) if beyond >= wanted.start else ():
            # Show the last state of a line that was redrawn. For the root, show the state that the
            # scan read.
            for part in raw.split(b"\r") if number in wanted else ():
                if part.strip():
                    lines[number] = part[:LINE_LIMIT_BYTES]
                    if number == root.line and clean_line(lines[number], number).cited == root.text:
                        stating = lines[number]
        if beyond > wanted.stop:
            break
    if stating is None:  # the root is in a structured record, or the file has changed since
        return []
    return [
        (number, _readable(raw)) for number, raw in sorted({**lines, root.line: stating}.items())
    ]


def _readable(raw: bytes) -> str:
    """Clean a line for people, and keep its indentation."""
    return shorten(clean(raw.decode("utf-8", "replace")).rstrip(), CITED_LIMIT)


def _compressed(
    files: Iterable[LogFile], events: Sequence[Event], filters: Sequence[Filter]
) -> Compressed:
    again = [
        file
        for file in files
        if _read_again(file.path) and not is_flight_record(file.path, _start(file.path))
    ]
    return compress(again, events, filters)


def _read_again(path: Path) -> bool:
    """Return True if a file can be read again, which includes standard input within `stdin_kept`."""
    if path == Path(STDIN):
        if sys.stdin.buffer.seekable():
            sys.stdin.buffer.seek(0)
            return True
        return False
    return path.is_file()


def _on_progress(show: Progress, what: str, files: Sequence[LogFile]) -> Callable[[int], None]:
    """Return a callback that shows the number of bytes read.

    The total is known only if no file is compressed or a pipe.
    """
    known = all(file.path.is_file() and _start(file.path)[:2] not in _PACKED for file in files)
    total = sum(_size_bytes(file.path) for file in files) if known else None

    def on_progress(done: int) -> None:
        show(what if known else f"{what}, {done / 1e6:,.0f} MB", done, total)

    return on_progress


def _start(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MAGIC_BYTES)
    except OSError:
        return b""


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
