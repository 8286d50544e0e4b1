import json
from functools import partial

import pytest
import yaml
from kubernetes_objects import asks, at, job, pod, read_objects, seconds, terminated
from normalised_rows import notes_of, read_file

from holdfast.trace.errors import BadTrace
from holdfast.trace.sources.kubernetes.jobs import SOURCE
from holdfast.trace.sources.kubernetes.quantity import quantity
from holdfast.trace.sources.kubernetes.resources import gpu_model_of, of_pod, of_resources


@pytest.fixture
def read(tmp_path):
    return partial(read_objects, tmp_path)


@pytest.mark.parametrize("form", ["list", "lines"])
def test_a_pod_of_its_own_is_a_job(read, form):
    reading, (row,) = read(pod("alone", 10, 25, 125), form=form)
    assert seconds(row) == (10, 25, 125)
    row = {name: value for name, value in row.items() if not name.endswith("_at")}
    assert row == {
        "cluster": "prod", "job_id": "lab/pod/alone", "attempt": 0, "name": "alone", "pool": "lab",
        "state": "COMPLETED", "reason": None, "exit_code": 0, "run_s": 100.0, "queue_s": 15.0, "gpu_num": 8.0,
        "node_num": 1, "cpu_num": 0.5, "mem_gb": 2.0, "gpu_model": None, "nodes": ["n1"], "zone_offset": "+00:00",
    }  # fmt: skip
    assert reading.clusters[0].source == "kubernetes"


def test_a_list_of_which_the_items_do_not_say_their_kind(tmp_path):
    one, two = pod("a", 10, 25, 125), job("b", 5, 6, 50, condition="Complete")
    for item in (one, two):
        del item["kind"], item["apiVersion"]
    path = tmp_path / "prod.json"
    path.write_text(
        json.dumps({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": [one, two]})
    )
    assert SOURCE.recognises(path)
    _, rows = read_file(SOURCE, path)
    assert [row["job_id"] for row in rows] == ["lab/job/b", "lab/pod/a"]


@pytest.mark.parametrize(
    ("changes", "state", "reason", "exit_code"),
    [
        ({"code": 1}, "FAILED", None, 1),
        ({"code": 137, "reason": "OOMKilled"}, "OUT_OF_MEMORY", "OOMKilled", 137),
        (
            {"code": 137, "reason": "ContainerStatusUnknown"},
            "NODE_FAIL",
            "ContainerStatusUnknown",
            137,
        ),
        ({"code": 1, "status": {"reason": "Evicted"}}, "FAILED", "Evicted", 1),
        (
            {"code": 143, "status": {"reason": "DeadlineExceeded"}},
            "TIMEOUT",
            "DeadlineExceeded",
            143,
        ),
        ({"code": 143, "status": {"reason": "NodeLost"}}, "NODE_FAIL", "NodeLost", 143),
        ({"code": 143, "status": {"reason": "Terminated"}}, "NODE_FAIL", "Terminated", 143),
        ({"code": 143, "status": {"reason": "Preempting"}}, "PREEMPTED", "Preempting", 143),
        ({"phase": "Unknown"}, "UNKNOWN", None, None),
    ],
)
def test_how_a_pod_ended(read, changes, state, reason, exit_code):
    _, (row,) = read(pod("a", 0, 10, 20, **changes))
    assert (row["state"], row["reason"], row["exit_code"]) == (state, reason, exit_code)


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        ("PreemptionByScheduler", "PREEMPTED"),
        ("EvictionByEvictionAPI", "PREEMPTED"),
        ("DeletionByTaintManager", "NODE_FAIL"),
        ("TerminationByKubelet", "FAILED"),
    ],
)
def test_a_pod_that_was_disrupted_ends_when_it_was_where_no_container_says(read, reason, state):
    conditions = [
        {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": reason,
            "lastTransitionTime": at(90),
        }
    ]
    status = {"conditions": conditions, "containerStatuses": [], "phase": "Failed"}
    _, (row,) = read(pod("a", 0, 10, 20, status=status))
    assert (row["state"], row["reason"], seconds(row)) == (state, reason, (0, 10, 90))


