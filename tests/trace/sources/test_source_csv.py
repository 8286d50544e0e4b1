"""Check that valid CSV is read correctly, and that faults are reported with their place."""
# ruff: noqa: DTZ001 - the times of a trace are UTC without a zone

import gzip
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from normalised_rows import database

from holdfast.trace.errors import BadTrace
from holdfast.trace.sources.csv.sql import Time
from holdfast.trace.sources.csv.text import read_csv
from holdfast.trace.sources.plain_text import LONGEST_LINE_BYTES

COLUMNS = {"id": "VARCHAR", "gpus": "DOUBLE", "nodes": "INTEGER", "began": Time(), "ended": Time()}
SELECT = "SELECT id, gpus, nodes, began, ended, zone_offset FROM source"
HEADER = "id,gpus,nodes,began,ended\n"
GOOD = "a,1,1,2023-03-01 08:00:00+08:00,2023-03-01 09:00:00+08:00\n"


@pytest.fixture
def folder(tmp_path):
    return tmp_path


def reads(path, content, *, bad_rows="fail", columns=COLUMNS, select=SELECT, **options):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with database() as connection:
        connection.execute(f"SET VARIABLE bad_rows = '{bad_rows}'")
        read = read_csv(connection, path, columns=columns, select=select, table="jobs", **options)
        return read, connection.execute("SELECT * FROM jobs").fetchall()


def fault(path, content, **options):
    with pytest.raises(BadTrace) as error:
        reads(path, content, **options)
    return error.value


def test_times_are_utc_and_the_offset_is_kept(folder):
    rows = (
        HEADER
        + "a,0.5,1,2023-03-01 08:00:00+08:00,2023-03-01T09:30:00+08:00\n"
        + "b,8,,2023-03-01 00:00:00.250+00:00,2023-03-01 00:00:00Z\n"
    )
    read, found = reads(folder / "jobs.csv", rows)
    assert found == [
        ("a", 0.5, 1, datetime(2023, 3, 1), datetime(2023, 3, 1, 1, 30), "+08:00"),
        ("b", 8.0, None, datetime(2023, 3, 1, microsecond=250_000), datetime(2023, 3, 1), "+00:00"),
    ]
    assert read.rows == 2
    (note,) = read.notes("Seren")
    assert (note.check, note.rows, note.action) == ("several-offsets", 1, "kept")
    assert "+00:00 (1)" in note.sentence
    assert "+08:00 (1)" in note.sentence


@st.composite
def written_times(draw):
    at = draw(st.datetimes(min_value=datetime(1971, 1, 1), max_value=datetime(2100, 1, 1)))
    zone = timezone(timedelta(minutes=draw(st.sampled_from([0, 60, 480, 330, -210, -420, 845]))))
    precision = draw(st.sampled_from(["seconds", "milliseconds", "microseconds"]))
    text = at.replace(tzinfo=zone).isoformat(draw(st.sampled_from(["T", " "])), timespec=precision)
    return text, datetime.fromisoformat(text).astimezone(UTC).replace(tzinfo=None)


@settings(max_examples=20, deadline=None)
@given(st.lists(written_times(), min_size=1, max_size=30))
def test_any_iso_time_is_the_instant_that_python_says(tmp_path_factory, times):
    path = tmp_path_factory.mktemp("csv") / "jobs.csv"
    content = "began\n" + "".join(f"{text}\n" for text, _ in times)
    _, rows = reads(
        path, content, columns={"began": Time()}, select="SELECT began, zone_offset FROM source"
    )
    assert rows == [(at, text[-6:]) for text, at in times]


def test_a_time_without_offset_is_of_the_zone_given_summer_and_winter(folder):
    columns = {"began": Time(zone="America/Los_Angeles")}
    select = "SELECT began, zone_offset FROM source"
    _, rows = reads(
        folder / "jobs.csv",
        "began\n2017-10-09 07:01:55\n2017-11-20 07:01:55\n",
        columns=columns,
        select=select,
    )
    assert rows == [(datetime(2017, 10, 9, 14, 1, 55), ""), (datetime(2017, 11, 20, 15, 1, 55), "")]


def test_a_time_of_another_form_is_read_by_its_format(folder):
    columns = {"began": Time(zone="Asia/Shanghai", format="%d.%m.%Y %H:%M"), "n": "DOUBLE"}
    select = "SELECT began FROM source"
    _, rows = reads(
        folder / "jobs.csv", "began,n\n01.03.2023 08:30,1\n", columns=columns, select=select
    )
    assert rows == [(datetime(2023, 3, 1, 0, 30),)]
    error = fault(
        folder / "jobs.csv",
        "began,n\n01.03.2023 08:30,1\n1 March,1\n",
        columns=columns,
        select=select,
    )
    assert (error.line, error.column) == (3, "began")
    assert "%d.%m.%Y %H:%M" in str(error)
    assert "'1 March'" in str(error)


