# ruff: noqa: DTZ001 - the times of a trace are UTC without a zone

import csv
from datetime import UTC, datetime, timedelta

import duckdb
import pytest
from source_files import dicts, published, read_in_order

from holdfast.core.errors import BadUse
from holdfast.trace.errors import BadTrace
from holdfast.trace.sources.csv.column_map import MAPPABLE, read_column_map
from holdfast.trace.sources.csv.mapped import mapped_source

KALOS_MAP = """
[columns]
job_id = "job_idx"
submit_at = {column = "arrival_s", unit = "s", origin = "2023-05-17T11:30:13Z"}
reported_duration_s = "duration_s"
node_num = "node_num"
gpu_num = "gpu_num"
cpu_num = "cpu_num"
mem_gb = {column = "mem_per_pod_GB"}
type = "type"
state = "state"

[types]
Other_or_SFT = "Other"

[cluster]
name = "Kalos"
nodes = 302
gpus_per_node = 8
utc_offset_h = 8
duration_counts_queue = true
"""


@pytest.fixture
def mapped(tmp_path):
    def write(text):
        path = tmp_path / "site.toml"
        path.write_text(text)
        return mapped_source(path)

    return write


def test_the_real_jobs_of_kalos_that_others_published(mapped):
    path = published("acme_kalos_converted/kalos_completed_pretrain_other_sft.csv")
    reading, rows = read_in_order(mapped(KALOS_MAP), path)
    released = dicts(path)
    assert len(rows) == len(released) == 319
    began = datetime(2023, 5, 17, 11, 30, 13)
    for job, row in zip(rows, released, strict=True):
        assert job["job_id"] == row["job_idx"]
        assert job["submit_at"] == began + timedelta(seconds=float(row["arrival_s"]))
        assert job["reported_duration_s"] == float(row["duration_s"])
        assert (job["gpu_num"], job["node_num"], job["cpu_num"]) == tuple(
            float(row[name]) for name in ("gpu_num", "node_num", "cpu_num")
        )
        assert job["type"] == {"Pretrain": "Pretrain", "Other_or_SFT": "Other"}[row["type"]]
        assert job["state"] == "COMPLETED"
    assert sum(row["type"] == "Pretrain" for row in rows) == 183
    assert max(row["reported_duration_s"] for row in rows if row["type"] == "Pretrain") == 625_740
    (cluster,) = reading.clusters
    assert (cluster.name, cluster.gpu_num, cluster.duration_counts_queue) == ("Kalos", 2416, True)
    assert "run_s" not in reading.columns


EVERYTHING = """
[columns]
job_id = "JobID"
cluster = "site"
username = {column = "JobID"}
gpu_num = {column = "gpus", scale = 0.01}
node_num = {column = "hosts_n"}
submit_at = {column = "submitted", zone = "Asia/Shanghai"}
start_at = {column = "started", format = "%d.%m.%Y %H:%M:%S", zone = "Europe/Berlin"}
end_at = {column = "ended", unit = "ms"}
nodes = {column = "hosts", separator = ";"}
state = "state"
type = "kind"

[states]
Done = "COMPLETED"
"Killed by user" = "CANCELLED"

[types]
Pretraining = "Pretrain"

[cluster]
gpus = 250
gpu_model = "H100"
"""


def test_every_form_of_a_column(mapped, tmp_path):
    path = tmp_path / "jobs.csv"
    ended_ms = int(datetime(2023, 7, 1, 12, 0, 1, 500_000, tzinfo=UTC).timestamp() * 1000)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            [
                "JobID",
                "site",
                "gpus",
                "hosts_n",
                "submitted",
                "started",
                "ended",
                "hosts",
                "state",
                "kind",
                "other",
                'odd"name',
            ]
        )
        writer.writerow(
            [
                "1",
                "north",
                "50",
                "2.0",
                "2023-07-01 19:59:00",
                "01.07.2023 14:00:00",
                ended_ms,
                "a; b",
                "Done",
                "Pretraining",
                "x",
                "",
            ]
        )
        writer.writerow(
            [
                "2",
                "south",
                "",
                "",
                "2023-07-01 20:00:00",
                "",
                "",
                "",
                "Killed by user",
                "SFT",
                "",
                "",
            ]
        )
        writer.writerow(["3", "south", "800", "1", "", "", "", "c", "FAILED", "Baking", "", ""])
        writer.writerow(["4", "south", "800", "1", "", "", "", "c", "Vanished", "", "", ""])
    reading, (first, second, third, fourth) = read_in_order(mapped(EVERYTHING), path)
    assert first["submit_at"] == datetime(2023, 7, 1, 11, 59)
    assert first["start_at"] == datetime(2023, 7, 1, 12)
    assert first["end_at"] == datetime(2023, 7, 1, 12, 0, 1, 500_000)
    assert (first["run_s"], first["queue_s"]) == (1.5, 60)
    assert (first["gpu_num"], first["node_num"], first["nodes"]) == (0.5, 2, ["a", "b"])
    assert (first["state"], first["type"], first["username"]) == ("COMPLETED", "Pretrain", "1")
    assert (second["state"], second["type"], second["nodes"], second["gpu_num"]) == (
        "CANCELLED",
        "SFT",
        None,
        None,
    )
    assert (third["state"], third["type"]) == ("FAILED", None)
    assert (fourth["state"], fourth["type"]) == ("UNKNOWN", None)
    assert [(one.name, one.gpu_num, one.gpu_model) for one in reading.clusters] == [
        ("north", 250, "H100"), ("south", 250, "H100"),
    ]  # fmt: skip


