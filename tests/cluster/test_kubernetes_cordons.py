"""Test the marks on Nodes of Kubernetes: the changes, and the sentences without permission."""

import json

import pytest

from holdfast.cluster.cordons import NotMarked, cordons_here, cordons_of_operator, mark, unmark
from holdfast.cluster.kubernetes_api import ApiError, connect
from holdfast.cluster.kubernetes_cordons import (
    ANNOTATION,
    TAINT,
    KubernetesCordons,
    cause_of,
    plan_cordon,
    plan_return,
)
from holdfast.testing.kubernetes import PrivateKubernetes

OTHERS = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}


def node(**spec):
    return {"metadata": {"name": "n1", "resourceVersion": "7"}, "spec": spec}


def merged(thing, change):
    """Apply a merge patch (RFC 7386)."""
    if not isinstance(change, dict):
        return change
    result = dict(thing) if isinstance(thing, dict) else {}
    for key, value in change.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


class FakeApi:
    """An API server with one Node, which refuses changes planned for another version."""

    def __init__(self, found, *, status=None, changed_meanwhile=0):
        self.node, self.status, self.changed_meanwhile = found, status, changed_meanwhile
        self.asked = 0

    def get(self, path):
        self.asked += 1
        if self.status is not None:
            raise ApiError(f"Kubernetes answered GET {path} with {self.status}.", self.status)
        return self.node

    def patch(self, path, change):
        if self.changed_meanwhile:
            self.changed_meanwhile -= 1
            raise ApiError("conflict", 409)
        assert change["metadata"]["resourceVersion"] == self.node["metadata"]["resourceVersion"]
        self.node = merged(self.node, change)
        return self.node


def cordoned(found, reason="failed the matrix product"):
    return merged(found, plan_cordon(found, reason=reason, by="train-1", at_s=60.4))


def test_a_cordon_sets_what_kubectl_sets_and_says_why():
    found = cordoned(node(taints=[OTHERS]))
    taint = {"key": TAINT, "value": "failed-the-matrix-product", "effect": "NoSchedule"}
    assert found["spec"] == {"unschedulable": True, "taints": [OTHERS, taint]}
    assert json.loads(found["metadata"]["annotations"][ANNOTATION]) == {
        "by": "train-1",
        "reason": "failed the matrix product",
        "at_s": 60,
        "unschedulable": True,
    }


@pytest.mark.parametrize("spec", [{}, {"taints": [OTHERS]}, {"unschedulable": True}])
def test_a_return_takes_back_what_holdfast_has_set_and_nothing_else(spec):
    found = cordoned(cordoned(node(**spec)), "again")
    assert [one["value"] for one in found["spec"]["taints"] if one["key"] == TAINT] == ["again"]
    back = merged(found, plan_return(found))
    assert back["spec"] == spec
    assert back["metadata"]["annotations"] == {}
    assert plan_return(back) is None


def test_a_node_that_others_have_cordoned_is_left_alone():
    assert plan_return(node(unschedulable=True, taints=[OTHERS])) is None


def test_an_edited_annotation_keeps_the_node_cordoned():
    found = cordoned(node())
    found["metadata"]["annotations"][ANNOTATION] = "by hand"
    assert merged(found, plan_return(found))["spec"] == {"unschedulable": True}


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("Xid 79: GPU has fallen off the bus", "Xid-79-GPU-has-fallen-off-the-bus"),
        ("  …  ", "faulty"),
        ("x" * 62 + " and more", "x" * 62),
    ],
)
def test_a_cause_is_a_valid_value_of_a_taint(reason, cause):
    assert cause_of(reason) == cause


def test_a_node_that_changes_meanwhile_is_read_again():
    api = FakeApi(node(), changed_meanwhile=3)
    KubernetesCordons(api).cordon("n1", reason="bad", by="r")
    assert api.node["spec"]["unschedulable"]
    with pytest.raises(NotMarked, match="conflict"):
        KubernetesCordons(FakeApi(node(), changed_meanwhile=4)).cordon("n1", reason="bad", by="r")


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (
            403,
            r"kubectl cordon n1 && kubectl taint node n1 holdfast.dev/faulty=bad-fan:NoSchedule$",
        ),
        (404, r"Set HOLDFAST_NODE_NAME to spec.nodeName"),
        (0, r"As an administrator: kubectl cordon n1"),
    ],
)
def test_what_cannot_be_marked_is_said_with_the_next_step(status, said):
    cordons = KubernetesCordons(FakeApi(node(), status=status))
    with pytest.raises(NotMarked, match=said):
        cordons.cordon("n1", reason="bad fan", by="r")
    (sentence,) = mark({"n1": "bad fan"}, by="r", cordons=cordons)
    assert sentence.startswith("n1 is not cordoned in Kubernetes: ")
    (sentence,) = unmark("n1", cordons=cordons)
    assert sentence.startswith("n1 may still be cordoned in Kubernetes: ")


def test_a_silent_server_is_waited_for_once():
    api = FakeApi(node(), status=0)
    sentences = mark({"n1": "bad", "n2": "bad"}, by="r", cordons=KubernetesCordons(api))
    assert api.asked == 1
    assert [text.split()[0] for text in sentences] == ["n1", "n2"]


def test_the_scheduler_is_recognised_by_the_environment():
    assert cordons_here({}) is None
    assert mark({"n1": "bad"}, by="r") == [], "no scheduler here"
    assert cordons_here({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}).scheduler == "Kubernetes"
    assert cordons_here({"KUBECONFIG": "/c"}) is None, "the nodes of a run elsewhere"
    assert cordons_of_operator({"KUBECONFIG": "/c"}).scheduler == "Kubernetes"
    assert cordons_of_operator({}) is None
    with pytest.raises(ApiError, match="Give the pod a service account, or set KUBECONFIG"):
        connect({"KUBERNETES_SERVICE_HOST": "10.0.0.1"})


def test_the_official_client_marks_a_node_and_takes_the_mark_back(tmp_path):
    with PrivateKubernetes(tmp_path, nodes=1) as kubernetes:
        cordons = KubernetesCordons(connect(kubernetes.environment))
        assert not cordons.uncordon("n1")
        cordons.cordon("n1", reason="bad fan", by="r")
        assert kubernetes.get("nodes", "n1")["spec"]["unschedulable"] is True
        assert cordons.uncordon("n1")
        assert kubernetes.get("nodes", "n1")["spec"] == {}
        with pytest.raises(NotMarked, match="404"):
            cordons.cordon("n9", reason="bad fan", by="r")
        kubernetes.answer("patch /api/v1/nodes/n1", 403)
        with pytest.raises(NotMarked, match=r"403 .*kubectl cordon n1"):
            cordons.cordon("n1", reason="bad fan", by="r")
    with pytest.raises(NotMarked, match="did not answer"):
        cordons.cordon("n1", reason="bad fan", by="r")
