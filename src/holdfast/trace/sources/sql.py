"""How SQL writes texts, names and files, and each source's words for states and types."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from holdfast.trace.schema import STATES

if TYPE_CHECKING:
    import duckdb

_PATTERN: Final = frozenset("*?[")


def literal(text: object) -> str:
    """A text as SQL writes it."""
    return "'" + str(text).replace("'", "''") + "'"


def quoted(name: str) -> str:
    """A name as SQL writes it."""
    return '"' + name.replace('"', '""') + '"'


def scratch_folder(connection: "duckdb.DuckDBPyConnection") -> str | None:
    """The database's own folder for temporary files, where it is there."""
    row = connection.execute("SELECT current_setting('temp_directory')").fetchone()
    folder = row[0] if row else ""
    return folder if folder and Path(folder).is_dir() else None


@contextmanager
def openable(connection: "duckdb.DuckDBPyConnection", path: Path) -> Iterator[Path]:
    """The path under a name that the database does not take for a pattern, with the same suffixes."""
    if _PATTERN.isdisjoint(str(path)):
        yield path
        return
    with TemporaryDirectory(dir=scratch_folder(connection), prefix="link-") as folder:
        suffixes = "".join(path.suffixes[-2:])
        link = Path(folder) / f"source{suffixes if _PATTERN.isdisjoint(suffixes) else path.suffix}"
        link.symlink_to(path.resolve())
        yield link


SLURM_STATES: Final = {state: state for state in STATES} | {"SUSPENDED": "RUNNING"}


def state_sql(column: str, words: Mapping[str, str] = SLURM_STATES) -> str:
    """SQL of the state that a word of `column` stands for; UNKNOWN where it stands for none."""
    cases = "".join(f" WHEN {literal(word)} THEN '{state}'" for word, state in words.items())
    return f"CASE {column}{cases} ELSE 'UNKNOWN' END"


def type_sql(column: str, words: Mapping[str, str]) -> str:
    """SQL of the type that a word of `column` stands for; NULL where it stands for none."""
    cases = "".join(f" WHEN {literal(word)} THEN '{kind}'" for word, kind in words.items())
    return f"CASE {column}{cases} END"
