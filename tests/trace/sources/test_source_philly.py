# ruff: noqa: DTZ001 - the times of a trace are UTC without a zone

import json
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from normalised_rows import database
from source_files import dicts, published, read_in_order, sample_rows

from holdfast.trace.errors import BadTrace
from holdfast.trace.sources.published.philly import SOURCE

PACIFIC = ZoneInfo("America/Los_Angeles")


def utc(text, form="%Y-%m-%d %H:%M:%S"):
    return (
        datetime.strptime(text, form).replace(tzinfo=PACIFIC).astimezone(UTC).replace(tzinfo=None)
    )


def test_all_jobs_of_sias_form(tmp_path):
    path = published("philly_sia/philly.csv")
    released = dicts(path)
    with database() as connection:
        reading = SOURCE.read(connection, path, "jobs")
        count, gpus, run_s, gpu_time_s, first, last, pools = connection.execute(
            "SELECT count(*), sum(gpu_num), sum(run_s), sum(gpu_num * run_s), min(submit_at), max(submit_at), "
            "count(DISTINCT pool) FROM jobs"
        ).fetchall()[0]
        ends = connection.execute(
            "(SELECT * FROM jobs LIMIT 1) UNION ALL (SELECT * FROM jobs OFFSET 82246)"
        ).fetchall()
    assert count == len(released) == 82_247
    assert gpus == sum(int(row["num_gpus"]) for row in released)
    assert run_s == sum(float(row["duration"]) for row in released)
    assert gpu_time_s == sum(float(row["gpu_time"]) for row in released)
    times = sorted(utc(row["timestamp"]) for row in released)
    assert (first, last) == (times[0], times[-1])
    assert pools == len({row["cluster"] for row in released}) == 15
    names = (
        "cluster",
        "pool",
        "submit_at",
        "run_s",
        "reported_duration_s",
        "reported_gpu_time_s",
        "gpu_num",
        "zone_offset",
    )
    for found, row in zip(ends, (released[0], released[-1]), strict=True):
        duration_s, gpus = float(row["duration"]), float(row["num_gpus"])
        expected = (
            "Philly",
            row["cluster"],
            utc(row["timestamp"]),
            duration_s,
            duration_s,
            float(row["gpu_time"]),
            gpus,
            "",
        )
        assert found == expected
    assert reading.columns == frozenset(names)


def test_released_rows_of_acmetraces_form(tmp_path):
    path = sample_rows("philly", tmp_path)
    _, rows = read_in_order(SOURCE, path)
    found = {(row["job_id"], row["attempt"]): row for row in rows}
    for row in dicts(path):
        job_id, _, attempt = row["jobname"].rpartition("-attempt")
        job = found.pop((job_id, int(attempt)))
        form = "%Y/%m/%d %H:%M"
        assert job["submit_at"] == utc(row["submit_time"], form)
        assert job["run_s"] == job["reported_duration_s"] == float(row["duration"])
        assert job["queue_s"] == float(row["queue"])
        # The released times are rounded down to the minute.
        assert abs(job["start_at"] - utc(row["start_time"], form)) <= timedelta(seconds=60)
        assert abs(job["end_at"] - utc(row["end_time"], form)) <= timedelta(seconds=120)
        assert (job["end_at"] - job["start_at"]).total_seconds() == job["run_s"]
        nodes = [name.strip(" '\"") for name in row["node_list"].strip("[]").split(",")]
        assert (job["nodes"], job["node_num"]) == (nodes, len(nodes))
        assert job["gpu_num"] == float(row["gpu_num"])
        assert (
            job["state"]
            == {"Pass": "COMPLETED", "Killed": "CANCELLED", "Failed": "FAILED"}[row["state"]]
        )
        assert (job["username"], job["pool"]) == (row["user"], row["vc"])
    assert not found


def held(node, *gpus):
    return {"ip": node, "gpus": [f"gpu{gpu}" for gpu in gpus]}


def tried(start, end, *detail):
    return {"start_time": start, "end_time": end, "detail": list(detail)}


JOBS = [
    {
        "status": "Pass",
        "vc": "ee9e8c",
        "jobid": "application_1",
        "attempts": [
            tried("2017-10-07 01:12:09", "2017-10-07 01:13:23", held("m47", 0, 1, 7)),
            tried("2017-10-07 01:13:30", "2017-10-09 06:53:12", held("m4", 2), held("m5", 3)),
        ],
        "submitted_time": "2017-10-07 01:11:39",
        "user": "ce2f4c",
    },
    {
        "status": "Killed",
        "vc": "v",
        "jobid": "application_2",
        "attempts": [],
        "submitted_time": "2017-11-20 00:00:00",
        "user": "u",
    },
    {
        "status": "Failed",
        "vc": "v",
        "jobid": "application_3",
        "attempts": [tried("2017-11-20 00:00:05", None), tried(None, "None")],
        "submitted_time": "None",
        "user": None,
    },
]


