# ruff: noqa: DTZ001 - the times of a trace are UTC without a zone

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from normalised_rows import database

from holdfast.trace.sources import rows as module
from holdfast.trace.sources.rows import read_rows

COLUMNS = {
    "name": "VARCHAR",
    "n": "DOUBLE",
    "whole": "INTEGER",
    "ended": "TIMESTAMP",
    "nodes": "VARCHAR[]",
}
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
names = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\x1f"), min_size=1, max_size=9
)
seconds = st.integers(-(2**31), 2**33)
cells = st.tuples(
    st.none() | texts,
    st.none() | st.floats(allow_nan=False, allow_infinity=False),
    st.none() | st.integers(-(2**31), 2**31 - 1),
    st.none() | seconds,
    st.none() | st.lists(names, max_size=3),
)


def written(rows, columns=COLUMNS):
    with database() as connection:
        assert read_rows(connection, "jobs", columns, iter(rows)) == len(rows)
        return connection.execute("FROM jobs").fetchall()


@settings(max_examples=30, deadline=None)
@given(st.lists(cells, max_size=20))
def test_rows_arrive_as_they_were_sent(rows):
    epoch = datetime(1970, 1, 1)
    expected = [
        (*row[:3], None if row[3] is None else epoch + timedelta(seconds=row[3]), row[4])
        for row in rows
    ]
    assert written(rows) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        '"',
        "a,b",
        "two\nlines",
        "two\r\nlines",
        "\r",
        "NULL",
        "\\N",
        "a\x00b",
        "=1+1",
        "'; DROP TABLE jobs",
        "é漢🙂",
    ],
)
def test_texts_that_a_csv_file_finds_hard(text):
    assert written([(text,), (None,), (text,)], {"name": "VARCHAR"}) == [(text,), (None,), (text,)]


def test_times_with_and_without_a_zone_and_parts_of_seconds():
    aware = datetime(2023, 3, 1, 8, tzinfo=timezone(timedelta(hours=8)))
    times = [aware, datetime(2023, 3, 1), datetime(2023, 3, 1, tzinfo=UTC).timestamp() + 0.25]
    found = written([(one,) for one in times], {"at": "TIMESTAMP"})
    assert found == [(datetime(2023, 3, 1),)] * 2 + [(datetime(2023, 3, 1, microsecond=250_000),)]


def test_half_a_character_costs_that_character_alone():
    assert written([("a\ud800b",)], {"name": "VARCHAR"}) == [("a?b",)]


def test_many_rows_in_several_batches(monkeypatch):
    monkeypatch.setattr(module, "BATCH_ROWS", 7)
    rows = [(f"job {number}", number) for number in range(100)]
    assert written(rows, {"name": "VARCHAR", "n": "INTEGER"}) == rows


def test_no_rows_are_an_empty_table():
    assert written([]) == []


def test_what_the_iterator_raises_passes_and_no_table_is_left(tmp_path):
    def failing():
        yield ("a",)
        raise RuntimeError("the parser stops")

    with database() as connection:
        connection.execute(f"SET temp_directory = '{tmp_path}'")
        with pytest.raises(RuntimeError, match="the parser stops"):
            read_rows(connection, "jobs", {"name": "VARCHAR"}, failing())
        assert connection.execute("SHOW TABLES").fetchall() == []
        assert list(tmp_path.iterdir()) == []
