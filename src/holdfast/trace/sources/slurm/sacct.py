"""Read Slurm's accounting as text: the output of `sacct --parsable2`, with any fields in any order.

The following command is recommended, because its output is unambiguous: Unix times need no zone,
and a job's name may contain any text if it is the last field.

    SLURM_TIME_FORMAT=%s sacct --allusers --allocations --duplicates --parsable2 --starttime 2023-03-01 --format \
        Cluster,JobIDRaw,JobID,User,Account,Partition,State,Submit,Start,End,ElapsedRaw,AllocTRES,ReqTRES,\
        NodeList,ExitCode,Reason,JobName > jobs.txt

`--duplicates` adds the earlier runs of requeued jobs. Restarts may be added for Slurm 24.05 and
later. CSV with quotes, as pandas writes it, is also read.

The file must have State, and JobIDRaw or JobID. If `--allocations` was not given, job steps are
left out. The format is described in the manual page sacct(1) of Slurm 22.05. Slurm prints a job's
name and a few other fields without escaping, so a name may span several lines and may contain the
separator.
"""

import csv
import itertools
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import tzinfo
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.trace.errors import BadTrace
from holdfast.trace.sources.findings import MAX_EXAMPLES, Findings
from holdfast.trace.sources.plain_text import cluster_name, opened, opened_text
from holdfast.trace.sources.reading import Reading, Source, drops_bad_rows, head
from holdfast.trace.sources.rows import NULL, literal, read_rows
from holdfast.trace.sources.slurm.fields import check_time
from holdfast.trace.sources.slurm.rows import (
    FIELDS,
    READERS,
    SENTENCES,
    SOURCE_NAME,
    configured_zone,
    settle_records,
    write_jobs,
)
from holdfast.trace.sources.slurm.sacct_json import is_sacct_json, read_sacct_json

if TYPE_CHECKING:
    import duckdb

LONGEST_LINE: Final = 1 << 20
FREE_TEXT: Final = frozenset(
    {"AdminComment", "Comment", "Constraints", "Extra", "JobName", "StdErr", "StdIn", "StdOut", "SubmitLine",
     "SystemComment", "WorkDir"}
)  # fmt: skip
"""Fields with free text of users or sites, which may contain the separator and line breaks."""
NEXT_STEP: Final = (
    "Export again with `sacct --parsable2`, with JobName as the last field and no other free text."
)

_QUOTED_HEADER = re.compile(r'(?:"[A-Za-z]*"|(?=[,;\t]))([,;\t])(?:"?[A-Za-z]+"?\1?)+$')
"""Matches a header that a CSV library wrote: quoted names, or an unnamed index column first."""
_HEADER = re.compile(r"([A-Za-z]+)([^A-Za-z]+)(?=[A-Za-z])")
_JOB_ID_SQL: Final = r"\d+(?:_\d+|_\[[^\]]*\]|\+\d+)?(?:\.\S+)?"
_JOB_ID = re.compile(r"\d+(?:_\d+|_\[[^\]]*\]|\+\d+)?(?P<step>\.\S+)?$")
_STATE_WORD_SQL: Final = r"[A-Z][A-Z_]*\+?(?: by \S+)?"
_STATE_WORD = re.compile(_STATE_WORD_SQL + "$")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT[\d:.+-]+Z?$|\d+$|Unknown$|None$|N/A$|$")
_EXACT: Final = {
    "State": _STATE_WORD,
    "Submit": _TIME,
    "Eligible": _TIME,
    "Start": _TIME,
    "End": _TIME,
    "ElapsedRaw": re.compile(r"\d*$"),
    "ExitCode": re.compile(r"(?:\d+:\d+)?$"),
    "NNodes": re.compile(r"\d*$"),
    "NCPUS": re.compile(r"\d*$"),
    "AllocTRES": re.compile(r"(?:[a-z]+(?:/[^=,|]+)?=[^,|]+(?:,|$))*$"),
    "ReqTRES": re.compile(r"(?:[a-z]+(?:/[^=,|]+)?=[^,|]+(?:,|$))*$"),
    "JobIDRaw": _JOB_ID,
    "JobID": _JOB_ID,
}
"""Patterns of fields with a fixed form, used to find the end of a name that has separators."""