def test_columns_in_any_order_and_empty_fields_are_null(folder):
    _, rows = reads(folder / "jobs.csv", "ended,began,nodes,id,gpus\n,,,,nan\n")
    assert rows == [(None, None, None, None, None, None)]


@pytest.mark.parametrize(
    ("content", "line", "column", "words"),
    [
        (
            HEADER + GOOD + GOOD.replace("a,1", "a,many"),
            3,
            "gpus",
            "Expected a number, found 'many'",
        ),
        (HEADER + GOOD + GOOD.replace("a,1", "a,inf"), 3, "gpus", "Expected a number, found 'inf'"),
        (HEADER + GOOD + "a,1,x,,\n" + GOOD, 3, "nodes", "Expected a whole number, found 'x'"),
        (
            HEADER + GOOD + GOOD.replace("03-01 08", "13-01 08"),
            3,
            "began",
            "found '2023-13-01 08:00:00+08:00'",
        ),
        (HEADER + '"a\nb\n",1,1,,\n' + GOOD.replace("a,1", "a,many"), 5, "gpus", "found 'many'"),
        (HEADER + "\n\n" + GOOD + GOOD.replace("a,1", "a,many"), 5, "gpus", "found 'many'"),
        (
            (HEADER + GOOD + GOOD.replace("a,1", "a,many")).replace("\n", "\r\n"),
            3,
            "gpus",
            "found 'many'",
        ),
        (HEADER + GOOD + "a,1,1\n" + GOOD, 3, None, "5 fields were expected and 3 found"),
        (
            (HEADER + GOOD + "a,1,1\n" + GOOD).replace("\n", "\r\n"),
            3,
            None,
            "5 fields were expected and 3 found",
        ),
        (HEADER + GOOD + "a,1,1,,,x\n", 3, None, "5 fields were expected and 6 found"),
        (HEADER + GOOD + GOOD + "a,1,1,2023-0", 4, None, "may have been cut off"),
        (
            HEADER + GOOD + GOOD + "a,1,1,2023-03-01 08:00:00+08:00,2023-03-01 0",
            4,
            "ended",
            "found '2023-03-01 0'",
        ),
        (
            HEADER + GOOD + 'a,"1,1,,\n' + GOOD * 3,
            3,
            "gpus",
            "A quote opens here and does not close",
        ),
        (
            HEADER + GOOD + 'a,"1,1,,\n' + GOOD + '"b",1,1,,\n' + GOOD,
            3,
            "gpus",
            "A quote opens here",
        ),
        (HEADER + GOOD + '"a"b,1,1,,\n' + GOOD, 3, "id", "A quote opens here"),
        ((HEADER + GOOD).encode() + b"\xff\xfe,1,1,,\n", 3, "id", "The text is not UTF-8"),
        ((HEADER + GOOD).encode() + b"a\x00b,1,1,,\n", 3, None, "NUL byte"),
        (
            HEADER + GOOD + "a" * (LONGEST_LINE_BYTES + 10) + ",1,1,,\n",
            3,
            None,
            "longer than 2000000 bytes",
        ),
        (HEADER + GOOD + GOOD.replace("\n", "\r\n") + GOOD, None, None, r"by \r\n and some by \n"),
        (
            HEADER + GOOD * 2 + "a,1,1,2023-03-01 08:00:00,\n",
            4,
            "began",
            "has no zone offset and others have one",
        ),
        (
            HEADER + "a,1,1,2023-03-01 08:00:00,2023-03-01 09:00:00+01:00\n",
            2,
            "began",
            "cannot be put on one clock",
        ),
        ("", None, None, "The file is empty"),
        (HEADER, None, None, "It holds no job"),
        (HEADER.strip(), None, None, "It holds no job"),
        ("\n\n", None, None, "It holds no job"),
        ("id,gpus,nodes,began\n", 1, None, "missing 'ended'"),
        ("id,gpus,nodes,began,ended,colour\n", 1, None, "not expected 'colour'"),
        ("id,gpus,gpus,at,ended\n", 1, None, "twice 'gpus'; missing 'nodes'"),
    ],
)
def test_a_fault_is_said_with_its_place_what_was_expected_and_what_to_do(
    folder, content, line, column, words
):
    error = fault(folder / "jobs.csv", content)
    assert (error.line, error.column) == (line, column), str(error)
    assert words in str(error)
    assert str(error).startswith(str(folder / "jobs.csv"))
    assert re.search(r"\. [A-Z][^.]*", str(error)), "a next step"
    assert len(str(error)) < 400, "a line of the file is not poured out"
    assert "\n" not in str(error)