def test_the_original_log_gives_a_row_an_attempt(tmp_path):
    path = tmp_path / "cluster_job_log"
    path.write_text(json.dumps(JOBS, indent=1))
    assert SOURCE.recognises(path)
    _, rows = read_in_order(SOURCE, path)
    first, second, never, third, fourth = rows
    assert [row["job_id"] for row in rows] == [f"application_{n}" for n in (1, 1, 2, 3, 3)]
    assert [row["attempt"] for row in rows] == [0, 1, 0, 0, 1]
    assert [row["state"] for row in rows] == [
        "FAILED",
        "COMPLETED",
        "CANCELLED",
        "FAILED",
        "FAILED",
    ]
    assert first["submit_at"] == second["submit_at"] == datetime(2017, 10, 7, 8, 11, 39)
    assert (first["start_at"], first["end_at"]) == (
        datetime(2017, 10, 7, 8, 12, 9),
        datetime(2017, 10, 7, 8, 13, 23),
    )
    assert (first["run_s"], first["queue_s"], second["queue_s"]) == (74, 30, 7)
    assert (
        second["run_s"]
        == (datetime(2017, 10, 9, 6, 53, 12) - datetime(2017, 10, 7, 1, 13, 30)).total_seconds()
    )
    assert (first["gpus"], first["nodes"], first["gpu_num"]) == (
        ["m47-0", "m47-1", "m47-7"],
        ["m47"],
        3,
    )
    assert (second["gpus"], second["nodes"], second["node_num"]) == (
        ["m4-2", "m5-3"],
        ["m4", "m5"],
        2,
    )
    # Pacific winter time; a job that never ran holds an unknown number of GPUs.
    assert never["submit_at"] == datetime(2017, 11, 20, 8)
    assert (never["start_at"], never["run_s"], never["gpu_num"], never["nodes"]) == (
        None,
        None,
        None,
        None,
    )
    assert (third["submit_at"], third["username"], third["end_at"]) == (None, None, None)
    assert (fourth["start_at"], fourth["queue_s"]) == (None, None)


def test_the_hour_that_comes_twice_is_the_second_one_in_every_form(tmp_path):
    path = tmp_path / "cluster_job_log"
    path.write_text(json.dumps([{**JOBS[1], "submitted_time": "2017-11-05 01:30:00"}]))
    _, (from_log,) = read_in_order(SOURCE, path)
    path.write_text("timestamp,duration,num_gpus,gpu_time,cluster\n2017-11-05 01:30:00,1,1,1,x\n")
    with database() as connection:
        SOURCE.read(connection, path, "jobs")
        ((from_csv,),) = connection.execute("SELECT submit_at FROM jobs").fetchall()
    assert from_log["submit_at"] == from_csv == datetime(2017, 11, 5, 9, 30)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (json.dumps(JOBS, indent=1)[:-40], None),
        (json.dumps([{**JOBS[0], "submitted_time": "yesterday"}]), 1),
        (
            "[\n"
            + json.dumps({**JOBS[1]})
            + ",\n"
            + json.dumps({**JOBS[0], "attempts": [{"start_time": None}]})
            + "]",
            3,
        ),
        ("[\n" + json.dumps(JOBS[1]) + ",\n7]", 3),
    ],
)
def test_a_damaged_log_is_an_error_with_its_line(tmp_path, text, line):
    path = tmp_path / "cluster_job_log"
    path.write_text(text)
    with database() as connection, pytest.raises(BadTrace) as error:
        SOURCE.read(connection, path, "jobs")
    assert error.value.line == line or line is None


def test_a_long_log_is_streamed(tmp_path):
    path = tmp_path / "cluster_job_log"
    with path.open("w") as file:
        file.write("[")
        for number in range(20_000):
            file.write(
                ("," if number else "") + json.dumps({**JOBS[0], "jobid": f"application_{number}"})
            )
        file.write("]")
    with database() as connection:
        SOURCE.read(connection, path, "jobs")
        found = connection.execute(
            "SELECT count(*), count(DISTINCT job_id), sum(run_s) FROM jobs"
        ).fetchall()[0]
    run_s = (
        74 + (datetime(2017, 10, 9, 6, 53, 12) - datetime(2017, 10, 7, 1, 13, 30)).total_seconds()
    )
    assert found == (40_000, 20_000, 20_000 * run_s)
