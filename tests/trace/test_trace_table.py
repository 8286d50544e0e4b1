"""Check the trace's database, and the small tables of query results."""

import csv
import io

import numpy as np
import pytest

from holdfast.core.errors import BadUse
from holdfast.trace.clusters import Cluster, known_first, together
from holdfast.trace.errors import LeftOut
from holdfast.trace.sources.reading import Reading
from holdfast.trace.table import Table
from holdfast.trace.trace import Trace, open_scratch


@pytest.fixture
def trace():
    connection, folder = open_scratch(memory_limit_mb=200)
    connection.execute(
        """CREATE TABLE jobs_0 AS SELECT * FROM (VALUES
            ('A', '1', 8.0, 100.0, TIMESTAMP '2023-03-01 00:00:00', 'COMPLETED', 3),
            ('A', '2', 0.0, NULL, NULL, NULL, NULL)) v(cluster, job_id, gpu_num, run_s, submit_at, state, node_num)"""
    )
    reading = Reading.of(connection, "jobs_0", Cluster(name="A", source="made-up"))
    with Trace(connection, folder, [reading], duration="run") as made:
        yield made


def test_missing_values_are_nan_nat_or_none(trace):
    found = trace.query(
        "SELECT run_s, node_num, submit_at, state, is_gpu, job_id FROM jobs ORDER BY job_id"
    )
    assert found["run_s"][0] == 100
    assert np.isnan(found["run_s"][1])
    assert found["node_num"][0] == 3
    assert np.isnan(found["node_num"][1])
    assert found["submit_at"][0] == np.datetime64("2023-03-01")
    assert np.isnat(found["submit_at"][1])
    assert found["state"].tolist() == ["COMPLETED", None]
    assert found["is_gpu"].tolist() == [True, False]


def test_what_the_trace_has(trace):
    assert trace.has("run_s", "state")
    assert not trace.has("pool")
    trace.require("run_s")
    with pytest.raises(LeftOut, match="the trace has no pool and no nodes"):
        trace.require("run_s", "pool", "nodes")
    with pytest.raises(LeftOut, match="no telemetry of SM_ACTIVE was given"):
        trace.require_metrics("SM_ACTIVE")
    trace.metrics |= {"SM_ACTIVE"}
    trace.require_metrics("SM_ACTIVE")
    assert trace.has_metrics("SM_ACTIVE")
    assert not trace.has_metrics("SM_ACTIVE", "GPU_UTIL")


def test_an_aggregate_is_computed_once_and_may_be_adopted(trace):
    assert trace.prepare("job_counts") == "agg_job_counts"
    first = trace.aggregate("job_counts")
    assert first["n"].sum() == 2
    trace.connection.execute("INSERT INTO jobs_0 SELECT * FROM jobs_0")
    assert trace.aggregate("job_counts") is first
    trace.adopt("job_counts", "SELECT 'A' AS cluster, 7 AS n")
    assert trace.aggregate("job_counts")["n"].tolist() == [7]
    with pytest.raises(LeftOut, match="the trace has no telemetry"):
        trace.aggregate("metric_hours")


def test_a_user_may_ask_anything_and_change_nothing(trace, tmp_path):
    secret = tmp_path / "secret.csv"
    secret.write_text("a\n1\n")
    assert trace.select("SELECT count(*) AS n FROM jobs")["n"].tolist() == [2]
    assert "run_s" in trace.select("DESCRIBE jobs")["column_name"]
    for sql in (
        "DROP TABLE jobs_0",
        "DELETE FROM jobs_0",
        "CREATE TABLE x AS SELECT 1",
        f"COPY jobs TO '{tmp_path}/out.csv'",
        f"ATTACH '{tmp_path}/other.db'",
        "SET enable_external_access = true",
        "SELECT 1; DROP TABLE jobs_0",
        "INSTALL httpfs",
        "",
    ):
        with pytest.raises(BadUse, match="single SELECT"):
            trace.select(sql)
    for sql in (
        f"SELECT * FROM '{secret}'",
        f"SELECT * FROM read_csv('{secret}')",
        f"SELECT * FROM read_text('{secret}')",
        f"SELECT * FROM glob('{tmp_path}/*')",
        f"SELECT * FROM read_parquet('{secret}')",
        f"SELECT * FROM query('SELECT * FROM ''{secret}''')",
    ):
        with pytest.raises(BadUse, match="cannot be answered"):
            trace.select(sql)
    with pytest.raises(BadUse, match="Did you mean"):
        trace.select("SELECT * FROM job")
    with pytest.raises(BadUse, match=r'cannot be answered.*"SELEC"\. Correct it'):
        trace.select("SELEC 1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret.csv"]
    assert trace.select("SELECT count(*) AS n FROM jobs")["n"].tolist() == [2]
    assert trace.aggregate("job_counts")["n"].sum() == 2, "analyses go on"