def test_the_container_that_failed_first_tells(read):
    statuses = [terminated(10, 80, 143), terminated(10, 60, 3), terminated(10, 90)]
    _, (row,) = read(pod("a", 0, 10, 20, phase="Failed", status={"containerStatuses": statuses}))
    assert (row["exit_code"], seconds(row)) == (3, (0, 10, 90))


def test_pods_that_wait_and_pods_whose_images_are_pulled(read):
    pulling = pod("b", 0, 30, phase="Pending")
    pulling["status"]["containerStatuses"] = [
        {"name": "main", "state": {"waiting": {"reason": "ImagePullBackOff"}}}
    ]
    _, (waiting, held) = read(pod("a", 0), pulling)
    assert (waiting["state"], waiting["gpu_num"], waiting["nodes"], seconds(waiting)) == (
        "PENDING", 8, None, (0, None, None),
    )  # fmt: skip
    assert (held["state"], seconds(held)) == ("RUNNING", (0, 30, None))  # its GPUs are its own


def test_pods_of_one_job_are_one_job_of_several_nodes(read):
    owner = ("PyTorchJob", "llm")
    _, (row,) = read(
        pod("llm-worker-0", 6, 40, 200, owner=owner, node="n2"),
        pod("llm-master-0", 5, 30, 210, owner=owner, node="n1"),
        pod("llm-worker-1", 7, 35, 205, owner=owner, node="n3"),
    )
    assert (row["job_id"], row["name"], row["state"]) == ("lab/pytorchjob/llm", "llm", "COMPLETED")
    assert seconds(row) == (5, 40, 210)
    assert (row["gpu_num"], row["node_num"], row["nodes"], row["cpu_num"]) == (
        24,
        3,
        ["n1", "n2", "n3"],
        1.5,
    )


def test_the_failure_that_came_first_is_the_jobs(read):
    owner = ("PyTorchJob", "llm")
    _, (row,) = read(
        pod("a", 0, 10, 205, owner=owner, code=143),
        pod("b", 0, 10, 200, owner=owner, code=137, reason="OOMKilled"),
        pod("c", 0, 10, 210, owner=owner),
    )
    assert (row["state"], row["reason"], row["exit_code"]) == ("OUT_OF_MEMORY", "OOMKilled", 137)


def test_a_job_runs_while_one_of_its_pods_does(read):
    owner = ("RayCluster", "ray")
    _, (row,) = read(
        pod("a", 0, 10, 200, owner=owner), pod("b", 0, 15, owner=owner), pod("c", 0, owner=owner)
    )
    assert (row["state"], seconds(row), row["gpu_num"]) == ("RUNNING", (0, 15, None), 16)


@pytest.mark.parametrize(
    ("label", "kind"),
    [
        ("jobset.sigs.k8s.io/jobset-name", "jobset"),
        ("training.kubeflow.org/job-name", "kubeflow"),
        ("ray.io/cluster", "ray"),
        ("volcano.sh/job-name", "volcano"),
    ],
)
def test_pods_of_several_controllers_are_one_job_by_their_operators_label(read, label, kind):
    _, (row,) = read(
        pod("a", 0, 10, 20, owner=("Job", "x-launcher"), labels={label: "x"}, gpus=0),
        pod("b", 0, 10, 20, owner=("Job", "x-workers"), labels={label: "x"}),
    )
    assert (row["job_id"], row["gpu_num"]) == (f"lab/{kind}/x", 8)


def test_pods_made_after_the_ones_before_had_ended_are_the_next_attempt(read):
    owner = ("Job", "train")
    _, rows = read(
        pod("train-c", 250, 260, owner=owner),
        pod("train-a", 0, 10, 100, owner=owner, code=1),
        pod("train-b", 101, 120, 250, owner=owner, code=137, reason="OOMKilled"),
    )
    assert [(row["attempt"], row["state"], seconds(row), row["gpu_num"]) for row in rows] == [
        (0, "FAILED", (0, 10, 100), 8),
        (1, "OUT_OF_MEMORY", (101, 120, 250), 8),
        (2, "RUNNING", (250, 260, None), 8),
    ]


