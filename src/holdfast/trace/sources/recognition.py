"""Find the adapter of each file, and the files of each path that the user gave."""

import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from holdfast.core.errors import BadUse, NotFound
from holdfast.core.words import plainly
from holdfast.trace.errors import BadTrace
from holdfast.trace.notes import Note
from holdfast.trace.sources import adapters
from holdfast.trace.sources.findings import MAX_EXAMPLES
from holdfast.trace.sources.guesses import UNKNOWN_FORM, guess_of, next_step_for
from holdfast.trace.sources.plain_text import opened
from holdfast.trace.sources.reading import Source

_URL: Final = re.compile(r"[a-z][a-z0-9+]*://")
_NAME: Final = re.compile(r"[\w.:+-]+( [\w.:+-]+)*")


@dataclass(frozen=True, kw_only=True)
class Input:
    """A file or folder that the user gave, or a file inside such a folder."""

    path: Path
    name: str = ""
    """Name for the cluster; if empty, the cluster has the name that the source gives."""
    compared: bool = False
    """True if the cluster serves only for comparison."""
    url: str = ""
    """URL of a ledger that is not a file; `path` is unused in this case."""

    @classmethod
    def of(cls, path: str | Path, name: str = "") -> "Input":
        """Parse `NAME=PATH`, a path (which may contain `=`), or the URL of a ledger.

        Raises:
            NotFound: there is no such path.
            BadUse: NAME is not a valid name.
        """
        text = str(path)
        before, equals, after = text.partition("=")
        if (
            isinstance(path, str)
            and equals
            and not name
            and not Path(text).exists()
            and not _URL.match(text)
        ):
            name, text = before, after
            if not _NAME.fullmatch(name):
                raise BadUse(
                    f"{name!r} is no name of a cluster. Give NAME=PATH, NAME of letters, digits, - "
                    "and _."
                )
        if _URL.match(text):
            return cls(path=Path(text), name=name, url=text)
        if not text or not Path(text).exists():
            raise NotFound(f"There is no file or folder {text!r}. Check the path.")
        return cls(path=Path(text), name=name)


def named_source(name: str) -> Source:
    """Return the adapter with the given name.

    Raises:
        BadUse: there is no such adapter; the message lists all names.
    """
    for source in adapters():
        if source.name == name:
            return source
    raise BadUse(
        f"There is no format {name!r}. Known are {', '.join(source.name for source in adapters())}."
    )


def recognised(
    given: Input, chosen: Source | None, passed_over: list[Path]
) -> Iterator[tuple[Input, Source]]:
    """Yield the files of an input, each with its adapter.

    The files of a folder are sorted by name. Files in a folder that no adapter recognises are added
    to `passed_over`.

    Raises:
        BadTrace: no adapter recognises the given file, or none recognises any file in the folder.
    """
    if given.url:
        yield given, _ledger_at(given.url)
        return
    if not given.path.is_dir() and not given.path.is_file():
        raise BadTrace(
            given.path,
            "A pipe or device cannot be read, since records are read more than once.",
            next_step="Write the records to a file first, and give that.",
        )
    if source := _source_of(given.path, chosen, forced=given.path.is_file()):
        yield given, source
        return
    if given.path.is_file():
        raise _unknown(given.path)
    found = False
    for path in sorted(given.path.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(given.path).parts)
        if not path.is_file() or hidden:
            continue
        if source := _source_of(path, chosen, forced=False):
            found = True
            yield replace(given, path=path), source
        else:
            passed_over.append(path)
    if not found:
        if (
            next(given.path.iterdir(), None) is None
        ):  # Raises OSError if the folder is not readable.
            raise BadTrace(
                given.path,
                "The folder is empty.",
                next_step="Give one that holds job records, or a file.",
            )
        raise BadTrace(
            given.path,
            "No file in this folder holds job records that are known.",
            next_step=next_step_for(next(iter(passed_over), given.path)),
        )


def passed_over_note(cluster: str, paths: Sequence[Path]) -> Note:
    """Return the note about files in a folder that no adapter recognised."""
    guesses = [(path, guess_of(path)) for path in paths]
    examples = tuple(
        f"{path.name}: {guess.what}" if guess else path.name for path, guess in guesses
    )
    return Note(
        cluster=cluster,
        check="files-passed-over",
        sentence=f"{plainly(len(paths), 'file')} of the folder could not be recognised and "
        f"{'was' if len(paths) == 1 else 'were'} left out.",
        rows=len(paths),
        action="dropped",
        examples=examples[:MAX_EXAMPLES],
    )


def _source_of(path: Path, chosen: Source | None, *, forced: bool) -> Source | None:
    if chosen is not None:
        return chosen if forced or chosen.recognises(path) else None
    return next((source for source in adapters() if source.recognises(path)), None)


def _unknown(path: Path) -> BadTrace:
    """Return the error for a file that no adapter recognises, or that is unreadable or empty."""
    try:
        with opened(path) as file:
            first = file.read(65536)  # as much as adapters read
    except (OSError, EOFError, zlib.error) as error:
        problem = f"The file cannot be read: {getattr(error, 'strerror', None) or error}."
        return BadTrace(path, problem, next_step="Check that it is whole and readable.")
    if not first:
        return BadTrace(
            path, "The file is empty.", next_step="Give a file of job records, or fetch it again."
        )
    guess = guess_of(path)
    problem = f"Not recognised; it looks like {guess.what}." if guess else UNKNOWN_FORM
    return BadTrace(path, problem, next_step=next_step_for(path))


def _ledger_at(url: str) -> Source:
    from holdfast.trace.sources.ledger import SOURCE, read_url

    return replace(SOURCE, read=lambda connection, _, table: read_url(connection, url, table))
