from datetime import UTC, datetime

from source_files import dicts, read_in_order, sample_rows

from holdfast.trace.sources.published.pai import SOURCE


def at(seconds):
    return datetime.fromtimestamp(float(seconds), UTC).replace(tzinfo=None) if seconds else None


def number(text, divided_by=1):
    return float(text) / divided_by if text else None


def test_released_rows_of_the_joined_form(tmp_path):
    path = sample_rows("pai", tmp_path)
    reading, rows = read_in_order(SOURCE, path)
    released = dicts(path)
    assert len(rows) == len(released) == 10
    for job, row in zip(rows, released, strict=True):
        assert (job["submit_at"], job["start_at"], job["end_at"]) == (
            at(row["start_time"]), at(row["start_time_i"]), at(row["end_time_i"]),
        )  # fmt: skip
        assert job["run_s"] == job["reported_duration_s"] == number(row["duration"])
        assert job["queue_s"] == number(row["queue"])
        assert job["gpu_num"] == (number(row["plan_gpu"], 100) or 0)
        assert (job["cpu_num"], job["mem_gb"]) == (
            number(row["plan_cpu"], 100),
            number(row["plan_mem"]),
        )
        assert (
            job["state"]
            == {"Terminated": "COMPLETED", "Failed": "FAILED", "Running": "RUNNING"}[row["status"]]
        )
        assert (job["gpu_model"], job["name"]) == (row["gpu_type"] or None, row["task_name"])
        # The hour of the day is right in the users' local time.
        shown = datetime.fromisoformat(row["start_date"])
        assert (job["submit_at"].hour + reading.clusters[0].utc_offset_h) % 24 == shown.hour
    assert not reading.columns & {"job_id", "username"}


def test_the_table_of_tasks_has_no_header_and_counts_all_instances(tmp_path):
    path = tmp_path / "pai_task_table.csv"
    path.write_text(
        "4f057009a5d481acec67b088,worker,3.0,Terminated,1739162.0,1739200.0,600.0,29.296875,50.0,MISC\n"
        "4f057009a5d481acec67b088,ps,1.0,Waiting,,,400.0,10.0,,\n"
    )
    assert SOURCE.recognises(path)
    _, (worker, ps) = read_in_order(SOURCE, path)
    assert (worker["job_id"], worker["name"]) == ("4f057009a5d481acec67b088/worker", "worker")
    assert (worker["gpu_num"], worker["cpu_num"], worker["mem_gb"]) == (1.5, 18, 3 * 29.296875)
    assert (worker["run_s"], worker["start_at"], worker["state"]) == (
        38,
        at("1739162.0"),
        "COMPLETED",
    )
    assert (ps["gpu_num"], ps["start_at"], ps["state"], ps["gpu_model"]) == (
        0,
        None,
        "PENDING",
        None,
    )


def test_another_file_of_ten_columns_is_not_it(tmp_path):
    path = tmp_path / "tasks.csv"
    path.write_text("a,b,c,d,e,f,g,h,i,j\n")
    assert not SOURCE.recognises(path)