def test_a_view_over_a_folder_of_the_trace_can_still_be_read(trace, tmp_path):
    for name in ("mine", "other"):
        (tmp_path / name).mkdir()
        trace.connection.execute(f"COPY (SELECT 5 AS value) TO '{tmp_path}/{name}/part.parquet'")
    trace.connection.execute(
        f"CREATE VIEW samples AS FROM read_parquet('{tmp_path}/mine/part.parquet')"
    )
    trace.folders.append(tmp_path / "mine")
    assert trace.select("SELECT value FROM samples")["value"].tolist() == [5]
    with pytest.raises(BadUse, match="cannot be answered"):
        trace.select(f"FROM '{tmp_path}/other/part.parquet'")


def test_the_scratch_is_removed_and_spills_beside_the_database():
    connection, folder = open_scratch(memory_limit_mb=100)
    assert connection.execute("SELECT current_setting('temp_directory')").fetchall() == [
        (str(folder / "spill"),)
    ]
    assert connection.execute("SELECT current_setting('TimeZone')").fetchall() == [("UTC",)]
    connection.execute(
        "CREATE TABLE jobs_0 AS SELECT 'A' AS cluster, i AS run_s FROM range(10) t(i)"
    )
    reading = Reading.of(connection, "jobs_0", Cluster(name="A", source="x"))
    Trace(connection, folder, [reading], duration="run").close()
    assert not folder.exists()


def test_tables_from_rows_and_as_csv():
    table = Table.of_rows(["name", "n", "share"], [("a,b", 1, 0.1 + 0.2), (None, 2, float("nan"))])
    assert list(csv.reader(io.StringIO(table.csv()))) == [
        ["name", "n", "share"],
        ["a,b", "1", "0.3"],
        ["", "2", ""],
    ]
    assert len(table) == 2
    assert table.where(n=2)["name"].tolist() == [None]
    assert "n" in table
    assert next(iter(table.rows())) == ("a,b", 1, pytest.approx(0.3))
    assert len(Table({})) == 0


def test_times_as_csv_are_iso_8601():
    at = np.array(["2023-03-01T00:18:22", "NaT"], dtype="datetime64[us]")
    assert list(csv.reader(io.StringIO(Table({"at": at}).csv()))) == [
        ["at"],
        ["2023-03-01T00:18:22Z"],
        [""],
    ]


def test_tables_as_pandas_and_arrow():
    table = Table.of_rows(["name", "n"], [("a", 1), ("b", 2)])
    assert table.df().to_dict("list") == {"name": ["a", "b"], "n": [1, 2]}
    assert table.arrow().to_pydict() == {"name": ["a", "b"], "n": [1, 2]}


def test_what_is_known_of_a_cluster_from_two_sources():
    first = Cluster(name="A", source="x", gpu_num=8, gpu_model="")
    second = Cluster(name="A", source="y", gpu_num=16, gpu_model="H100", node_num=2)
    both = known_first(first, second)
    assert (both.source, both.gpu_num, both.gpu_model, both.node_num) == ("x", 8, "H100", 2)
    one = together([first, second], "both")
    assert (one.name, one.gpu_num, one.node_num, one.gpu_model) == ("both", 24, None, "")