def test_times_follow_from_lengths(mapped, tmp_path):
    path = tmp_path / "jobs.csv"
    path.write_text("at,wait,ran\n2023-07-01 00:00:00+00:00,60,30\n")
    source = mapped(
        '[columns]\nsubmit_at = "at"\nqueue_s = "wait"\nrun_s = {column = "ran", scale = 60}\n'
    )
    _, (job,) = read_in_order(source, path)
    assert (job["start_at"], job["end_at"]) == (
        datetime(2023, 7, 1, 0, 1),
        datetime(2023, 7, 1, 0, 31),
    )
    assert (job["queue_s"], job["run_s"], job["cluster"]) == (60, 1800, "site")


def test_parquet_of_any_type_of_time(mapped, tmp_path):
    path = tmp_path / "jobs.parquet"
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'America/New_York'")
        connection.execute(
            f"""COPY (SELECT 1 AS id, 4::TINYINT AS gpus, TIMESTAMP '2023-07-01 20:00:00' AS submitted,
                TIMESTAMPTZ '2023-07-01 12:01:00+00:00' AS started, '2023-07-01T14:02:00+02:00' AS ended,
                ['a', 'b'] AS hosts)
                TO '{path}' (FORMAT parquet)"""
        )
    source = mapped(
        '[columns]\njob_id = "id"\ngpu_num = "gpus"\nsubmit_at = {column = "submitted", zone = "Asia/Shanghai"}\n'
        'start_at = "started"\nend_at = "ended"\nnodes = "hosts"\n[cluster]\nname = "P"\n'
    )
    assert source.recognises(path)
    _, (job,) = read_in_order(source, path)
    assert [job[f"{name}_at"] for name in ("submit", "start", "end")] == [
        datetime(2023, 7, 1, 12, n) for n in (0, 1, 2)
    ]
    assert (job["job_id"], job["gpu_num"], job["nodes"], job["run_s"]) == ("1", 4, ["a", "b"], 60)


def test_a_fault_of_the_file_is_said_with_its_place(mapped, tmp_path):
    path = tmp_path / "jobs.csv"
    path.write_text("JobID;gpus\n1;8\n2;many\n")
    source = mapped('[columns]\njob_id = "JobID"\ngpu_num = "gpus"\n[file]\ndelimiter = ";"\n')
    with pytest.raises(BadTrace) as error:
        read_in_order(source, path)
    assert (error.value.line, error.value.column) == (3, "gpus")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_column_that_the_file_has_not_is_said_with_those_it_has(mapped, tmp_path, suffix):
    path = tmp_path / f"jobs.{suffix}"
    with duckdb.connect() as connection:
        connection.execute(f"COPY (SELECT 1 AS id, 2 AS gpus) TO '{path}'")
    with pytest.raises(
        BadTrace,
        match=r"takes job_id from a column 'JobID', which is not there.*the file has id, gpus",
    ):
        read_in_order(mapped('[columns]\njob_id = "JobID"\n'), path)


def test_a_broken_or_empty_parquet_file(mapped, tmp_path):
    path = tmp_path / "jobs.parquet"
    path.write_bytes(b"PAR1 or not")
    with pytest.raises(BadTrace, match="It cannot be read"):
        read_in_order(mapped('[columns]\njob_id = "id"\n'), path)
    with duckdb.connect() as connection:
        connection.execute(f"COPY (SELECT 1 AS id WHERE false) TO '{path}'")
    with pytest.raises(BadTrace, match="It holds no job"):
        read_in_order(mapped('[columns]\njob_id = "id"\n'), path)