def test_attempts_as_a_jobset_counts_them(read):
    def of(attempt, name, *times, **other):
        labels = {
            "jobset.sigs.k8s.io/jobset-name": "s",
            "jobset.sigs.k8s.io/restart-attempt": str(attempt),
        }
        return pod(name, *times, labels=labels, owner=("Job", name), **other)

    _, rows = read(of(1, "c", 90, 95, 200), of(0, "a", 0, 10, 100, code=1), of(0, "b", 0, 10, 105))
    assert [(row["attempt"], row["state"], row["gpu_num"]) for row in rows] == [
        (0, "FAILED", 16),
        (1, "COMPLETED", 8),
    ]


def test_a_queue_of_pods_counts_the_most_that_ran_at_once(read):
    owner = ("Job", "sweep")
    _, (row,) = read(*(pod(f"p{n}", 0, 10 + 40 * n, 100 + 40 * n, owner=owner) for n in range(5)))
    # 10-100, 50-140, 90-180, …: at most three at a time; one ends as the next but two starts.
    held = max(sum(10 + 40 * n <= second < 100 + 40 * n for n in range(5)) for second in range(300))
    assert (row["gpu_num"], seconds(row)) == (8 * held, (0, 10, 260))


def test_pods_that_follow_each_other_exactly_are_never_counted_together(read):
    owner = ("Job", "sweep")
    _, (row,) = read(*(pod(f"p{n}", 0, 100 * n, 100 * n + 100, owner=owner) for n in range(3)))
    assert (row["gpu_num"], row["run_s"]) == (8, 300)


def test_a_pod_that_another_replaced_does_not_fail_the_job(read):
    def indexed(name, index, *times, **other):
        return pod(
            name,
            *times,
            labels={"batch.kubernetes.io/job-completion-index": index},
            owner=("Job", "j"),
            **other,
        )

    _, (row,) = read(
        indexed("a", "0", 0, 10, 300),
        indexed("b", "1", 0, 10, 50, code=1),
        indexed("c", "1", 55, 60, 200),
    )
    assert (row["state"], row["exit_code"]) == ("COMPLETED", 0)


def test_a_job_object_has_the_last_word(read):
    owner = ("Job", "train")
    _, rows = read(
        pod("train-a", 3, 10, 100, owner=owner, code=1),
        pod("train-b", 101, 120, 250, owner=owner),
        job("train", 1, 2, 251, condition="Failed", reason="DeadlineExceeded"),
        pod("swept-a", 3, 10, 100, owner=("Job", "swept"), code=1),
        pod("swept-b", 3, 10, 100, owner=("Job", "swept")),
        job("swept", 1, 2, 110, condition="Complete"),
    )
    assert [
        (row["name"], row["attempt"], row["state"], row["reason"], seconds(row)) for row in rows
    ] == [
        ("swept", 0, "COMPLETED", None, (1, 10, 100)),
        ("train", 0, "FAILED", None, (1, 10, 100)),
        ("train", 1, "TIMEOUT", "DeadlineExceeded", (101, 120, 250)),
    ]


def test_jobs_whose_pods_are_gone(read):
    reading, rows = read(
        job("done", 0, 5, 65, condition="Complete", parallelism=4, completions=10),
        job(
            "few",
            0,
            5,
            65,
            condition="Failed",
            reason="BackoffLimitExceeded",
            parallelism=4,
            completions=2,
        ),
        job("held", 0, spec={"suspend": True}),
        job("runs", 0, 5, parallelism=2, completions=None),
    )
    assert [
        (row["name"], row["state"], row["reason"], row["gpu_num"], seconds(row)) for row in rows
    ] == [
        ("done", "COMPLETED", None, 16, (0, 5, 65)),
        ("few", "FAILED", "BackoffLimitExceeded", 8, (0, 5, 65)),
        ("held", "PENDING", None, 4, (0, None, None)),
        ("runs", "RUNNING", None, 8, (0, 5, None)),
    ]
    assert notes_of(reading) == {"kubernetes-no-pods": 4}