_GIVE: Final[Mapping[str, tuple[str, ...]]] = {
    "cluster": ("Cluster",),
    "job_id": ("JobIDRaw", "JobID"),
    "shown_id": ("JobID", "JobIDRaw"),
    "restarts": ("Restarts",),
    "name": ("JobName",),
    "username": ("User", "UID"),
    "pool": ("Partition", "Account"),
    "state": ("State",),
    "reason": ("Reason",),
    "exit_code": ("ExitCode",),
    "submit": ("Submit",),
    "start": ("Start",),
    "end": ("End",),
    "elapsed": ("ElapsedRaw", "Elapsed"),
    "allocated": ("AllocTRES",),
    "requested": ("ReqTRES",),
    "nodes": ("NodeList",),
    "allocated_gres": ("AllocGRES", "AllocGres"),
    "requested_gres": ("ReqGRES", "ReqGres"),
    "node_count": ("NNodes", "AllocNodes"),
}
"""For each text in `rows.FIELDS`, the fields that can provide it; the first one present is used."""
_READERS: Final[Mapping[str, Callable[[str], object]]] = {
    **dict.fromkeys(("submit", "start", "end"), check_time),
    **READERS,
    "restarts": lambda text: int(text or 0),
}


def read(connection: "duckdb.DuckDBPyConnection", path: Path, table: str) -> Reading:
    """Read the output of `sacct`, as text or as JSON.

    Times without an offset are in the zone that was given to `load`.

    Raises:
        BadTrace: a record cannot be read; the message has the line, the field and the expected
            form.
    """
    reader = (
        read_sacct_json if head(path, 64).lstrip("\ufeff \t\r\n").startswith("{") else read_sacct
    )
    return reader(connection, path, table, zone=configured_zone(connection))


def recognises(path: Path) -> bool:
    """Return True if a file begins like the output of `sacct --parsable2` or `sacct --json`."""
    fields = _fields_of(head(path, 8192).lstrip("\ufeff").partition("\n")[0])[0]
    return ("State" in fields and not {"JobID", "JobIDRaw"}.isdisjoint(fields)) or is_sacct_json(
        path
    )


def read_sacct(
    connection: "duckdb.DuckDBPyConnection", path: Path, table: str, *, zone: tzinfo | None = None
) -> Reading:
    """Read the output of `sacct --parsable2`; the module's docstring has the command.

    Args:
        connection: the database.
        path: the file, of which one record at a time is held in memory.
        table: name of the new table.
        zone: time zone of times without an offset (all but Unix times); None means UTC, and adds a
            note.

    Raises:
        BadTrace: a record cannot be read; the message has the line, the field and the expected
            form.
    """
    findings = Findings()
    export = _Export(path, drop=drops_bad_rows(connection))
    source, raw = export.lines_sql(), f"{table}_records"
    steps = None if export.is_quoted else _steps_of_regular(connection, path, source)
    if steps is None:
        # Names contain separators or line breaks, or the file is damaged: split it in Python.
        read_rows(connection, raw, dict.fromkeys(FIELDS, "VARCHAR"), export.texts(findings))
        source = raw
    elif steps[0]:
        findings.add("slurm-steps", *steps[1], rows=steps[0])
        source = f"(SELECT * FROM {source} WHERE NOT contains(job_id, '.'))"
    try:
        return write_jobs(
            connection,
            path,
            table,
            source,
            present=export.present,
            zone=zone,
            findings=findings,
            faults=export.faults,
        )
    finally:
        connection.execute(f"DROP TABLE IF EXISTS {raw}")