def test_the_first_of_several_faults_is_said_however_the_file_is_read(folder):
    # Long enough for several buffers and threads.
    rows = [GOOD] * 300_000
    rows[200_000] = "a,late,1,,\n"
    rows[150_000] = "a,1,1\n"
    rows[100_000] = "a,early,1,,\n"
    error = fault(folder / "jobs.csv", HEADER + "".join(rows))
    assert (error.line, error.column) == (100_002, "gpus")


def test_bad_rows_are_dropped_and_counted_where_that_is_wanted(folder):
    content = (
        HEADER
        + GOOD
        + "b,many,1,,\n"
        + "c,1\n"
        + GOOD
        + "d,1,1,2023-99-01,\n"
        + "e,inf,1,,\n"
        + "f,1,1,,,x\n"
        + "g,many,x,,\n"
    ).encode() + b"\xff,1,1,,\n"
    read, rows = reads(folder / "jobs.csv", content, bad_rows="drop")
    assert [row[0] for row in rows] == ["a", "a"]
    assert (read.rows, read.dropped) == (2, 7)
    assert len(read.faults) == 3
    assert "line 3, column 'gpus': Expected a number, found 'many'." in read.faults[0]
    assert "line 4: 5 fields were expected and 2 found" in read.faults[1]
    (note,) = read.notes("Seren")
    assert (note.check, note.rows, note.action) == ("unreadable-row", 7, "dropped")
    assert note.examples == read.faults


def test_good_rows_cost_nothing_where_bad_ones_are_dropped(folder):
    read, rows = reads(folder / "jobs.csv", HEADER + GOOD, bad_rows="drop")
    assert (len(rows), read.dropped, read.notes("Seren")) == (1, 0, ())


def test_a_quote_that_does_not_close_is_never_dropped_with_what_follows(folder):
    content = HEADER + GOOD + 'a,"1,1,,\n' + GOOD * 3
    assert fault(folder / "jobs.csv", content, bad_rows="drop").line == 3
    # Also after more bad rows than are reported.
    content = HEADER + GOOD + "b,many,1,,\n" * 9 + 'a,"1,1,,\n' + GOOD * 3
    assert fault(folder / "jobs.csv", content, bad_rows="drop").line == 12


def test_a_file_of_bad_rows_alone_holds_no_job(folder):
    assert "It holds no job" in str(
        fault(folder / "jobs.csv", HEADER + "a,many,1,,\n", bad_rows="drop")
    )


def test_other_delimiters_quoted_fields_and_a_byte_order_mark(folder):
    content = (
        ("\ufeff" + HEADER + GOOD.replace("a,", '"a,""b""\nc",')).replace(",1,", "|1|").encode()
    )
    _, rows = reads(folder / "jobs.csv", "\ufeff" + HEADER + GOOD.replace("a,1", '"a,""b""\nc",1'))
    assert rows[0][0] == 'a,"b"\nc'
    piped = (HEADER + GOOD).replace(",", "|")
    assert reads(folder / "jobs.csv", piped, delimiter="|")[1][0][0] == "a"
    assert content


def test_without_a_header_the_columns_are_those_given_in_order(folder):
    _, rows = reads(folder / "jobs.csv", GOOD, has_header=False)
    assert rows[0][:3] == ("a", 1.0, 1)
    assert fault(folder / "jobs.csv", GOOD + GOOD.replace("a,1", "a,x"), has_header=False).line == 2


@pytest.mark.parametrize("name", ["jobs.csv.gz", "jobs [1]*?.csv", "it's.csv", "jobs [x].csv.gz"])
def test_compressed_files_and_names_that_look_like_patterns(folder, name):
    content = (HEADER + GOOD).encode()
    pack = gzip.compress if name.endswith(".gz") else bytes
    assert len(reads(folder / name, pack(content))[1]) == 1
    error = fault(folder / name, pack(content + b"a,many,1,,\n"))
    assert (error.line, error.column) == (3, "gpus")
    assert fault(folder / name, pack(content + b"a,1\n")).line == 3


