"""Define a case, which is an incident as data for learning rules."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from holdfast.core.ledger.records import MEMORY_LIMIT_BYTES
from holdfast.diagnose.explain.answer import conclude
from holdfast.diagnose.explain.compress import Kept, compress
from holdfast.diagnose.explain.diagnosis import Diagnosis, LogLine
from holdfast.diagnose.explain.scan import Event, Scan, scan
from holdfast.diagnose.logs.files import LogFile, find_files, rank_by_name, read_blocks
from holdfast.diagnose.logs.lines import clean_line
from holdfast.diagnose.rules.rules import RuleSet

ROOTS_LIMIT: Final = 8
ROOT_CHARACTERS: Final = 1000
_BEFORE: Final = 40
_AFTER: Final = 3
"""The number of lines that are kept before and after a root; most tracebacks are shorter."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """An incident whose diagnosis a person confirmed or corrected. It needs no ledger and no files."""

    key: str
    """The name of the incident for people: `7` for an incident of a run, `m3` for one without a
    run.
    """
    reason: str
    """The correct reason."""
    roots: tuple[str, ...]
    """Lines, without prefixes, that state the root. Only the first line is certain to do so."""
    lines: tuple[Kept, ...] = ()
    """The lines of the compressed log, in the order of the files."""
    action: str = ""
    """The action that helped, if a person named one."""
    texts: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """The kept lines without their prefixes, as rules match them."""

    def __post_init__(self) -> None:
        """Remove the prefixes of the kept lines, once for all uses."""
        cleaned = (
            clean_line(one.text.encode("utf-8", "replace"), one.line).text for one in self.lines
        )
        object.__setattr__(self, "texts", tuple(cleaned))

    @classmethod
    def of_log(
        cls,
        path: str | os.PathLike[str],
        *,
        reason: str,
        rules: RuleSet,
        root_lines: Iterable[int] = (),
        key: str = "1",
        action: str = "",
    ) -> Self:
        """Make a case from the log of a job and its correct reason.

        Args:
            path: the log or the folder of the job.
            reason: the correct reason.
            rules: the rules with which the log is scanned.
            root_lines: the numbers, from 1, of the lines that state the root, in the only file at
                `path`. If they are not given, the rules find the root.
            key: the name of the incident.
            action: the action that helped.

        Raises:
            NotFound: `path` does not exist.
        """
        files = find_files([path]).files
        events = scan(files, rules)
        numbers = list(dict.fromkeys(root_lines))[: 4 * ROOTS_LIMIT]
        lines = _lines_at(files[0].path, numbers) if numbers and files else []
        cited = conclude(events).root_lines
        if numbers:
            cited = tuple(
                LogLine(file=str(files[0].path), line=number, text=text) for number, text in lines
            )
        kept = kept_with(cited, compress(files, events).lines)
        roots = distinct(clean_line(line.text.encode(), line.line).text.strip() for line in cited)
        return cls(key=key, reason=reason, roots=roots, lines=kept, action=action)

    def replay(self, rules: RuleSet) -> Diagnosis:
        """Return the diagnosis that follows from `rules` and the kept lines."""
        return conclude(events_of(self.lines, rules))


def events_of(lines: Sequence[Kept], rules: RuleSet) -> list[Event]:
    """Scan kept lines; return their events. Line numbers count the kept lines of a file."""
    by_file: dict[str, list[Kept]] = {}
    for one in lines:
        by_file.setdefault(one.file, []).append(one)
    found = Scan(rules)
    for name, kept in by_file.items():
        file = LogFile(path=Path(name), group=name, part=0, rank=rank_by_name(Path(name).name))
        text = "\n".join(one.text.replace("\n", " ") for one in kept)
        found.block(file, text.encode("utf-8", "replace"), 1)
    return found.events()


def distinct(roots: Iterable[str]) -> tuple[str, ...]:
    """Return the first `ROOTS_LIMIT` different lines of `roots`, shortened."""
    return tuple(dict.fromkeys(root[:ROOT_CHARACTERS] for root in roots if root.strip()))[
        :ROOTS_LIMIT
    ]


def kept_with(roots: Iterable[LogLine], kept: Iterable[Kept]) -> tuple[Kept, ...]:
    """Return `kept` and the lines around each root, up to `MEMORY_LIMIT_BYTES`.

    The lines around a root are needed since only a complete traceback can be recognised. If a file
    cannot be read again, no lines are added.
    """
    found: dict[tuple[str, int], Kept] = {}
    left = MEMORY_LIMIT_BYTES
    cited = list(roots)
    stated = [
        Kept(file=one.file, line=one.line, text=one.text[:ROOT_CHARACTERS])
        for one in cited
        if one.line
    ]
    for one in (*stated, *kept, *(near for root in cited for near in _about(root))):
        left -= 0 if (one.file, one.line) in found else len(one.text.encode("utf-8", "replace"))
        if left < 0:
            break
        found.setdefault((one.file, one.line), one)
    return tuple(sorted(found.values(), key=lambda one: (one.file, one.line)))


def line_at(path: Path, number: int) -> str | None:
    """Return a line of a file by its 1-based number; None if there is no such line."""
    found = _lines_at(path, [number]) if path.is_file() else []
    return found[0][1] if found else None


def _about(root: LogLine) -> Iterator[Kept]:
    path = Path(root.file)
    if root.line < 1 or not path.is_file():
        return
    numbers = range(max(1, root.line - _BEFORE), root.line + _AFTER + 1)
    for number, text in reversed(_lines_at(path, numbers)):
        yield Kept(file=root.file, line=number, text=text[:ROOT_CHARACTERS])


def _lines_at(path: Path, numbers: Sequence[int]) -> list[tuple[int, str]]:
    wanted, found, last = set(numbers), {}, max(numbers)
    for block, first in read_blocks(path):
        for number, raw in enumerate(block.split(b"\n"), first):
            if number in wanted and raw:
                found[number] = raw.decode("utf-8", "replace")
        if first + block.count(b"\n") > last:
            break
    return [(number, found[number]) for number in numbers if number in found]
