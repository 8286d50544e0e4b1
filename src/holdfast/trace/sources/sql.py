"""Write texts, names and files in SQL, and translate each source's states and types."""

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
    """Return the database's folder for temporary files, if the folder exists."""
    row = connection.execute("SELECT current_setting('temp_directory')").fetchone()
    folder = row[0] if row else ""
    return folder if folder and Path(folder).is_dir() else None


@contextmanager
def openable(connection: "duckdb.DuckDBPyConnection", path: Path) -> Iterator[Path]:
    """Yield the path, or a link without pattern characters and with the same suffixes."""
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
    """Return SQL of the state for a word of `column`; UNKNOWN for other words."""
    cases = "".join(f" WHEN {literal(word)} THEN '{state}'" for word, state in words.items())
    return f"CASE {column}{cases} ELSE 'UNKNOWN' END"


def type_sql(column: str, words: Mapping[str, str]) -> str:
    """Return SQL of the type for a word of `column`; NULL for other words."""
    cases = "".join(f" WHEN {literal(word)} THEN '{kind}'" for word, kind in words.items())
    return f"CASE {column}{cases} END"