def test_services_count_where_they_hold_gpus(read):
    reading, rows = read(
        pod("web-1", 0, 10, owner=("ReplicaSet", "web"), gpus=0),
        pod("proxy-1", 0, 10, owner=("DaemonSet", "proxy"), gpus=0),
        pod("llm-1", 0, 10, owner=("ReplicaSet", "llm")),
        pod("llm-2", 0, 10, owner=("ReplicaSet", "llm")),
    )
    assert [row["job_id"] for row in rows] == ["lab/pod/llm-1", "lab/pod/llm-2"]
    assert notes_of(reading) == {"kubernetes-services": 2}


def test_queues_models_and_other_objects(read):
    picky = pod("a", 0, 10, labels={"kueue.x-k8s.io/queue-name": "team"})
    picky["spec"]["nodeSelector"] = {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}
    reading, (row,) = read(picky, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}})
    assert (row["pool"], row["gpu_model"]) == ("lab/team", "NVIDIA-A100-SXM4-80GB")
    assert notes_of(reading) == {"kubernetes-other-kinds": 1}


def test_time_sliced_gpus_are_told(read):
    shared = pod("a", 0, 10, gpus=0, spec={"containers": [asks(**{"nvidia.com/gpu.shared": "1"})]})
    reading, (row,) = read(shared)
    assert row["gpu_num"] == 0
    assert notes_of(reading) == {"kubernetes-gpu-shares": 1}


def test_what_a_pod_asks_for():
    assert of_pod({"containers": [asks(2), asks(3)]}).gpu_num == 5
    assert of_pod({"containers": [asks(1)], "initContainers": [asks(4), asks(2)]}).gpu_num == 4
    sidecar = asks(1) | {"restartPolicy": "Always"}
    # The sidecar holds its resources beside the containers, and beside later init containers.
    assert (
        of_pod({"containers": [asks(2)], "initContainers": [asks(3), sidecar, asks(1)]}).gpu_num
        == 3
    )
    assert of_pod({"containers": [asks(1)], "initContainers": [sidecar, asks(3)]}).gpu_num == 4
    requested = {
        "resources": {"requests": {"amd.com/gpu": 4}, "limits": {"amd.com/gpu": 4, "cpu": "2"}}
    }
    assert (
        of_pod({"containers": [requested]}).gpu_num,
        of_pod({"containers": [requested]}).cpu_num,
    ) == (4, 2)
    overhead = of_pod({"containers": [asks(1)], "overhead": {"cpu": "250m"}})
    assert overhead.cpu_num == 0.75
    assert of_pod({"containers": [{"name": "plain"}]}).gpu_num == 0
    assert (
        gpu_model_of({"nodeSelector": {"cloud.google.com/gke-accelerator": "nvidia-l4"}})
        == "nvidia-l4"
    )
    assert gpu_model_of({}) is None


def test_slices_count_as_shares():
    asked = of_resources(
        {"nvidia.com/mig-1g.5gb": "2", "nvidia.com/mig-3g.20gb": 1, "nvidia.com/gpu": "1"}
    )
    assert asked.gpu_num == pytest.approx(2 / 7 + 3 / 7 + 1)


@pytest.mark.parametrize(
    ("text", "number"),
    [("500m", 0.5), ("2", 2), (2, 2), ("64Gi", 2**36), ("1.5G", 1.5e9), ("1e3", 1000), ("129M", 129e6), ("3k", 3e3)],
)  # fmt: skip
def test_quantities(text, number):
    assert quantity(text) == pytest.approx(number)


@pytest.mark.parametrize("text", ["", "many", "1Q", "1 Gi", None])
def test_what_is_no_quantity(text):
    with pytest.raises(ValueError, match="500m"):
        quantity(text)


