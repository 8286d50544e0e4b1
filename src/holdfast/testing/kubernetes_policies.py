"""Decide like the controllers of Kubernetes and JobSet, by pure functions over their objects.

`kubernetes.PrivateKubernetes` carries out the decisions. Only the parts of the APIs that decide
whether a run's pods are placed, restarted or given up are implemented: completions and
`podFailurePolicy` of an indexed Job, `failurePolicy` of a JobSet, cordons and taints of a Node.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import re2

JOBSET = "jobset.sigs.k8s.io"
INDEX = "batch.kubernetes.io/job-completion-index"
DEFAULT_BACKOFF_LIMIT = 6


def jobs_of(jobset: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the Jobs of a JobSet, with the labels that JobSet sets on Jobs and Pods."""
    metadata = jobset["metadata"]
    jobs: list[dict[str, Any]] = []
    restarts = int((jobset.get("status") or {}).get("restarts", 0))
    for replicated in jobset["spec"]["replicatedJobs"]:
        replicas = int(replicated.get("replicas", 1))
        for index in range(replicas):
            name = f"{metadata['name']}-{replicated['name']}-{index}"
            labels = {
                f"{JOBSET}/jobset-name": metadata["name"],
                f"{JOBSET}/jobset-uid": metadata["uid"],
                f"{JOBSET}/replicatedjob-name": replicated["name"],
                f"{JOBSET}/replicatedjob-replicas": str(replicas),
                f"{JOBSET}/job-index": str(index),
                f"{JOBSET}/job-global-index": str(len(jobs)),
                f"{JOBSET}/restart-attempt": str(restarts),
            }
            spec = copy.deepcopy(dict(replicated["template"]["spec"]))
            template = spec["template"].setdefault("metadata", {})
            template["labels"] = {**template.get("labels", {}), **labels}
            template["annotations"] = {**template.get("annotations", {}), **labels}
            jobs.append(
                {
                    "apiVersion": "batch/v1",
                    "kind": "Job",
                    "metadata": {
                        "name": name,
                        "namespace": metadata["namespace"],
                        "uid": f"{name}-{restarts}",
                        "labels": labels,
                    },
                    "spec": {**spec, "completionMode": "Indexed"},
                }
            )
    return jobs


def pod_of(job: Mapping[str, Any], index: int, number: int) -> dict[str, Any]:
    """Create a Pod for one index of an indexed Job.

    Args:
        job: the Job.
        index: the completion index.
        number: a number that makes the name of the Pod unique.
    """
    metadata, template = job["metadata"], copy.deepcopy(dict(job["spec"]["template"]))
    hostname = f"{metadata['name']}-{index}"
    given = template.get("metadata") or {}
    labels = {"batch.kubernetes.io/job-name": metadata["name"], INDEX: str(index)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{hostname}-{number:05d}",
            "namespace": metadata["namespace"],
            "uid": f"pod-{number}",
            "labels": {**given.get("labels", {}), **labels},
            "annotations": {**given.get("annotations", {}), INDEX: str(index)},
            "ownerReferences": [{"kind": "Job", "name": metadata["name"], "uid": metadata["uid"]}],
            # The finalizer keeps a deleted Pod until its process has ended, as in Kubernetes.
            "finalizers": ["batch.kubernetes.io/job-tracking"],
        },
        "spec": {**template["spec"], "hostname": hostname},
        "status": {"phase": "Pending", "conditions": []},
    }


