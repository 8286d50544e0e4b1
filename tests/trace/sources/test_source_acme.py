from datetime import UTC, datetime

import pytest
from source_files import dicts, published, read_in_order, sample_rows

from holdfast.trace.sources.published.acme import KALOS, SEREN, SOURCE
from holdfast.trace.sources.recognition import Input, recognised

SEREN_HEADER = "job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time,duration,queue,gpu_time\n"  # noqa: E501
KALOS_HEADER = (
    "job_id,user,node_num,gpu_num,cpu_num,mem_per_pod_GB,shared_mem_per_pod,type,state,submit_time,start_time,end_time,"
    "fail_time,stop_time,duration,queue,gpu_time\n"
)


def utc(text):
    return datetime.fromisoformat(text).astimezone(UTC).replace(tzinfo=None) if text else None


@pytest.mark.parametrize(("trace", "cluster"), [("seren", SEREN), ("kalos", KALOS)])
def test_released_rows_are_read_as_the_csv_module_reads_them(tmp_path, trace, cluster):
    path = sample_rows(trace, tmp_path)
    reading, rows = read_in_order(SOURCE, path)
    assert reading.clusters == (cluster,)
    found = {row["job_id"]: row for row in rows}
    released = dicts(path)
    assert len(found) == len(rows) == len(released) == (10 if trace == "seren" else 17)
    for row in released:
        job = found[row["job_id"]]
        submit, start, end = (utc(row[f"{name}_time"]) for name in ("submit", "start", "end"))
        assert (job["submit_at"], job["start_at"], job["end_at"]) == (submit, start, end)
        running = row["state"] == "RUNNING"
        assert job["run_s"] == (
            float(row["duration"]) - float(row["queue"])
            if running
            else (end - start).total_seconds()
        )
        assert job["queue_s"] == (start - submit).total_seconds() == float(row["queue"])
        assert job["reported_duration_s"] == float(row["duration"])
        assert job["reported_gpu_time_s"] == float(row["gpu_time"])
        assert (job["gpu_num"], job["node_num"], job["cpu_num"]) == tuple(
            float(row[name]) for name in ("gpu_num", "node_num", "cpu_num")
        )
        assert job["state"] == row["state"]
        assert job["type"] == {"Eval": "Evaluation"}.get(row["type"], row["type"])
        assert job["username"] == row["user"]
        assert job["zone_offset"] == row["submit_time"][-6:]


def test_released_durations_of_kalos_count_the_queue_and_those_of_seren_do_not(tmp_path):
    for trace in ("seren", "kalos"):
        reading, rows = read_in_order(SOURCE, sample_rows(trace, tmp_path))
        (cluster,) = reading.clusters
        for row in rows:
            queue_s = row["queue_s"] if cluster.duration_counts_queue else 0
            assert row["reported_duration_s"] == row["run_s"] + queue_s


def test_the_clusters_are_as_the_study_says():
    assert (SEREN.node_num, SEREN.gpu_num, KALOS.node_num, KALOS.gpu_num) == (286, 2288, 302, 2416)
    assert SEREN.utc_offset_h == KALOS.utc_offset_h == 8
    assert SEREN.gpu_tdp_w == 400


def test_kalos_memory_is_of_the_whole_job_and_jobs_without_gpus_stay(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(
        KALOS_HEADER
        + "a,u1,4,0,64,100,,,COMPLETED,2023-06-01 00:00:00+00:00,2023-06-01 00:00:10+00:00,2023-06-01 00:01:10+00:00,"
        + ",,70,10.0,0.0\n"
        + "b,u1,1,8,64,,,Eval,CANCELLED,2023-06-01 00:00:00+00:00,,,,,30,,240\n"
        + "c,u1,1,8,64,,,Juggling,EXPLODED,2023-06-01 00:00:00+00:00,,,,,,,\n"
    )
    _, (cpu, never_started, odd) = read_in_order(SOURCE, path)
    assert (cpu["mem_gb"], cpu["gpu_num"], cpu["type"], cpu["run_s"]) == (400, 0, None, 60)
    assert (never_started["start_at"], never_started["run_s"], never_started["queue_s"]) == (
        None,
        None,
        None,
    )
    assert never_started["reported_duration_s"] == 30
    assert (odd["type"], odd["state"]) == (None, "UNKNOWN")


def test_preempted_jobs_and_numbers_that_pandas_wrote_as_floats(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(
        SEREN_HEADER
        + "1,u1,2.0,16.0,8,Pretrain,PREEMPTED,2023-06-01 08:00:00+08:00,2023-06-01 08:00:00+08:00,"
        + "2023-06-01 08:00:05+08:00,5,0,80.0\n"
    )
    _, (job,) = read_in_order(SOURCE, path)
    assert (job["node_num"], job["gpu_num"], job["state"]) == (2, 16, "PREEMPTED")


def test_it_is_known_by_its_header_whatever_its_name(tmp_path):
    path = tmp_path / "anything.txt"
    path.write_text(SEREN_HEADER)
    ((_, source),) = recognised(Input(path=path), None, [])
    assert source.name == "acme"
    path.write_text("job_id,user\n")
    assert not SOURCE.recognises(path)
    assert not SOURCE.recognises(tmp_path)
    assert not SOURCE.recognises(tmp_path / "not-there.csv")


def test_published_figures_are_not_taken_for_jobs():
    assert not any(
        SOURCE.recognises(path) for path in published("acme_figure_curves").glob("*.csv")
    )


def test_a_trace_called_after_another_cluster_is_not_taken_for_the_published_one(tmp_path):
    row = "1,u,1,8,64,SFT,COMPLETED,{0},{0},{0},0,0,0\n".format("2024-01-02 10:00:00+05:30")
    for name, expected in [
        ("trace_mine", "mine"),
        ("trace_Seren", "Seren"),
        ("trace_x_y", "Seren"),
        ("jobs", "Seren"),
    ]:
        path = tmp_path / f"{name}.csv"
        path.write_text(SEREN_HEADER + row)
        reading, (job,) = read_in_order(SOURCE, path)
        (cluster,) = reading.clusters
        assert (cluster.name, job["cluster"]) == (expected, expected)
        if expected == "mine":
            assert (cluster.gpu_num, cluster.citation, cluster.utc_offset_h) == (None, "", 5.5)
        else:
            assert cluster == SEREN
