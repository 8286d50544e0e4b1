"""Find the place and the reason of an error in a CSV file, after the fast reading failed.

The search takes two slow passes. The first pass finds rows that the database's reader rejects,
because they have too few or too many fields, or fields of a wrong type. The second pass is a query
for other errors, which are infinite numbers and times of a wrong format.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.trace.errors import BadTrace
from holdfast.trace.sources.csv.sql import CsvSource, Time
from holdfast.trace.sources.plain_text import line_at, line_of_record, open_quote, too_long
from holdfast.trace.sources.sql import quoted

if TYPE_CHECKING:
    import duckdb

LONGEST_SHOWN: Final = 60
EXAMPLES: Final = 3
CORRECT: Final = "Correct the line, or drop such rows by --bad-rows drop."
_KINDS: Final = {"DOUBLE": "a number", "BIGINT": "a whole number", "INTEGER": "a whole number"}
_VALUE: Final = re.compile(r'Could not convert string "(.*)" to ', re.DOTALL)
# An option to number the rows in the order of the file. It is not used to find rejected rows,
# because with it the database ignores an unclosed quote.
_IN_ORDER: Final = "parallel=false"


def first_fault(
    connection: "duckdb.DuckDBPyConnection", path: Path, source: CsvSource, error: Exception
) -> BadTrace:
    """Return the first error in the file, or one made from `error` if none is found."""
    import duckdb

    try:
        # The second pass does not count rows that the first pass rejects, so its line numbers may
        # be too low. They still are beyond the rejected row, so the smallest line number is right.
        faults = [*_rejected(connection, path, source, 1), *_unchecked(connection, path, source)]
    except duckdb.Error as later:
        faults, error = [], later
    if faults:
        return min(faults, key=lambda fault: fault.line or 0)
    if "state machine" in str(error):
        return BadTrace(
            path,
            "Some lines end by \\r\\n and some by \\n, so that its rows cannot be told apart for "
            "certain.",
            next_step="Give all the same ending, for example by dos2unix.",
        )
    sentence = str(error).partition("\n")[0].rstrip(".")
    return BadTrace(
        path, f"The file cannot be read: {sentence}.", next_step="Check that it is CSV, and whole."
    )


def bad_rows(
    connection: "duckdb.DuckDBPyConnection", path: Path, source: CsvSource
) -> tuple[int, tuple[str, ...]]:
    """Count the unreadable rows, and describe a few of them by place and reason.

    Raises:
        BadTrace: an error affects more than its own row, such as an unclosed quote.
    """
    faults = list(_rejected(connection, path, source, EXAMPLES))
    count = connection.execute(
        "SELECT count(DISTINCT line_byte_position) FROM reject_errors"
    ).fetchall()[0][0]
    _forget_rejects(connection)
    if wrong := " OR ".join(source.unchecked().values()):
        checked = source.checked("ignore_errors=true")
        count += connection.execute(f"SELECT count(*) FROM {checked} WHERE {wrong}").fetchall()[0][
            0
        ]
    return count, tuple(str(fault).removesuffix(" " + CORRECT) for fault in faults)


def mixed_offsets(
    connection: "duckdb.DuckDBPyConnection", path: Path, source: CsvSource
) -> BadTrace:
    """Return the error for a file in which some times have a zone offset and others have none.

    The error names the first time of the rarer kind.
    """
    texts = f"(SELECT *, row_number() OVER () AS record FROM {source.texts(_IN_ORDER)})"
    found = []
    for name, with_offset in source.with_offset().items():
        for condition, has in (
            (f"NOT ({with_offset})", "no zone offset"),
            (with_offset, "a zone offset"),
        ):
            count, record, value = connection.execute(
                f"SELECT count(*), min(record), arg_min({quoted(name)}, record) FROM {texts} WHERE "
                f"{condition}"
            ).fetchall()[0]
            if count:
                found.append((count, record, name, value, has))
    _, record, name, value, has = min(found)
    others = "one" if has.startswith("no") else "none"
    return BadTrace(
        path,
        f"The time {_shown(value)} has {has} and others have {others}, so they cannot be put on "
        "one clock.",
        line=_line(path, source, record),
        column=name,
        next_step="Write all times with an offset, or all without.",
    )


def _rejected(
    connection: "duckdb.DuckDBPyConnection", path: Path, source: CsvSource, at_most: int
) -> Iterator[BadTrace]:
    """Yield an error for each of the first rows that the reader rejects.

    Afterwards, the table `reject_errors` contains all rejected rows.
    """
    _forget_rejects(connection)
    checked = source.checked("store_rejects=true", "rejects_limit=0", "rejects_line_size_limit=200")
    counted = ", ".join(f"count({quoted(name)})" for name, _ in source.columns)
    connection.execute(f"SELECT {counted} FROM {checked}").fetchall()
    # If a row has several errors, a wrong number of fields comes before a wrong value. An unclosed
    # quote comes before all other errors, because it affects all rows after it.
    rejects = connection.execute(
        "SELECT line_byte_position, line, column_name, error_type::VARCHAR, csv_line, "
        "error_message FROM reject_errors "
        "QUALIFY row_number() OVER (PARTITION BY line_byte_position ORDER BY error_type = 'CAST', "
        "column_idx) = 1 "
        "ORDER BY error_type = 'UNQUOTED VALUE' DESC, line_byte_position LIMIT $1",
        [at_most],
    ).fetchall()
    for byte, row, column, kind, text, message in rejects:
        line = row if path.suffix == ".zst" else line_at(path, byte)
        if kind == "UNQUOTED VALUE":
            line = open_quote(path) or line
        if kind == "UNQUOTED VALUE" and at_most > 1:
            raise _fault_of(path, source, line, column, kind, text, message)
        fault = _fault_of(path, source, line, column, kind, text, message)
        if kind == "MISSING COLUMNS" and _is_last(path, byte, text):
            problem = (
                "It is the last line and has too few fields, so the file may have been cut off"
            )
            fault = BadTrace(
                path, f"{problem}: {_shown(text.strip())}.", line=line, next_step="Get it whole."
            )
        yield fault


def _fault_of(
    path: Path, source: CsvSource, line: int, column: str | None, kind: str, text: str, message: str
) -> BadTrace:
    match kind:
        case "CAST" if column and (value := _VALUE.search(message)):
            problem = f"Expected {_expected(source, column)}, found {_shown(value[1])}."
            return BadTrace(path, problem, line=line, column=column, next_step=CORRECT)
        case "UNQUOTED VALUE":
            next_step = "Correct the line; the text after the quote may belong to the quoted field."
            return BadTrace(
                path,
                "A quote opens here and does not close.",
                line=line,
                column=column,
                next_step=next_step,
            )
        case "MISSING COLUMNS" | "TOO MANY COLUMNS":
            found = message.rsplit(":", 1)[1].strip()
            problem = (
                f"{len(source.columns)} fields were expected and {found} found, in "
                f"{_shown(text.strip())}."
            )
            return BadTrace(path, problem, line=line, next_step=CORRECT)
        case "INVALID ENCODING":
            problem = f"The text is not UTF-8, in {_shown(text.strip())}."
            next_step = "Convert the file (iconv -t UTF-8), or drop such rows by --bad-rows drop."
            return BadTrace(path, problem, line=line, column=column, next_step=next_step)
        case "LINE SIZE OVER MAXIMUM":
            return too_long(path, line)
        case _:
            return BadTrace(
                path, _shown(message.partition("\n")[0]) + ".", line=line, next_step=CORRECT
            )


def _unchecked(
    connection: "duckdb.DuckDBPyConnection", path: Path, source: CsvSource
) -> Iterator[BadTrace]:
    """Yield an error for each column's first wrong field that the reader accepted."""
    checked = (
        "(SELECT *, row_number() OVER () AS record FROM "
        f"{source.checked('ignore_errors=true', _IN_ORDER)})"
    )
    for name, wrong in source.unchecked().items():
        record, value = connection.execute(
            f"SELECT min(record), arg_min({quoted(name)}, record)::VARCHAR FROM {checked} WHERE "
            f"{wrong}"
        ).fetchall()[0]
        if record is not None:
            problem = f"Expected {_expected(source, name)}, found {_shown(value)}."
            yield BadTrace(
                path, problem, line=_line(path, source, record), column=name, next_step=CORRECT
            )


def _expected(source: CsvSource, column: str) -> str:
    kind = dict(source.columns)[column]
    if not isinstance(kind, Time):
        return _KINDS[kind]
    return (
        f"a time of the form {kind.format}"
        if kind.format
        else "a time such as 2023-03-01 00:18:22+08:00"
    )


def _line(path: Path, source: CsvSource, row: int) -> int:
    """Return the line number of a row; rows are counted from 1 after the header."""
    record = row if source.has_header else row - 1
    return record + 1 if path.suffix == ".zst" else line_of_record(path, record)


def _is_last(path: Path, byte: int, text: str) -> bool:
    return (
        path.suffix not in {".gz", ".zst"} and byte + len(text.encode()) + 2 >= path.stat().st_size
    )


def _forget_rejects(connection: "duckdb.DuckDBPyConnection") -> None:
    connection.execute("DROP TABLE IF EXISTS reject_errors; DROP TABLE IF EXISTS reject_scans")


def _shown(value: str) -> str:
    return repr(value if len(value) <= LONGEST_SHOWN else value[: LONGEST_SHOWN - 1] + "…")
