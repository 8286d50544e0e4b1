from datetime import datetime, timedelta

from source_files import dicts, read_in_order, sample_rows

from holdfast.trace.sources.published.helios import SOURCE

HEADER = (
    "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n"
)


def test_released_rows_of_all_four_clusters(tmp_path):
    path = sample_rows("helios", tmp_path)
    reading, rows = read_in_order(SOURCE, path)
    found = {row["job_id"]: row for row in rows}
    assert len(found) == 10
    for row in dicts(path):
        job = found[row["job_id"]]
        local = [
            datetime.fromisoformat(row[f"{name}_time"]) - timedelta(hours=8)
            for name in ("submit", "start", "end")
        ]
        assert [job["submit_at"], job["start_at"], job["end_at"]] == local
        assert job["run_s"] == job["reported_duration_s"] == float(row["duration"])
        assert job["queue_s"] == float(row["queue"])
        assert (job["cluster"], job["pool"], job["username"]) == (
            row["cluster"],
            row["vc"],
            row["user"],
        )
        assert (job["state"], job["gpu_num"], job["node_num"]) == (
            row["state"],
            float(row["gpu_num"]),
            int(row["node_num"]),
        )
    sizes = {cluster.name: cluster.gpu_num for cluster in reading.clusters}
    assert sizes == {"Uranus": 2112, "Venus": 1064}


def test_a_cluster_is_named_by_its_folder(tmp_path):
    (tmp_path / "Earth").mkdir()
    path = tmp_path / "Earth" / "cluster_log.csv"
    path.write_text(
        HEADER
        + "1,u1,vc1,1,1,1,SUSPENDED,2020-06-09 18:41:01,2020-06-09 18:41:01,2020-06-10 04:55:09,36848,0\n"
    )
    assert SOURCE.recognises(path)
    reading, (job,) = read_in_order(SOURCE, path)
    assert (job["cluster"], job["run_s"], job["zone_offset"]) == ("Earth", 36848, "")
    assert [(cluster.name, cluster.gpu_num) for cluster in reading.clusters] == [("Earth", 143 * 8)]


def test_the_four_clusters_have_as_many_gpus_as_the_study_says():
    from holdfast.trace.sources.published.helios import NODES

    assert sum(NODES.values()) * 8 == 6416
