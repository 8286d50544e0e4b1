"""An incident as learning sees it: the right reason, the lines that state the root, and the lines that were kept."""

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
"""Lines about a root that are kept: most tracebacks are shorter."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """An incident that a person confirmed or corrected. Plain data: no ledger, no files."""

    key: str
    """How people name it: `7`, an incident of a run; `m3`, one without a run."""
    reason: str
    """The right one."""
    roots: tuple[str, ...]
    """Lines that state the root, without their prefixes; the first is the one that is sure."""
    lines: tuple[Kept, ...] = ()
    """The compressed log, in the order of the files."""
    action: str = ""
    """What helped, where a person said so."""
    texts: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """The kept lines without their prefixes: what rules meet."""

    def __post_init__(self) -> None:
        """Clean the kept lines once."""
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
        """The case of the one job behind `path`; without `root_lines`, what the rules hold for its root.

        `root_lines` are numbers of lines, 1-based, of the only file at `path`.

        Raises:
            NotFound: there is nothing at `path`.
        """
        files = find_files([path]).files
        events = scan(files, rules)
        numbers = list(dict.fromkeys(root_lines))[: 4 * ROOTS_LIMIT]
        said = _lines_at(files[0].path, numbers) if numbers and files else []
        cited = conclude(events).root_lines
        if numbers:
            cited = tuple(
                LogLine(file=str(files[0].path), line=number, text=text) for number, text in said
            )
        kept = kept_with(cited, compress(files, events).lines)
        roots = distinct(clean_line(line.text.encode(), line.line).text.strip() for line in cited)
        return cls(key=key, reason=reason, roots=roots, lines=kept, action=action)

    def replay(self, rules: RuleSet) -> Diagnosis:
        """What `rules` say of the kept lines."""
        return conclude(events_of(self.lines, rules))


def events_of(lines: Sequence[Kept], rules: RuleSet) -> list[Event]:
    """The events of kept lines, read as the logs that they are of; their numbers are those among the kept lines."""
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
    """The first `ROOTS_LIMIT` different lines, shortened."""
    return tuple(dict.fromkeys(root[:ROOT_CHARACTERS] for root in roots if root.strip()))[
        :ROOTS_LIMIT
    ]


def kept_with(roots: Iterable[LogLine], kept: Iterable[Kept]) -> tuple[Kept, ...]:
    """`kept` and, while `MEMORY_LIMIT_BYTES` last, the lines about each root: a traceback is read as one only whole.

    Files that cannot be read again add nothing.
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
    """The line of a file, 1-based; None where there is none, or no such file."""
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