def test_one_column_cannot_be_a_number_and_a_text(mapped, tmp_path):
    path = tmp_path / "jobs.csv"
    path.write_text("n\n1\n")
    with pytest.raises(
        BadUse, match="takes job_id and gpu_num from 'n', one as a text and one as a number"
    ):
        read_in_order(mapped('[columns]\njob_id = "n"\ngpu_num = "n"\n'), path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[columns\n", "This is not a TOML file"),
        ("", "no [columns]"),
        ("[columns]\n", "no [columns]"),
        ("columns = 3\n", "columns: Expected a table"),
        (
            '[kolumns]\njob_id = "a"\n',
            "no section 'kolumns'. Allowed: columns, states, types, cluster, file",
        ),
        (
            '[columns]\njobid = "a"\n',
            f"columns.jobid: Jobs have no column 'jobid'. Allowed: {', '.join(MAPPABLE)}",
        ),
        ("[columns]\njob_id = 3\n", "columns.job_id: Expected the name of a column"),
        ("[columns]\ngpu_num = {scale = 3}\n", "Expected the name of a column"),
        (
            '[columns]\ngpu_num = {column = "a", factor = 3}\n',
            "There is no 'factor' here. Allowed: column, scale",
        ),
        ('[columns]\ngpu_num = {column = "a", sql = "1; DROP"}\n', "There is no 'sql' here"),
        (
            '[columns]\ngpu_num = {column = "a", scale = "x"}\n',
            "columns.gpu_num.scale: Expected a number, found 'x'",
        ),
        (
            '[columns]\njob_id = {column = "a", scale = 2}\n',
            "There is no 'scale' here. Allowed: column.",
        ),
        (
            '[columns]\nend_at = {column = "a", unit = "h"}\n',
            "columns.end_at.unit: Found 'h'. Allowed: s, ms, us, ns",
        ),
        (
            '[columns]\nend_at = {column = "a", zone = "Mars/Olympus"}\n',
            "no time zone 'Mars/Olympus'",
        ),
        (
            '[columns]\nend_at = {column = "a", unit = "s", zone = "UTC"}\n',
            "neither format nor zone",
        ),
        ('[columns]\nend_at = {column = "a", origin = "2023-01-01"}\n', "no unit is given"),
        (
            '[columns]\nend_at = {column = "a", unit = "s", origin = "soon"}\n',
            "Expected a time such as",
        ),
        (
            '[columns]\nnodes = {column = "a", separator = ""}\n',
            "Expected a text that separates names",
        ),
        (
            '[columns]\njob_id = "a"\n[states]\nDone = "FINE"\n',
            "states.Done: Found 'FINE'. Allowed: COMPLETED,",
        ),
        (
            '[columns]\njob_id = "a"\n[types]\nX = "Eval"\n',
            "types.X: Found 'Eval'. Allowed: Pretrain, Evaluation,",
        ),
        (
            '[columns]\njob_id = "a"\n[cluster]\nnodse = 3\n',
            "There is no 'nodse' here. Allowed: name, nodes,",
        ),
        (
            '[columns]\njob_id = "a"\n[cluster]\nnodes = 0\n',
            "cluster.nodes: Expected a number above 0",
        ),
        (
            '[columns]\njob_id = "a"\n[cluster]\nnodes = "3"\n',
            "cluster.nodes: Expected a whole number, found '3'",
        ),
        (
            '[columns]\njob_id = "a"\n[cluster]\nduration_counts_queue = 1\n',
            "Expected true or false, found 1",
        ),
        (
            '[columns]\njob_id = "a"\n[cluster]\ngpus = true\n',
            "Expected a whole number, found True",
        ),
        (
            '[columns]\njob_id = "a"\n[file]\nseparator = ";"\n',
            "There is no 'separator' here. Allowed: delimiter",
        ),
        (
            '[columns]\njob_id = "a"\n[file]\ndelimiter = ";;"\n',
            "Expected one character, found ';;'",
        ),
    ],
)
def test_a_wrong_map_is_refused_with_the_place_and_the_choices(tmp_path, text, words):
    path = tmp_path / "site.toml"
    path.write_text(text)
    with pytest.raises(BadUse) as error:
        read_column_map(path)
    assert words in str(error.value)
    assert str(error.value).startswith(str(path))


def test_the_reference_in_the_docstring_is_a_map(tmp_path):
    from holdfast.trace.sources.csv import mapped as module

    text = (module.__doc__ or "").split("\n\n", 1)[1].rpartition("\n\n`[columns]`")[0]
    first_end_at = text.index('    end_at    = {column = "ended_ms"')
    text = text[:first_end_at] + text[text.index('    end_at    = {column = "ended", unit = "s"') :]
    path = tmp_path / "site.toml"
    path.write_text(text)
    read = read_column_map(path)
    assert (read.cluster.name, read.cluster.gpu_num, read.columns["gpu_num"].scale) == (
        "Borealis",
        256,
        0.01,
    )


def test_a_map_that_is_not_there(tmp_path):
    with pytest.raises(BadUse, match="This is not a TOML file"):
        mapped_source(tmp_path / "site.toml")
