"""Test the decisions of the controllers of Kubernetes and JobSet."""

import pytest

from holdfast.testing.kubernetes_policies import (
    after_job_failure,
    after_pod_failure,
    jobs_of,
    may_run,
    missing_indexes,
    pod_of,
    variables_of,
)

CODES = {"operator": "In", "values": [1, 2]}


def jobset(replicas=1, policy=None, **status):
    template = {
        "spec": {"template": {"spec": {"containers": [{"name": "main"}]}}, "completions": 2}
    }
    jobs = [{"name": "node", "replicas": replicas, "template": template}]
    return {
        "metadata": {"name": "train", "namespace": "team", "uid": "u"},
        "spec": {"replicatedJobs": jobs, "failurePolicy": policy},
        "status": status,
    }


def job(*rules):
    (one,) = jobs_of(jobset())
    one["spec"]["podFailurePolicy"] = {"rules": list(rules)}
    return one


def failed(code, *conditions):
    pod = pod_of(job(), 1, 5)
    terminated = {"name": "main", "state": {"terminated": {"exitCode": code}}}
    told = [{"type": kind, "status": "True"} for kind in conditions]
    pod["status"] = {"phase": "Failed", "containerStatuses": [terminated], "conditions": told}
    return pod


def test_a_jobset_names_its_jobs_and_pods():
    jobs = jobs_of(jobset(replicas=2))
    assert [one["metadata"]["name"] for one in jobs] == ["train-node-0", "train-node-1"]
    pod = pod_of(jobs[1], 1, 5)
    assert pod["spec"]["hostname"] == "train-node-1-1"
    assert pod["metadata"]["labels"]["jobset.sigs.k8s.io/job-index"] == "1"
    pod["spec"]["containers"][0]["env"] = [
        {"name": "A", "value": "1"},
        {
            "name": "J",
            "valueFrom": {
                "fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/jobset-name']"}
            },
        },
        {"name": "N", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['none']"}}},
    ]
    assert variables_of(pod) == {
        "HOSTNAME": "train-node-1-1",
        "JOB_COMPLETION_INDEX": "1",
        "A": "1",
        "J": "train",
        "N": "",
    }
    pod["spec"]["containers"][0]["env"] = [{"name": "S", "valueFrom": {"secretKeyRef": {}}}]
    with pytest.raises(ValueError, match="S has neither"):
        variables_of(pod)


def test_an_index_has_one_pod_at_a_time():
    one, two = pod_of(job(), 0, 1), failed(1)
    assert missing_indexes(job(), []) == [0, 1]
    assert missing_indexes(job(), [one, two]) == [1]


def test_the_first_rule_that_matches_counts():
    fail = {"action": "FailJob", "onExitCodes": CODES}
    ignore = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    action, message = after_pod_failure(job(ignore, fail), failed(2))
    assert action == "FailJob"
    assert message == (
        "Container main for pod team/train-node-0-1-00005 failed with exit code 2 "
        "matching FailJob rule at index 1"
    )
    assert after_pod_failure(job(ignore, fail), failed(2, "DisruptionTarget"))[0] == "Ignore"
    assert after_pod_failure(job(fail, ignore), failed(2, "DisruptionTarget"))[0] == "FailJob"
    assert after_pod_failure(job(fail), failed(137)) == ("Count", "")
    other = {"action": "FailJob", "onExitCodes": {**CODES, "containerName": "sidecar"}}
    assert after_pod_failure(job(other), failed(2)) == ("Count", "")
    rest = {"action": "Ignore", "onExitCodes": {"operator": "NotIn", "values": [1]}}
    assert after_pod_failure(job(rest), failed(2))[0] == "Ignore"


def test_a_jobset_goes_by_reasons_and_messages():
    rules = [
        {
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["DeadlineExceeded"],
        },
        {
            "action": "FailJobSet",
            "onJobFailureReasons": ["PodFailurePolicy"],
            "onJobFailureMessagePatterns": ["exit code [1-4] matching"],
        },
    ]
    policy = {"maxRestarts": 1, "rules": rules}
    message = "Container main for pod a/b failed with exit code 1 matching FailJob rule at index 0"
    assert after_job_failure(jobset(policy=policy), "PodFailurePolicy", message) == "FailJobSet"
    other = message.replace("code 1", "code 75")
    assert after_job_failure(jobset(policy=policy), "PodFailurePolicy", other) == "RestartJobSet"
    spent = jobset(policy=policy, restartsCountTowardsMax=1)
    assert after_job_failure(spent, "BackoffLimitExceeded", "") == "FailJobSet"
    ignored = "RestartJobSetAndIgnoreMaxRestarts"
    assert after_job_failure(spent, "DeadlineExceeded", "") == ignored
    assert after_job_failure(jobset(), "BackoffLimitExceeded", "") == "FailJobSet"


@pytest.mark.parametrize(
    ("spec", "status", "tolerations", "fits"),
    [
        ({}, "True", [], True),
        ({}, "Unknown", [], False),
        ({"unschedulable": True}, "True", [], False),
        ({"taints": [{"key": "k", "value": "v", "effect": "NoSchedule"}]}, "True", [], False),
        ({"taints": [{"key": "k", "value": "v", "effect": "PreferNoSchedule"}]}, "True", [], True),
        (
            {"taints": [{"key": "k", "value": "v", "effect": "NoSchedule"}]},
            "True",
            [{"key": "k", "operator": "Exists"}],
            True,
        ),
        (
            {"taints": [{"key": "k", "value": "v", "effect": "NoExecute"}]},
            "True",
            [{"key": "k", "value": "w"}],
            False,
        ),
    ],
)
def test_a_pod_is_placed_where_nothing_speaks_against_it(spec, status, tolerations, fits):
    node = {"spec": spec, "status": {"conditions": [{"type": "Ready", "status": status}]}}
    assert may_run(node, {"spec": {"tolerations": tolerations}}) is fits
