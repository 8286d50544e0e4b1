"""How SQL writes texts, names and files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

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