def _steps_of_regular(
    connection: "duckdb.DuckDBPyConnection", path: Path, source: str
) -> tuple[int, list[str]] | None:
    """Count the job steps if the database can split the file into records, else return None.

    The database can split the file if every line is one record, so that there are as many records
    as line breaks.

    Returns:
        The number of job steps, and a few of their ids.
    """
    import duckdb

    lines, ended = 0, False
    try:
        with opened(path) as file:
            while block := file.read(LONGEST_LINE):
                lines += block.count(b"\n")
                ended = block.endswith(b"\n")
        count, irregular, steps, examples = connection.execute(
            "SELECT count(*), count(*) FILTER (NOT coalesce(is_record, false)),"
            f" count(*) FILTER (contains(job_id, '.')), min(job_id, {MAX_EXAMPLES}) FILTER "
            "(contains(job_id, '.'))"
            f" FROM {source}"
        ).fetchall()[0]
    except (duckdb.IOException, duckdb.OutOfMemoryException):
        raise
    except (
        duckdb.Error,
        OSError,
        EOFError,
        zlib.error,
    ):  # not UTF-8, or too many fields: the split in Python reports the place
        return None
    return (steps, examples or []) if ended and not irregular and count == lines - 1 else None


class _Export:
    """Split the output of sacct into its header and its records."""

    def __init__(self, path: Path, *, drop: bool) -> None:
        self._path, self._drop = path, drop
        header = head(path).lstrip("\ufeff").partition("\n")[0].rstrip("\r")
        self._fields, self._separator = _fields_of(header)
        self._header = header
        self.is_quoted = self._separator != "|" and '"' in head(path)
        """True if a CSV library such as pandas wrote the file.

        Such libraries quote a text that contains the separator.
        """
        if "State" not in self._fields or {"JobID", "JobIDRaw"}.isdisjoint(self._fields):
            raise BadTrace(
                path,
                "expected a header of field names joined by `|`, with State and JobIDRaw or JobID "
                "among them.",
                line=1,
                next_step="Export with `sacct --parsable2` and without --noheader.",
            )
        self._unended = 0
        """Number of the last line, if no line break ends it. This line may be incomplete."""
        self._place = {name: index for index, name in enumerate(self._fields)}
        self._free = [index for index, name in enumerate(self._fields) if name in FREE_TEXT]
        self._exact = [
            (index, _EXACT[name]) for index, name in enumerate(self._fields) if name in _EXACT
        ]
        before = min(self._free, default=len(self._fields))
        # A line begins a record if the ids and the state before any free text have a valid form.
        needed = ("JobIDRaw", "JobID", "State")
        self._leading = [
            (index, form)
            for index, form in self._exact
            if index < before and self._fields[index] in needed
        ]
        self._given = {
            text: next(name for name in names if name in self._place)
            for text, names in _GIVE.items()
            if not self._place.keys().isdisjoint(names)
        }
        self.present = frozenset(self._given)

    def lines_sql(self) -> str:
        """Return SQL of the file's lines as split by the database: `FIELDS` and `is_record`.

        `is_record` is true if the line has as many fields as the header, and its id and state have
        the expected form. The SQL fails if the file is not UTF-8, or if a line has many more
        fields.
        """
        count = len(self._fields) + self._ends_with_separator
        # Read one more field than expected, because the database drops the last separator of a
        # line, although it may belong to a name.
        columns = ", ".join(f"f{index}: 'VARCHAR'" for index in range(count + 1))
        read = (
            f"read_csv({literal(_literally(self._path))}, auto_detect=false, header=false, skip=1, "
            "null_padding=true,"
            f" nullstr='{NULL}', delim={literal(self._separator)}, quote='', escape='', "
            "new_line='\\n',"
            f" max_line_size={LONGEST_LINE}, columns={{{columns}}})"
        )
        whole = f"f{count - 1} IS NOT NULL AND f{count} IS NULL"
        cells = {text: f"f{self._place[name]}" for text, name in self._given.items()}
        given = f"nullif({cells['cluster']}, '')" if "cluster" in cells else "NULL"
        cells["cluster"] = f"coalesce({given}, {literal(cluster_name(self._path))})"
        texts = ", ".join(f'{cells.get(name, "NULL::VARCHAR")} AS "{name}"' for name in FIELDS)
        is_record = (
            f"regexp_full_match({cells['job_id']}, {literal(_JOB_ID_SQL)})"
            f" AND regexp_full_match({cells['state']}, {literal(_STATE_WORD_SQL)}) AND {whole}"
        )
        return f"(SELECT {texts}, {is_record} AS is_record FROM {read})"

    def texts(self, findings: Findings) -> Iterator[tuple[str, ...]]:
        """Yield the texts `FIELDS` of each record, without job steps.

        Records that cannot be split are refused.
        """
        picked = self._picked()
        for line, fields in self._records(findings):
            texts = picked([*fields, ""])
            match = _JOB_ID.match(texts[1])
            if match is None:
                problem = f"expected a job id such as 123_4, not {texts[1][:80]!r}."
                self._refuse(self._bad(line, self._given["job_id"], problem), findings)
            elif match["step"]:
                findings.add("slurm-steps", texts[1])
            else:
                yield (texts[0] or cluster_name(self._path), *texts[1:])

    def faults(self) -> Iterator[BadTrace]:
        """Yield an error for every record with an unreadable field."""
        picked = self._picked()
        for line, fields in self._records(Findings()):
            texts = dict(zip(FIELDS, picked([*fields, ""]), strict=True))
            for what, read in _READERS.items():
                try:
                    read(texts[what])
                except ValueError as error:
                    yield self._bad(line, self._given[what], f"{error}, not {texts[what][:80]!r}.")
                    break

    def _picked(self) -> Callable[[Sequence[str]], tuple[str, ...]]:
        """Return a function that picks `FIELDS` from a record's fields.

        The record's fields must be followed by an empty text, which is picked for a missing field.
        """
        return itemgetter(*(self._place.get(self._given.get(text, ""), -1) for text in FIELDS))

    @property
    def _ends_with_separator(self) -> bool:
        # --parsable ends every record with a separator.
        return self._header.endswith(self._separator)

    def _refuse(self, fault: BadTrace, findings: Findings) -> None:
        """Raise an error, or count it if unreadable rows are dropped."""
        if not self._drop:
            raise fault
        findings.add("unreadable-row", str(fault))

    def _records(self, findings: Findings) -> Iterator[tuple[int, list[str]]]:
        """Yield the first line and the fields of each record.

        A record ends before the next line that begins a record.
        """
        expected = f"expected {len(self._fields)} fields joined by {self._separator!r}"
        if self.is_quoted:
            yield from self._quoted(findings)
            return
        text, first_line = "", 0
        for line, this in itertools.chain(self._lines(), ((0, None),)):
            if this is None or self._begins(this.split(self._separator)):
                if first_line:
                    try:
                        fields = self._fitted(first_line, text)
                    except BadTrace as fault:
                        self._refuse(fault, findings)
                    else:
                        yield first_line, fields
                text, first_line = this or "", line
            elif not first_line:
                raise self._bad(line, None, f"{expected}.")
            elif line == self._unended:
                self._refuse(
                    self._bad(line, None, f"{expected}; the file is cut off here."), findings
                )
            elif len(text) + len(this) > LONGEST_LINE:
                raise self._bad(first_line, None, f"{expected}; no record ends within 1 MiB.")
            else:
                text = f"{text}\n{this}"

    def _quoted(self, findings: Findings) -> Iterator[tuple[int, list[str]]]:
        """Yield the first line and the fields of each record, for a file with quotes."""
        with opened_text(self._path) as file:
            rows = csv.reader(file, delimiter=self._separator)
            line = 1
            try:
                for number, fields in enumerate(rows):
                    begins, line = line, rows.line_num + 1
                    if number == 0 or not fields or tuple(fields) == self._fields:
                        continue
                    if len(fields) == len(self._fields):
                        yield begins, fields
                        continue
                    problem = f"expected {len(self._fields)} fields, found {len(fields)}."
                    self._refuse(self._bad(begins, None, problem), findings)
            except csv.Error as error:
                raise self._bad(line, None, f"expected CSV: {error}.") from None

    def _lines(self) -> Iterator[tuple[int, str | None]]:
        with opened_text(self._path) as file:
            number = 0
            while this := file.readline(LONGEST_LINE):
                number += 1
                if len(this) >= LONGEST_LINE:
                    raise self._bad(number, None, "expected lines shorter than 1 MiB.")
                if not this.endswith("\n"):
                    self._unended = number
                this = this.rstrip("\r\n")
                if number == 1 or this == self._header:  # The file may hold several exports.
                    continue
                yield (
                    number,
                    this.removesuffix(self._separator) if self._ends_with_separator else this,
                )

    def _begins(self, parts: Sequence[str]) -> bool:
        """Return True if a line begins a record.

        The id and the state stand before the fields of free text. A line begins a record if both
        have their expected form.
        """
        if (
            not self._leading
            # If the free text comes first, only a complete line can be distinguished from the
            # continuation of a name.
        ):
            return len(parts) >= len(self._fields)
        return len(parts) > self._leading[-1][0] and all(
            form.match(parts[index]) for index, form in self._leading
        )

    def _fitted(self, line: int, text: str) -> list[str]:
        """Return a record's fields. A name that contains the separator is joined to one field."""
        fields = text.split(self._separator)
        extra = len(fields) - len(self._fields)
        if extra == 0:
            return fields
        if extra < 0:
            found = f"found {len(fields)}: the file is cut off here, or a field is missing"
            raise self._bad(line, None, f"expected {len(self._fields)} fields, {found}.")
        possible = []
        for free in self._free:
            joined = self._separator.join(fields[free : free + extra + 1])
            candidate = [*fields[:free], joined, *fields[free + extra + 1 :]]
            if all(form.match(candidate[index]) for index, form in self._exact):
                possible.append(candidate)
        used = {tuple(candidate[index] for index in self._used()) for candidate in possible}
        if len(used) != 1:
            raise self._bad(
                line,
                None,
                f"expected {len(self._fields)} fields, found {len(fields)}, and which of them "
                "holds the separator "
                f"{self._separator!r} cannot be told: {text[:200]!r}.",
            )
        return possible[0]

    def _used(self) -> list[int]:
        return [
            index
            for index, name in enumerate(self._fields)
            if name == "JobName" or name not in FREE_TEXT
        ]

    def _bad(self, line: int, field: str | None, problem: str) -> BadTrace:
        return BadTrace(self._path, problem, line=line, column=field or None, next_step=NEXT_STEP)