def missing_indexes(job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the indexes of a Job that need a new Pod.

    These are the indexes without a Pod that has succeeded or can still succeed.
    """
    taken = {
        int(pod["metadata"]["annotations"][INDEX])
        for pod in pods
        if pod["status"]["phase"] != "Failed"
    }
    spec = job["spec"]
    wanted = int(spec.get("completions", spec.get("parallelism", 1)))
    return [index for index in range(wanted) if index not in taken]


def after_pod_failure(job: Mapping[str, Any], pod: Mapping[str, Any]) -> tuple[str, str]:
    """Return what a Job's `podFailurePolicy` does about a failed Pod.

    The first matching rule determines the action. Without a matching rule, the failure counts
    towards `backoffLimit`.

    Returns:
        The action, and the message for the Job's condition if the Job fails.
    """
    rules = (job["spec"].get("podFailurePolicy") or {}).get("rules", [])
    statuses = pod["status"].get("containerStatuses", [])
    where = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
    for number, rule in enumerate(rules):
        action = rule["action"]
        if (codes := rule.get("onExitCodes")) is not None:
            for status in statuses:
                code = status["state"]["terminated"]["exitCode"]
                is_named = codes.get("containerName") in (None, status["name"])
                is_among = (code in codes["values"]) == (codes["operator"] == "In")
                if is_named and code != 0 and is_among:
                    return action, (
                        f"Container {status['name']} for pod {where} failed with exit code {code} "
                        f"matching {action} rule at index {number}"
                    )
        for pattern in rule.get("onPodConditions", []):
            for condition in pod["status"]["conditions"]:
                is_same = (condition["type"], condition["status"]) == (
                    pattern["type"],
                    pattern.get("status", "True"),
                )
                if is_same:
                    return action, (
                        f"Pod {where} has condition {pattern['type']} matching {action} rule at index {number}"
                    )
    return "Count", ""


def after_job_failure(jobset: Mapping[str, Any], reason: str, message: str) -> str:
    """Return what a JobSet does about the failure of one of its Jobs, such as "RestartJobSet".

    Args:
        jobset: the JobSet.
        reason: the reason in the Job's condition Failed.
        message: the message in that condition.
    """
    policy = jobset["spec"].get("failurePolicy")
    if policy is None:
        return "FailJobSet"
    action = "RestartJobSet"
    for rule in policy.get("rules", []):
        reasons = rule.get("onJobFailureReasons", [])
        patterns = rule.get("onJobFailureMessagePatterns", [])
        if reasons and reason not in reasons:
            continue
        if patterns and not any(re2.search(pattern, message) for pattern in patterns):
            continue
        action = rule["action"]
        break
    restarts = int((jobset.get("status") or {}).get("restartsCountTowardsMax", 0))
    if action in ("RestartJobSet", "RestartJob") and restarts >= int(policy.get("maxRestarts", 0)):
        return "FailJobSet"
    return str(action)


def may_run(node: Mapping[str, Any], pod: Mapping[str, Any]) -> bool:
    """Return True if the scheduler may place a Pod on a Node.

    The Node must be ready and not cordoned, and the Pod must tolerate the Node's taints.
    """
    spec = node.get("spec") or {}
    ready = [one for one in node["status"]["conditions"] if one["type"] == "Ready"]
    if spec.get("unschedulable") or any(one["status"] != "True" for one in ready):
        return False
    tolerations = pod["spec"].get("tolerations", [])
    return all(
        taint["effect"] == "PreferNoSchedule" or any(_tolerates(one, taint) for one in tolerations)
        for taint in spec.get("taints") or []
    )


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    exists = toleration.get("operator", "Equal") == "Exists"
    return (
        toleration.get("key") in (None, taint["key"])
        and toleration.get("effect") in (None, taint["effect"])
        and (exists or toleration.get("value", "") == taint.get("value", ""))
    )


def variables_of(pod: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables of a Pod's first container.

    These are the container's `env`, including fields of the downward API, and also the host name
    and the completion index.

    Raises:
        ValueError: a variable comes from something other than a value or a field.
    """
    metadata, found = pod["metadata"], {}
    fields = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": pod["spec"].get("nodeName", ""),
        "status.podIP": pod["status"].get("podIP", ""),
        **{f"metadata.labels['{key}']": value for key, value in metadata["labels"].items()},
        **{
            f"metadata.annotations['{key}']": value
            for key, value in metadata["annotations"].items()
        },
    }
    for one in pod["spec"]["containers"][0].get("env", []):
        if "value" in one:
            found[one["name"]] = one["value"]
        elif "fieldRef" in (one.get("valueFrom") or {}):
            # A missing label gives an empty variable, as in Kubernetes.
            found[one["name"]] = fields.get(one["valueFrom"]["fieldRef"]["fieldPath"], "")
        else:
            raise ValueError(f"The variable {one['name']} has neither a value nor a fieldRef.")
    return {
        "HOSTNAME": pod["spec"]["hostname"],
        "JOB_COMPLETION_INDEX": metadata["annotations"][INDEX],
        **found,
    }