def test_an_object_that_cannot_be_read_is_told(read):
    broken = pod("broken", 0, 10)
    broken["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] = "lots"
    with pytest.raises(
        BadTrace, match=r"prod\.json, line \d+: Pod broken: expected a quantity .*'lots'.*kubectl"
    ):
        read(pod("a", 0, 10), broken)
    reading, rows = read(pod("a", 0, 10), broken, bad_rows="drop")
    assert [row["name"] for row in rows] == ["a"]
    assert notes_of(reading) == {"unreadable-row": 1}
    nameless = pod("b", 0, 10)
    del nameless["metadata"]["creationTimestamp"]
    with pytest.raises(BadTrace, match="Pod b: has no 'creationTimestamp'"):
        read(nameless)
    odd = pod("c", 0, 10)
    odd["status"]["startTime"] = "2024-05-01 00:00:00"
    with pytest.raises(BadTrace, match="Pod c: expected a time such as"):
        read(odd)


def test_a_list_without_jobs(tmp_path):
    path = tmp_path / "prod.json"
    path.write_text(json.dumps({"apiVersion": "v1", "items": [], "kind": "List"}))
    assert not SOURCE.recognises(path)
    with pytest.raises(BadTrace, match="holds no job"):
        read_file(SOURCE, path)


def test_a_pod_that_crashes_again_and_again_has_failed(read):
    crashing = pod("loop", 0, 10)
    crashing["status"]["containerStatuses"] = [
        {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": terminated(20, 30, 3)["state"]}
    ]  # fmt: skip
    _, (row,) = read(crashing)
    told = (row["state"], row["reason"], row["exit_code"], seconds(row))
    assert told == ("FAILED", "CrashLoopBackOff", 3, (0, 10, 30))
    crashing["status"]["containerStatuses"][0]["lastState"]["terminated"]["reason"] = "OOMKilled"
    _, (row,) = read(crashing)
    assert (row["state"], row["reason"]) == ("OUT_OF_MEMORY", "OOMKilled")


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ({"reason": "Evicted"}, "FAILED"),
        ({"reason": "NodeLost"}, "NODE_FAIL"),
        (
            {
                "conditions": [
                    {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler",
                     "lastTransitionTime": at(70)}
                ]
            },
            "PREEMPTED",
        ),
    ],
)  # fmt: skip
def test_a_pod_that_is_thrown_out_is_not_running_whatever_its_phase(read, status, state):
    _, (row,) = read(pod("out", 0, 10, status=status))
    assert row["state"] == state
    assert seconds(row)[2] == (70 if "conditions" in status else None)


def test_a_pod_that_was_evicted_nobody_knows_when_does_not_keep_its_job_open(read):
    evicted = pod("w-a", 0, 10, phase="Failed", owner=("Job", "w"), status={"reason": "Evicted"})
    del evicted["status"]["containerStatuses"]
    _, (row,) = read(evicted, pod("w-b", 60, 70, 170, owner=("Job", "w")))
    assert (row["gpu_num"], seconds(row)) == (8, (0, 70, 170))


def test_a_gpu_that_is_shared_counts_once(read):
    place = {**pod("place", 10, 25, gpus=1)["metadata"], "namespace": "runai-reservation"}
    shared = pod("a", 10, 25, 125, gpus=0, annotations={"gpu-fraction": "0.5"})
    reading, rows = read(shared, {**pod("place", 10, 25, gpus=1), "metadata": place})
    assert [(row["job_id"], row["gpu_num"]) for row in rows] == [("lab/pod/a", 0.5)]
    assert notes_of(reading) == {"kubernetes-reservations": 1}


def test_objects_as_yaml(tmp_path):
    path = tmp_path / "prod.yaml"
    objects = {"apiVersion": "v1", "items": [pod("a", 10, 25, 125)], "kind": "List"}
    path.write_text(yaml.safe_dump(objects))
    assert SOURCE.recognises(path)
    _, (row,) = read_file(SOURCE, path)
    assert (row["job_id"], row["exit_code"], seconds(row)) == ("lab/pod/a", 0, (10, 25, 125))
    path.write_text(yaml.safe_dump_all([pod("a", 10, 25, 125), pod("b", 10, 25, 125)]))
    assert len(read_file(SOURCE, path)[1]) == 2
    path.write_text("kind: Pod\nmetadata: [")
    with pytest.raises(BadTrace, match="line 3: expected YAML"):
        read_file(SOURCE, path)
    path.write_text(path.read_text().replace("kind: Pod", 'kind: "Pod"'))
    assert SOURCE.recognises(path)
