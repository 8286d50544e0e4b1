"""Join reasons recorded beside the jobs."""

import re

import pytest
from normalised_rows import database

from holdfast.trace.clusters import Cluster
from holdfast.trace.errors import BadTrace
from holdfast.trace.sources.csv.reasons import join_reasons
from holdfast.trace.sources.reading import Reading

JOBS = [
    ("1", 0, "FAILED"), ("2", 0, "COMPLETED"), ("3", 0, "FAILED"), ("3", 1, "NODE_FAIL"), ("3", 2, "COMPLETED"),
    ("4", 0, "TIMEOUT"), ("5", 0, None), ("6", 0, "FAILED"),
]  # fmt: skip


@pytest.fixture
def connection():
    with database() as connection:
        connection.execute("CREATE TABLE jobs_0 (job_id VARCHAR, attempt INTEGER, state VARCHAR)")
        connection.executemany("INSERT INTO jobs_0 VALUES (?, ?, ?)", JOBS)
        yield connection


def join(connection, path, text, *columns):
    path.write_text(text)
    known = Reading.of(connection, "jobs_0", Cluster(name="X", source="made"))
    reading = join_reasons(connection, known, path)
    assert reading.columns == known.columns | {"reason"}
    assert {row[0] for row in connection.execute("SHOW TABLES").fetchall()} == {"jobs_0"}
    attempt = "attempt" if "attempt" in reading.columns else "0"
    rows = connection.execute(
        f"SELECT job_id, {attempt}, reason FROM jobs_0 WHERE reason IS NOT NULL ORDER BY 1, 2"
    )
    notes = {note.check: (note.rows, note.action, note.examples) for note in reading.notes}
    return {(job, attempt): reason for job, attempt, reason in rows.fetchall()}, notes


def test_reasons_are_given_to_failures_and_the_rest_is_counted(connection, tmp_path):
    text = "job_id,reason,category\n1,ECCError,x\n2,KeyError,\n4,my own,\n5,KeyError,\n9,KeyError,\n8,KeyError,\n6,,\n"
    found, notes = join(connection, tmp_path / "r.csv", text)
    assert found == {("1", 0): "ECCError", ("4", 0): "my own"}
    assert notes == {
        "reason-given": (2, "kept", ()),
        "reason-of-no-job": (2, "dropped", ("8", "9")),
        "reason-of-no-failure": (2, "dropped", ("2", "5")),
    }


def test_a_reason_is_of_every_failed_attempt_or_of_the_one_named(connection, tmp_path):
    found, notes = join(
        connection, tmp_path / "r.csv", "attempt,job_id,reason\n,3,NVLinkError\n1,3,NodeFailure\n"
    )
    assert found == {("3", 0): "NVLinkError", ("3", 1): "NodeFailure"}
    assert notes == {"reason-given": (2, "kept", ())}


def test_a_job_without_attempts_is_its_first(connection, tmp_path):
    connection.execute("ALTER TABLE jobs_0 DROP COLUMN attempt")
    found, notes = join(
        connection, tmp_path / "r.csv", "attempt,job_id,reason\n0,1,ECCError\n1,6,ECCError\n"
    )
    assert found == {("1", 0): "ECCError"}
    assert notes["reason-of-no-job"] == (1, "dropped", ("6",))


def test_the_first_of_several_rows_counts_and_goes_before_what_was_there(connection, tmp_path):
    connection.execute("ALTER TABLE jobs_0 ADD COLUMN reason VARCHAR DEFAULT 'old'")
    found, notes = join(
        connection, tmp_path / "r.csv", "job_id,reason\n1,ECCError\n1,KeyError\n1,ECCError\n"
    )
    assert found[("1", 0)] == "ECCError"
    assert found[("6", 0)] == "old"
    assert notes["reason-twice"] == (2, "dropped", ("1",))


@pytest.mark.parametrize(
    ("text", "line", "column", "words"),
    [
        ("job,reason\n1,x\n", 1, None, "it has no job_id. Write a CSV file with a header"),
        ("job_id\n1\n", 1, None, "it has no reason."),
        (
            "job_id,reason,attempt\n1,x,0\n2,y,first\n",
            3,
            "attempt",
            "Expected a whole number, found 'first'",
        ),
    ],
)
def test_a_file_that_cannot_be_read_says_where_and_changes_nothing(
    connection, tmp_path, text, line, column, words
):
    before = connection.execute("FROM jobs_0").fetchall()
    with pytest.raises(BadTrace, match=re.escape(words)) as caught:
        join(connection, tmp_path / "r.csv", text)
    assert (caught.value.line, caught.value.column) == (line, column)
    assert connection.execute("FROM jobs_0").fetchall() == before


def test_several_clusters_of_a_table_have_the_column_then(connection, tmp_path):
    (tmp_path / "r.csv").write_text("job_id,reason\n1,ECCError\n")
    clusters = [Cluster(name=name, source="made") for name in "XY"]
    connection.execute("ALTER TABLE jobs_0 ADD COLUMN reason VARCHAR")
    known = Reading.of(connection, "jobs_0", *clusters)
    known = Reading(
        table="jobs_0",
        columns=known.columns,
        clusters=known.clusters,
        lacking={"Y": frozenset({"reason", "attempt"})},
    )
    reading = join_reasons(connection, known, tmp_path / "r.csv")
    assert reading.columns_of("Y") == {"job_id", "state", "reason"}
