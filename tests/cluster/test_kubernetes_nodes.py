"""Test the facts that Kubernetes reports of a node and a pod."""

import pytest

from holdfast.cluster.kubernetes_api import ApiError
from holdfast.cluster.kubernetes_cordons import ANNOTATION, TAINT
from holdfast.cluster.kubernetes_nodes import Fact, node_facts, pod_facts, read_facts

MOMENT = "2026-11-27T04:00:00Z"
MOMENT_S = 1795752000.0


def condition(kind, status, **given):
    return {"type": kind, "status": status, "lastTransitionTime": MOMENT, **given}


NODE = {
    "metadata": {"name": "gpu-7"},
    "spec": {
        "unschedulable": True,
        "taints": [
            {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"},
            {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute", "timeAdded": MOMENT},
            {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"},
            {"key": "team", "value": "a", "effect": "NoExecute"},
            {"key": "node.kubernetes.io/memory-pressure", "effect": "NoSchedule"},
            {"key": TAINT, "value": "bad-fan", "effect": "NoSchedule"},
        ],
    },
    "status": {
        "conditions": [
            condition("Ready", "Unknown", reason="NodeStatusUnknown", message="Kubelet is silent."),
            condition("MemoryPressure", "False"),
            condition("KernelDeadlock", "True", reason="DockerHung", message="task blocked"),
        ]
    },
}
POD = {
    "metadata": {
        "name": "train-0",
        "deletionTimestamp": MOMENT,
        "deletionGracePeriodSeconds": 600,
    },
    "status": {
        "conditions": [
            condition("Ready", "False", reason="ContainersNotReady"),
            condition("DisruptionTarget", "True", reason="PreemptionByScheduler"),
            condition("Initialized", "False"),
        ]
    },
}


def told(facts):
    return {(one.kind, one.detail): one.is_bad for one in facts}


def test_the_reports_on_a_node():
    facts = node_facts(NODE)
    assert told(facts) == {
        ("Ready", "NodeStatusUnknown: Kubelet is silent."): None,
        ("MemoryPressure", ""): False,
        ("KernelDeadlock", "DockerHung: task blocked"): True,
        ("cordoned", ""): True,
        ("taint", "node.kubernetes.io/unreachable:NoExecute"): True,
        ("taint", "nvidia.com/gpu=present:NoSchedule"): False,
        ("taint", "team=a:NoExecute"): False,
        ("taint", "node.kubernetes.io/memory-pressure:NoSchedule"): False,
    }
    assert {(one.subject, one.name) for one in facts} == {("node", "gpu-7")}
    assert facts[0].since_s == MOMENT_S


def test_a_cordon_of_holdfast_is_no_report_of_somebody_else():
    metadata = {"name": "n", "annotations": {ANNOTATION: "{}"}}
    assert node_facts({"metadata": metadata, "spec": {"unschedulable": True}}) == []


def test_the_reports_on_a_pod():
    assert told(pod_facts(POD)) == {
        ("Ready", "ContainersNotReady"): True,
        ("DisruptionTarget", "PreemptionByScheduler"): True,
        ("deleted", "600 s of grace"): True,
    }


@pytest.mark.parametrize("thing", [{}, {"status": None, "spec": None, "metadata": None}])
def test_an_empty_object_has_no_reports(thing):
    assert node_facts(thing) == pod_facts(thing) == []


def test_a_malformed_condition_is_no_problem_and_no_crash():
    broken = ["x", {"type": 3, "status": 4, "lastTransitionTime": "yesterday"}]
    assert node_facts({"status": {"conditions": broken}}) == [
        Fact(subject="node", name="", kind="3", is_bad=None)
    ]


class FakeApi:
    def get(self, path):
        if path == "/api/v1/nodes/gpu-7":
            return NODE
        raise ApiError(f"Kubernetes answered GET {path} with 403 Forbidden.", 403)

    def patch(self, path, change):
        raise AssertionError


def test_what_cannot_be_read_is_said():
    names = {"NODE_NAME": "gpu-7", "POD_NAME": "p", "POD_NAMESPACE": "team"}
    look = read_facts(names, FakeApi())
    assert look.facts == tuple(node_facts(NODE))
    assert look.unseen == (
        "Kubernetes answered GET /api/v1/namespaces/team/pods/p with 403 Forbidden.",
    )
    look = read_facts({}, FakeApi())
    assert [text.split(":")[0] for text in look.unseen] == [
        "The node is not read",
        "The pod is not read",
    ]
    look = read_facts({"KUBECONFIG": "/nowhere"})
    assert "There are no credentials for Kubernetes" in look.unseen[0]
