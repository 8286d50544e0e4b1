"""One job's logs, read for `holdfast diagnose`: the answer, what it was drawn from, and the lines around the root."""

import io
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from holdfast.cli.progress import Progress
from holdfast.core.errors import BadUse
from holdfast.diagnose.compress import Compressed, compress
from holdfast.diagnose.conclude import conclude
from holdfast.diagnose.diagnosis import Diagnosis, LogLine
from holdfast.diagnose.explain import Explanation, explain, first_end
from holdfast.diagnose.filters import Filter
from holdfast.diagnose.lines import clean_line
from holdfast.diagnose.read import LINE_LIMIT_BYTES, STDIN, LogFile, Reading, find_files, is_flight_record, read_blocks
from holdfast.diagnose.rules import Rule, RuleSet, parse_topic
from holdfast.diagnose.scan import Event, scan

BEFORE: Final = 5
AFTER: Final = 3
"""Lines that are shown around the root."""
_NOTES_TOLD: Final = 5
_MAGIC_BYTES: Final = 4
_PACKED: Final = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is known of one job."""

    diagnosis: Diagnosis
    explanation: Explanation
    """How the rules came to it."""
    events: Sequence[Event] = ()
    files: Sequence[LogFile] = ()
    around: Sequence[tuple[int, str]] = ()
    """Numbered lines of the root's file, the root among them; empty where it was not asked for, or cannot be read
    again."""
    compressed: Compressed | None = None

    @property
    def by_rules(self) -> bool:
        """Whether the answer is that of the rules, not of a memory or a model."""
        ranked = self.explanation.ranked
        return bool(ranked) and ranked[0].first.rule.id in self.diagnosis.decided_by[:1]


class _Watched(Reading):
    """A reading that tells how far it is."""

    def __init__(self, notes: Iterable[str], told: Callable[[int], None]) -> None:
        self._told = told
        super().__init__(notes=list(notes))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "bytes_in":
            self._told(value)


def with_own_rules(rules: RuleSet, folder: Path | None) -> RuleSet:
    """`rules`, and those of the topic files in `folder`, whose examples are tried.

    Raises:
        BadUse: there is no such folder, nothing in it, or a file in it is broken; the message names file and rule.
    """
    if folder is None:
        return rules
    files = sorted(folder.glob("*.yaml")) if folder.is_dir() else []
    if not files:
        raise BadUse(f"There are no rules in {folder}. Give a folder of .yaml files as docs/diagnosis.md describes them.")
    try:
        own = [parse_topic(str(file), file.read_text("utf-8")) for file in files]
    except UnicodeDecodeError as error:
        raise BadUse(f"A file of rules in {folder} is not UTF-8 ({error}). Save it as UTF-8.") from error
    rules = RuleSet((*rules.topics, *own))
    for topic in own:
        for rule in topic.rules:
            _try_examples(rules, topic.name, rule)
    return rules


def _try_examples(rules: RuleSet, file: str, rule: Rule) -> None:
    def decides(example: str) -> str:
        found = rules.find(clean_line(example.encode(), 1).text, rule.where)
        return found[0].id if found else ""

    for example in rule.match:
        decided = decides(example)
        if decided != rule.id:
            next_step = f"rule {decided} takes it; give the file a smaller `order`" if decided else "no rule does"
            hint = "" if decided else ": mend the pattern, or add a word of the line to `hot`"
            raise BadUse(f"{file}: rule {rule.id} should match {example!r:.120}, but {next_step}{hint}.")
    for example in rule.no_match:
        if decides(example) == rule.id:
            raise BadUse(f"{file}: rule {rule.id} matches {example!r:.120}, which it should not. Mend the pattern.")


def study(
    paths: Sequence[str],
    rules: RuleSet,
    show: Progress,
    *,
    compressed: bool = False,
    filters: Sequence[Filter] = (),
) -> Study:
    """Read the logs of one job and say why it failed.

    `compressed`: also the few lines that matter, without those that `filters` know to be routine.

    Raises:
        NotFound: none of the paths exists.
        BadUse: nothing that is there can be read as a log; the message says why.
    """
    found = find_files(paths)
    if not found.files:
        why = " ".join(found.notes[:_NOTES_TOLD]) or f"There is no log in {', '.join(paths)}."
        raise BadUse(f"{why} Give a log file, or the folder of the job's logs.")
    reading = _Watched(found.notes, _shown(show, "Reading", found.files))
    events = scan(found.files, rules, reading)
    if not reading.bytes_in and all(file.path == Path(STDIN) or _size_bytes(file.path) == 0 for file in found.files):
        reading.notes.append("What was given is empty. Give the log that the job's own output went to.")
    diagnosis = replace(conclude(events), notes=tuple(dict.fromkeys(reading.notes)))
    return Study(
        diagnosis=diagnosis,
        explanation=explain(events, first_end(events)),
        events=events,
        files=found.files,
        compressed=_compressed(found.files, events, filters) if compressed else None,
    )


@contextmanager
def stdin_kept(show: Progress) -> Iterator[None]:
    """Let standard input be read more than once: what a pipe brings is kept in a temporary file."""
    source = sys.stdin.buffer
    if source.seekable() and source.tell() == 0:
        yield
        return
    with tempfile.TemporaryFile() as copy:
        while data := source.read1(1 << 20):
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
    """The lines of a file around `root`, cleaned and shortened; in bounded memory, whatever the file's size."""
    path = Path(root.file)
    if not _read_again(path):
        return []
    wanted = range(max(1, root.line - BEFORE), root.line + AFTER + 1)
    lines: dict[int, bytes] = {}
    file = LogFile(path=path, group=root.file, part=0, rank=None)
    for block, first in read_blocks(path, _Watched((), _shown(show, "Looking up the root", [file]))):
        beyond = first + block.count(b"\n")
        if beyond >= wanted.start:
            for number, raw in enumerate(block.split(b"\n"), first):
                if raw and number in wanted:
                    lines[number] = (lines.get(number, b"") + raw)[-LINE_LIMIT_BYTES:]
        if beyond > wanted.stop:
            break
    shown = {number: clean_line(_redrawn(raw), number).cited for number, raw in lines.items()}
    return sorted({**shown, root.line: root.text}.items())


def _redrawn(raw: bytes) -> bytes:
    # A progress bar redraws its line: the last state is the one that was left standing.
    return next((part for part in reversed(raw.split(b"\r")) if part.strip()), b"")


def _compressed(files: Iterable[LogFile], events: Sequence[Event], filters: Sequence[Filter]) -> Compressed:
    again = [file for file in files if _read_again(file.path) and not is_flight_record(file.path, _start(file.path))]
    if any(file.path == Path(STDIN) for file in again):
        sys.stdin.buffer.seek(0)
    return compress(again, events, filters)


def _read_again(path: Path) -> bool:
    """Whether a file can be read a second time; a pipe cannot. Standard input is where `stdin_kept` was called."""
    if path == Path(STDIN):
        if sys.stdin.buffer.seekable():
            sys.stdin.buffer.seek(0)
            return True
        return False
    return path.is_file()


def _shown(show: Progress, what: str, files: Sequence[LogFile]) -> Callable[[int], None]:
    """What tells `show` of bytes; without a total where compressed files or pipes hide it."""
    known = all(file.path.is_file() and _start(file.path)[:2] not in {magic[:2] for magic in _PACKED} for file in files)
    total = sum(_size_bytes(file.path) for file in files) if known else None

    def told(done: int) -> None:
        show(what if known else f"{what}, {done / 1e6:,.0f} MB", done, total)

    return told


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
