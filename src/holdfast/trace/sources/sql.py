"""Quote texts, names and paths in SQL, and translate each source's states and types."""

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
    """Quote a text as an SQL literal."""
    return "'" + str(text).replace("'", "''") + "'"


def quoted(name: str) -> str:
    """Quote a name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def scratch_folder(connection: "duckdb.DuckDBPyConnection") -> str | None:
    """Return the database's folder for temporary files; None if there is none."""
    row = connection.execute("SELECT current_setting('temp_directory')").fetchone()
    folder = row[0] if row else ""
    return folder if folder and Path(folder).is_dir() else None


@contextmanager
def openable(connection: "duckdb.DuckDBPyConnection", path: Path) -> Iterator[Path]:
    """Yield a path that the database can open.

    This is the path itself, or a link to it if the path contains characters that the database
    treats as patterns. The link has the same suffixes.
    """
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
    """Return SQL that translates the words in `column` to states; other words become UNKNOWN."""
    cases = "".join(f" WHEN {literal(word)} THEN '{state}'" for word, state in words.items())
    return f"CASE {column}{cases} ELSE 'UNKNOWN' END"


def type_sql(column: str, words: Mapping[str, str]) -> str:
    """Return SQL that translates the words in `column` to job types; other words become NULL."""
    cases = "".join(f" WHEN {literal(word)} THEN '{kind}'" for word, kind in words.items())
    return f"CASE {column}{cases} END"
