from datetime import UTC, datetime

import pytest
from normalised_rows import database
from source_files import dicts, published, read_in_order

from holdfast.trace.errors import BadTrace
from holdfast.trace.sources.published.openb import SOURCE

HEADER = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"  # noqa: E501


def test_all_pods_of_the_default_list():
    path = published("alibaba_v2023_openb/openb_pod_list_default.csv")
    reading, rows = read_in_order(SOURCE, path)
    released = dicts(path)
    assert len(rows) == len(released) == 8152
    for job, row in zip(rows, released, strict=True):
        created, scheduled, deleted = (
            float(row[f"{name}_time"]) if row[f"{name}_time"] else None
            for name in ("creation", "scheduled", "deletion")
        )
        assert job["gpu_num"] == pytest.approx(int(row["num_gpu"]) * int(row["gpu_milli"]) / 1000)
        assert job["submit_at"] == datetime.fromtimestamp(created, UTC).replace(tzinfo=None)
        assert job["run_s"] == (None if scheduled is None else deleted - scheduled)
        assert job["queue_s"] == (None if scheduled is None else scheduled - created)
        assert (job["start_at"] is None) == (scheduled is None)
        assert (job["cpu_num"], job["mem_gb"]) == (
            int(row["cpu_milli"]) / 1000,
            int(row["memory_mib"]) / 1024,
        )
        assert job["pool"] == row["qos"]
    states = {row["state"]: 0 for row in rows}
    for row in rows:
        states[row["state"]] += 1
    assert states == {"RUNNING": 5193, "FAILED": 1870, "PENDING": 897, "COMPLETED": 192}
    (cluster,) = reading.clusters
    nodes = [int(row["gpu"]) for row in dicts(path.with_name("openb_node_list_gpu_node.csv"))]
    assert (
        (cluster.name, cluster.node_num, cluster.gpu_num)
        == ("openb", len(nodes), sum(nodes))
        == ("openb", 1213, 6212)
    )
    assert cluster.gpus_per_node is None


def test_a_sampled_list_has_sizes_and_no_times():
    path = published("alibaba_v2023_openb/openb_pod_list_multigpu50.csv")
    released = dicts(path)
    with database() as connection:
        reading = SOURCE.read(connection, path, "jobs")
        count, gpus = connection.execute("SELECT count(*), sum(gpu_num) FROM jobs").fetchall()[0]
    assert count == len(released) == 9061
    assert gpus == pytest.approx(
        sum(int(row["num_gpu"]) * int(row["gpu_milli"]) / 1000 for row in released)
    )
    assert not reading.columns & {"submit_at", "start_at", "end_at", "run_s", "queue_s", "state"}
    assert reading.clusters[0].name == "openb-multigpu50"


def test_a_list_without_nodes_beside_it_has_no_size(tmp_path):
    path = tmp_path / "pods.csv"
    path.write_text(
        HEADER
        + "a,1000,1024,1,250,V100M16|V100M32,BE,Succeeded,10,100,20\nb,1000,1024,0,0,,BE,Pending,5,9,\n"
    )
    reading, (shared, cpu) = read_in_order(SOURCE, path)
    assert (shared["gpu_num"], shared["run_s"], shared["queue_s"], shared["state"]) == (
        0.25,
        80,
        10,
        "COMPLETED",
    )
    assert (cpu["gpu_num"], cpu["start_at"], cpu["run_s"], cpu["state"]) == (
        0,
        None,
        None,
        "PENDING",
    )
    assert (reading.clusters[0].name, reading.clusters[0].gpu_num) == ("openb", None)
    assert "gpu_model" not in reading.columns


def test_nodes_of_one_kind_give_gpus_of_each(tmp_path):
    path = tmp_path / "openb_pod_list_default.csv"
    path.write_text(HEADER + "a,1000,1024,1,250,,BE,Succeeded,10,100,20\n")
    nodes = tmp_path / "openb_node_list_all_node.csv"
    nodes.write_text("sn,cpu_milli,memory_mib,gpu,model\nn0,1,1,8,A100\nn1,1,1,0,\nn2,1,1,8,A100\n")
    (cluster,) = read_in_order(SOURCE, path)[0].clusters
    assert (cluster.node_num, cluster.gpus_per_node, cluster.gpu_num, cluster.gpu_model) == (
        2,
        8,
        16,
        "A100",
    )
    nodes.write_text("sn,gpu\nn0,eight\n")
    with pytest.raises(BadTrace, match="column 'gpu'"):
        read_in_order(SOURCE, path)
