"""Read the jobs of controllers that hold several pods: Volcano, Argo, LeaderWorkerSet."""

from functools import partial

import pytest
from kubernetes_objects import asks, at, job, pod, read_objects, seconds
from normalised_rows import notes_of


@pytest.fixture
def read(tmp_path):
    return partial(read_objects, tmp_path)


def volcano(phase, **status):
    template = {"spec": {"containers": [asks(8)]}}
    return {
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "metadata": {"name": "vj", "namespace": "lab", "creationTimestamp": at(0)},
        "spec": {"queue": "q1", "tasks": [{"replicas": 4, "template": template}]},
        "status": {"state": {"phase": phase, "lastTransitionTime": at(7205)}, **status},
    }


@pytest.mark.parametrize(
    ("phase", "state"), [("Completed", "COMPLETED"), ("Failed", "FAILED"), ("Aborted", "CANCELLED")]
)
def test_a_job_of_volcano_is_read_alone(read, phase, state):
    ran = [{"status": "Pending", "lastTransitionTime": at(1)}]
    ran += [{"status": "Running", "lastTransitionTime": at(5)}]
    _, (row,) = read(volcano(phase, conditions=ran))
    told = (row["job_id"], row["pool"], row["state"], row["gpu_num"])
    assert told == ("lab/volcano/vj", "lab/q1", state, 32)
    assert seconds(row) == (0, 5, 7205)
    _, (row,) = read(volcano(phase, runningDuration="2h0m0s"))
    assert seconds(row) == (0, 5, 7205)


def test_a_job_of_volcano_goes_with_its_pods(read):
    labels = {"volcano.sh/job-name": "vj"}
    workers = [pod(f"vj-{n}", 1, 5 + n, 100, labels=labels, owner=("Job", "vj")) for n in range(2)]
    _, (row,) = read(volcano("Completed"), *workers)
    assert (row["job_id"], row["gpu_num"], seconds(row)) == ("lab/volcano/vj", 16, (0, 6, 100))


def test_a_job_of_an_api_that_is_not_known_is_left_out(read):
    foreign = job("x", 0) | {"apiVersion": "example.com/v1"}
    foreign["spec"] = {}
    reading, (row,) = read(pod("a", 0, 1, 2), foreign)
    assert row["job_id"] == "lab/pod/a"
    assert notes_of(reading) == {"kubernetes-other-kinds": 1}


def test_steps_of_an_argo_workflow_are_jobs_of_their_own(read):
    labels = {"workflows.argoproj.io/workflow": "flow"}
    steps = [
        pod("prepare", 0, 1, 1001, gpus=1, labels=labels, owner=("Workflow", "flow")),
        pod("train", 500, 501, 601, gpus=64, labels=labels, owner=("Workflow", "flow")),
    ]
    _, rows = read(*steps)
    assert {row["job_id"]: row["gpu_num"] * row["run_s"] for row in rows} == {
        "lab/workflow/flow/prepare": 1000,
        "lab/workflow/flow/train": 6400,
    }
    assert {row["name"] for row in rows} == {"flow"}


def test_a_group_of_a_leader_worker_set_is_one_job(read):
    def member(name, group):
        labels = {"leaderworkerset.sigs.k8s.io/name": "serve"}
        labels["leaderworkerset.sigs.k8s.io/group-index"] = group
        return pod(name, 0, 1, 100, labels=labels, owner=("StatefulSet", "serve"))

    _, rows = read(member("serve-0", "0"), member("serve-0-1", "0"), member("serve-1", "1"))
    assert {row["job_id"]: row["gpu_num"] for row in rows} == {
        "lab/leaderworkerset/serve-0": 16,
        "lab/leaderworkerset/serve-1": 8,
    }
