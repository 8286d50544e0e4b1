import json

import pytest
from normalised_rows import notes_of, read_file, unix_s

from holdfast.trace.errors import BadTrace
from holdfast.trace.sources.kubernetes import jobs
from holdfast.trace.sources.kubernetes.kueue import SOURCE

ZERO_S = 1714521600.0  # 2024-05-01T00:00:00Z


def at(second: int) -> str:
    return f"2024-05-01T00:{second // 60:02}:{second % 60:02}Z"


def condition(kind, second, reason="", message="", status="True"):
    return {
        "type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": at(second),
    }  # fmt: skip


def workload(name, *conditions, gpus=8, count=2, status=None, spec=None):
    containers = [
        {
            "name": "c",
            "resources": {"requests": {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": gpus}},
        }
    ]
    template = {
        "spec": {"containers": containers, "nodeSelector": {"nvidia.com/gpu.product": "H100"}}
    }
    owners = [
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "name": name,
            "controller": True,
            "uid": "u",
        }
    ]
    meta = {
        "name": f"pytorchjob-{name}-a1b2c",
        "namespace": "lab",
        "creationTimestamp": at(0),
        "ownerReferences": owners,
    }
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta1",
        "kind": "Workload",
        "metadata": meta,
        "spec": {
            "queueName": "team",
            "podSets": [{"name": "worker", "count": count, "template": template}],
        }
        | (spec or {}),
        "status": {"conditions": list(conditions)} | (status or {}),
    }


ADMITTED = (condition("QuotaReserved", 60, "QuotaReserved"), condition("Admitted", 61, "Admitted"))


@pytest.fixture
def read(tmp_path):
    def reading(*items, **variables):
        path = tmp_path / "prod.json"
        path.write_text(json.dumps({"apiVersion": "v1", "items": items, "kind": "List"}, indent=4))
        assert SOURCE.recognises(path)
        assert not jobs.SOURCE.recognises(path)
        return read_file(SOURCE, path, **variables)

    return reading


def seconds(row):
    times = (unix_s(row[name]) for name in ("submit_at", "start_at", "end_at"))
    return tuple(None if time is None else time - ZERO_S for time in times)


def test_a_workload_that_finished(read):
    reading, (row,) = read(workload("llm", *ADMITTED, condition("Finished", 161, "Succeeded")))
    assert seconds(row) == (0, 61, 161)
    row = {name: value for name, value in row.items() if not name.endswith("_at")}
    assert row == {
        "cluster": "prod", "job_id": "lab/pytorchjob/llm", "attempt": 0, "name": "llm", "pool": "lab/team",
        "state": "COMPLETED", "reason": None, "run_s": 100.0, "queue_s": 61.0, "gpu_num": 16.0, "cpu_num": 8.0,
        "mem_gb": 16.0, "gpu_model": "H100", "zone_offset": "+00:00",
    }  # fmt: skip
    assert not reading.notes


@pytest.mark.parametrize(
    ("reason", "message", "state"),
    [
        ("Succeeded", "Job finished successfully", "COMPLETED"),
        ("JobFinished", "Job finished successfully", "COMPLETED"),
        ("JobFinished", "Job failed", "FAILED"),
        ("Failed", "Job has reached the specified backoff limit", "FAILED"),
        ("AdmissionChecksRejected", "Admission checks [x] are rejected", "FAILED"),
        ("OwnerNotFound", "The owner is gone", "CANCELLED"),
        ("WorkloadSliceReplaced", "Replaced", "UNKNOWN"),
    ],
)
def test_how_a_workload_finished(read, reason, message, state):
    _, (row,) = read(workload("a", *ADMITTED, condition("Finished", 100, reason, message)))
    assert (row["state"], row["reason"]) == (state, None if state == "COMPLETED" else reason)


