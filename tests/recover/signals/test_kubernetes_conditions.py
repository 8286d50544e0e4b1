"""The conditions of a pod and its node, as the API server returns them, as signals and notices."""

import pytest

from holdfast.cluster.kubernetes_nodes import Look, node_facts, pod_facts
from holdfast.recover.signals.facts import CannotSee
from holdfast.recover.signals.kubernetes import Kubernetes

AT = "2026-11-27T03:00:00Z"


def condition(kind, status, reason=""):
    return {"type": kind, "status": status, "reason": reason, "lastTransitionTime": AT}


def node(*conditions, **spec):
    metadata = {"name": "n1", "annotations": {}}
    return node_facts(
        {"metadata": metadata, "spec": spec, "status": {"conditions": list(conditions)}}
    )


def pod(*conditions, **metadata):
    told = {"name": "p", **metadata}
    return pod_facts({"metadata": told, "status": {"conditions": list(conditions)}})


def read(*facts, unseen=()):
    return Kubernetes(lambda: Look(facts=tuple(facts), unseen=unseen)).read()


def test_a_node_and_a_pod_without_problems_have_no_facts():
    ready = node(condition("Ready", "True"), condition("MemoryPressure", "False"))
    assert read(*ready, *pod(condition("Ready", "False", "ContainersNotReady"))) == []
    assert read(*node(condition("Ready", "Unknown", "NodeStatusUnknown"))) == []


def test_problems_of_the_node_are_signals_and_a_lack_of_resources_is_recorded_only():
    lock = condition("KernelDeadlock", "True", "DockerHung")
    full = condition("DiskPressure", "True", "KubeletHasDiskPressure")
    down = condition("Ready", "False", "KubeletNotReady")
    found = read(*node(lock, full, down))
    assert [(one.name, one.where) for one in found] == [
        ("scheduler-down", "KernelDeadlock"),
        ("scheduler-pressure", "DiskPressure"),
        ("scheduler-down", "Ready"),
    ]


def test_a_cordon_and_a_disruption_are_notices_and_a_deletion_has_its_moment():
    (cordon,) = read(*node(condition("Ready", "True"), unschedulable=True))
    assert (cordon.kind, cordon.until_s) == ("drain", None)
    target = condition("DisruptionTarget", "True", "PreemptionByScheduler")
    disruption, deletion = read(*pod(target, deletionTimestamp=AT, deletionGracePeriodSeconds=30))
    assert (disruption.kind, disruption.text) == (
        "preemption",
        "DisruptionTarget: PreemptionByScheduler",
    )
    assert (deletion.kind, deletion.until_s) == ("preemption", 1795748400.0)


@pytest.mark.parametrize(
    "key", ["ToBeDeletedByClusterAutoscaler", "karpenter.sh/disrupted", "karpenter.sh/disruption"]
)
def test_a_node_that_an_autoscaler_takes_away_is_drained_and_a_candidate_is_not(key):
    candidate = {
        "key": "DeletionCandidateOfClusterAutoscaler",
        "value": "1795748400",
        "effect": "PreferNoSchedule",
    }
    ready = condition("Ready", "True")
    assert read(*node(ready, taints=[candidate])) == []
    taint = {"key": key, "value": "1795748400", "effect": "NoSchedule"}
    (found,) = read(*node(ready, taints=[candidate, taint]))
    assert (found.kind, found.until_s) == ("drain", None)
    assert found.text == f"taint: {key}=1795748400:NoSchedule"


def test_an_api_server_that_does_not_answer_says_nothing_of_the_node():
    with pytest.raises(CannotSee, match="403"):
        read(unseen=("The node cannot be read: 403.",))
    assert read(*node(condition("Ready", "True")), unseen=("The pod is not read.",)) == []