def test_a_file_compressed_by_zstandard(folder):
    (folder / "plain.csv").write_text(HEADER + GOOD + GOOD.replace("a,1", "a,many"))
    line = "auto_detect=false, header=false, delim='\x01', quote='', escape='', columns={line: 'VARCHAR'}"
    with duckdb.connect() as connection:
        connection.execute(
            f"COPY (FROM read_csv('{folder}/plain.csv', {line})) TO '{folder}/jobs.csv.zst' "
            "(FORMAT csv, HEADER false, QUOTE '', ESCAPE '', DELIMITER '\x01', COMPRESSION zstd)"
        )
    packed = (folder / "jobs.csv.zst").read_bytes()
    error = fault(folder / "jobs.csv.zst", packed)
    assert (error.line, error.column) == (3, "gpus")
    assert reads(folder / "jobs.csv.zst", packed, bad_rows="drop")[0].rows == 1


def test_a_compressed_file_that_is_cut_off_or_is_none(folder):
    packed = gzip.compress((HEADER + GOOD * 10_000).encode())
    assert "cannot be read" in str(fault(folder / "jobs.csv.gz", packed[: len(packed) // 2]))
    assert str(fault(folder / "jobs.csv.gz", b"id,gpus\n"))


def test_a_column_called_zone_offset_does_not_hide_the_written_one(folder):
    columns = {"began": Time(), "zone_offset": "VARCHAR"}
    select = "SELECT began, zone_offset FROM source"
    _, rows = reads(
        folder / "jobs.csv",
        "began,zone_offset\n2023-03-01 08:00:00+08:00,lies\n",
        columns=columns,
        select=select,
    )
    assert rows == [(datetime(2023, 3, 1), "+08:00")]


MEASURED = """
import shutil, sys
from pathlib import Path
from holdfast.trace.errors import BadTrace
from holdfast.trace.sources.csv.text import read_csv
from holdfast.trace.trace import open_scratch
connection, folder = open_scratch(memory_limit_mb=300)
try:
    columns = {"id": "VARCHAR", "gpus": "DOUBLE"}
    read_csv(connection, Path(sys.argv[1]), columns=columns, select="FROM source", table="jobs")
except BadTrace as error:
    # Of this program alone; what the kernel calls its greatest resident set counts the parent that forked it.
    peak_kib = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
    print(error.line, int(peak_kib) // 1024)
connection.close()
shutil.rmtree(folder)
"""


def line_and_memory_mib(path):
    answer = subprocess.run(
        [sys.executable, "-c", MEASURED, path], capture_output=True, text=True, check=True
    )
    line, memory_mib = map(int, answer.stdout.split())
    return line, memory_mib


def write_long_line(path, megabytes, *, start=b"", block=b"y" * 1_000_000):
    with path.open("wb") as file:
        file.write(b"id,gpus\na,1\n" + start)
        for _ in range(megabytes):
            file.write(block)


def test_an_endless_line_costs_no_memory(folder):
    write_long_line(folder / "jobs.csv", 64)
    line, memory_mib = line_and_memory_mib(folder / "jobs.csv")
    assert line == 3
    assert memory_mib < 250


def test_an_endless_quoted_text_of_many_lines_costs_no_memory(folder):
    write_long_line(folder / "jobs.csv", 64, start=b'b,"', block=b"y" * 999_999 + b"\n")
    line, memory_mib = line_and_memory_mib(folder / "jobs.csv")
    assert line == 3
    assert memory_mib < 450  # the database may use 300


@pytest.mark.slow
def test_a_line_of_two_gigabytes_costs_no_memory(folder):
    write_long_line(folder / "jobs.csv", 2048)
    line, memory_mib = line_and_memory_mib(folder / "jobs.csv")
    assert line == 3
    assert memory_mib < 250


class Failing:
    """A connection that cannot create tables."""

    def __init__(self, connection, said):
        self.connection, self.said = connection, said

    def __getattr__(self, name):
        return getattr(self.connection, name)

    def execute(self, sql, *parameters):
        if sql.startswith("CREATE"):
            raise duckdb.IOException(self.said)
        return self.connection.execute(sql, *parameters)


def test_a_file_that_shrinks_while_it_is_read_is_the_files_fault_and_a_full_disk_is_not(folder):
    path = folder / "jobs.csv"
    path.write_text(HEADER + GOOD)
    for said, expected in [
        ("Could not read enough bytes", BadTrace),
        ("No space left on device", duckdb.IOException),
    ]:
        with database() as connection, pytest.raises(expected, match=said):
            read_csv(Failing(connection, said), path, columns=COLUMNS, select=SELECT, table="jobs")