def test_workloads_that_wait_and_run(read):
    _, rows = read(
        workload("a", condition("QuotaReserved", 1, "Pending", status="False")),
        workload("b", *ADMITTED, condition("PodsReady", 70, "Started")),
        workload("c", condition("QuotaReserved", 60), condition("Admitted", 61, status="False")),
        workload("d"),
    )
    assert [(row["name"], row["state"], seconds(row)) for row in rows] == [
        ("a", "PENDING", (0, None, None)),
        ("b", "RUNNING", (0, 61, None)),
        ("c", "PENDING", (0, None, None)),
        ("d", "PENDING", (0, None, None)),
    ]


def test_evictions_are_attempts(read):
    evicted = condition("Evicted", 50, "Preempted", status="False")
    causes = {"Preempted": 2, "NodeFailures": 1}
    each = [
        {"reason": cause, "underlyingCause": "", "count": count} for cause, count in causes.items()
    ]
    counted = {"schedulingStats": {"evictions": each}}
    reading, rows = read(
        workload("a", evicted, *ADMITTED),
        workload("b", evicted, *ADMITTED, status=counted),
        workload("c", *ADMITTED, status={"requeueState": {"count": 4}}),
        workload(
            "d", condition("Evicted", 90, "Preempted"), condition("Admitted", 90, status="False")
        ),
    )
    assert [(row["name"], row["attempt"], row["state"]) for row in rows] == [
        ("a", 1, "RUNNING"),
        ("b", 3, "RUNNING"),
        ("c", 4, "RUNNING"),
        ("d", 1, "PENDING"),
    ]
    assert notes_of(reading) == {"kueue-evicted": 4}


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        ("Deactivated", "CANCELLED"),
        ("InactiveWorkload", "CANCELLED"),
        ("DeactivatedDueToMaximumExecutionTimeExceeded", "TIMEOUT"),
        ("DeactivatedDueToRequeuingLimitExceeded", "FAILED"),
    ],
)
def test_workloads_that_were_deactivated(read, reason, state):
    gone = (condition("Evicted", 90, reason), condition("Admitted", 90, status="False"))
    _, (row,) = read(workload("a", *gone, spec={"active": False}))
    assert (row["state"], row["reason"], seconds(row)) == (state, reason, (0, None, 90))


def test_what_was_set_aside_comes_before_what_is_asked_for(read):
    given = {
        "name": "worker",
        "count": 1,
        "resourceUsage": {"cpu": "5", "memory": "8Gi", "nvidia.com/gpu": "8"},
    }
    _, (row,) = read(
        workload(
            "a",
            *ADMITTED,
            status={"admission": {"clusterQueue": "q", "podSetAssignments": [given]}},
        )
    )
    assert (row["gpu_num"], row["cpu_num"]) == (8, 5)


def test_a_quota_without_gpus_hides_none(read):
    given = {"name": "worker", "count": 3, "resourceUsage": {"cpu": "12"}}
    _, (row,) = read(
        workload(
            "a",
            *ADMITTED,
            status={"admission": {"clusterQueue": "q", "podSetAssignments": [given]}},
        )
    )
    assert row["gpu_num"] == 24


def test_what_cannot_be_read_is_told(read):
    with pytest.raises(
        BadTrace, match=r"line \d+: Workload pytorchjob-b-a1b2c: expected a quantity .*'some'"
    ):
        read(workload("a"), workload("b", gpus="some"))
    reading, rows = read(workload("a"), workload("b", gpus="some"), bad_rows="drop")
    assert [row["name"] for row in rows] == ["a"]
    assert notes_of(reading) == {"unreadable-row": 1}
    broken = workload("c")
    broken["status"]["conditions"] = [{"type": "Admitted", "status": "True"}]
    with pytest.raises(BadTrace, match="has no 'lastTransitionTime'"):
        read(broken)


def test_a_list_without_workloads(read):
    other = workload("a")
    del other["spec"]["podSets"]
    with pytest.raises(BadTrace, match="holds no job"):
        read(other)