def _literally(path: Path) -> str:
    """Escape a path for the database, which treats some characters as patterns."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in str(path))


def _fields_of(header: str) -> tuple[tuple[str, ...], str]:
    """Return the field names in a header, and their separator.

    The separator may be any text, because sacct has the option `--delimiter`.
    """
    header = header.rstrip("\r\n")
    if quoted := _QUOTED_HEADER.match(header):
        return tuple(next(csv.reader([header], delimiter=quoted[1]))), quoted[1]
    match = _HEADER.match(header)
    if match is None or not match[2].strip(
        " "
    ):  # Spaces are the separator of sacct's default table, which cuts long values.
        return (), "|"
    names = header.removesuffix(match[2]).split(match[2])
    return (tuple(names), match[2]) if all(name.isalnum() for name in names) else ((), "|")


def settled(connection: "duckdb.DuckDBPyConnection", reading: Reading) -> Reading:
    """Join several exports of one cluster.

    A job that is in two exports, because it ran from one period into the next, is kept once.
    """
    findings = Findings()
    settle_records(connection, reading.table, findings)
    return replace(
        reading, notes=reading.notes + findings.notes(reading.clusters[0].name, SENTENCES)
    )


SOURCE: Final = Source(
    name=SOURCE_NAME,
    title="Slurm, what sacct --parsable2 or sacct --json printed",
    recognises=recognises,
    read=read,
    settle=settled,
)
