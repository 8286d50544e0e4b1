"""Read from Kubernetes the conditions, taints and cordon of a node, and the end of a pod.

`node_facts` and `pod_facts` are pure functions that extract facts from an object of the API server.
`read_facts` reads the objects. A fact is a report of the cluster, and contains no advice.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from holdfast.cluster.kubernetes_api import Api, ApiError, connect, namespace, node_path, pod_path
from holdfast.cluster.kubernetes_cordons import ANNOTATION, TAINT

GOOD_IF_TRUE = frozenset({"Ready", "Initialized", "PodScheduled", "ContainersReady"})
"""The conditions that are good if their status is True.

A True status of any other condition is a problem, for example of a node-problem-detector's.
"""
ENDS_POD = "DisruptionTarget"
_OUTDATED_WITH_POD = frozenset({"Initialized", "PodReadyToStartContainers", "ContainersReady"})
UNSCHEDULABLE_TAINT = "node.kubernetes.io/unschedulable"
"""The taint that Kubernetes itself adds to each cordoned node."""

AUTOSCALER_TAINTS = frozenset(
    {
        "ToBeDeletedByClusterAutoscaler",
        "karpenter.sh/disrupted",
        "karpenter.sh/disruption",
    }
)
"""The taints of nodes that an autoscaler is about to delete.

They are the taints of cluster-autoscaler, and of Karpenter since and before 1.0. A node that is
only a candidate for deletion has other taints.
"""


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One report of the cluster.

    Attributes:
        subject: "node" or "pod".
        name: the name of the node or pod.
        kind: the type of a condition, such as "Ready" or "KernelDeadlock"; for other reports
            "cordoned", "taint" or "deleted".
        is_bad: True if the report is of a problem; None if the condition's status is Unknown.
        detail: the reason and message of the report.
        since_s: the time since which the report holds, in Unix seconds of the cluster's clock; None
            if unknown.
    """

    subject: Literal["node", "pod"]
    name: str
    kind: str
    is_bad: bool | None
    detail: str = ""
    since_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Look:
    """The facts that were read, and one sentence for each object that could not be read."""

    facts: tuple[Fact, ...]
    unseen: tuple[str, ...] = ()


def node_facts(node: Mapping[str, Any]) -> list[Fact]:
    """Extract the conditions of a Node, its taints, and its cordon unless Holdfast set the cordon.

    Args:
        node: the Node, as the API server returns it.
    """
    name = _name(node)
    facts = [_condition("node", name, one) for one in _conditions(node)]
    spec = node.get("spec") or {}
    annotations = (node.get("metadata") or {}).get("annotations") or {}
    if spec.get("unschedulable") and ANNOTATION not in annotations:
        facts.append(Fact(subject="node", name=name, kind="cordoned", is_bad=True))
    for taint in spec.get("taints") or []:
        key = str(taint.get("key", ""))
        if key in (TAINT, UNSCHEDULABLE_TAINT):
            continue  # Holdfast's own taint, and the taint that repeats the cordon
        words = f"{key}={taint['value']}" if taint.get("value") else key
        effect = str(taint.get("effect", ""))
        # Most taints are no problem for a running pod, which tolerates the taints of a reserved
        # node. A lack of resources is reported as a condition. So only the taints with which
        # Kubernetes or an autoscaler ends pods report a problem.
        is_bad = key in AUTOSCALER_TAINTS or (
            key.startswith("node.kubernetes.io/") and effect == "NoExecute"
        )
        since_s = _seconds(taint.get("timeAdded"))
        detail = f"{words}:{effect}"
        facts.append(
            Fact(
                subject="node",
                name=name,
                kind="taint",
                is_bad=is_bad,
                detail=detail,
                since_s=since_s,
            )
        )
    return facts


def pod_facts(pod: Mapping[str, Any]) -> list[Fact]:
    """Extract the conditions of a Pod; add a fact if the Pod is being deleted.

    The condition DisruptionTarget is bad, because it means that preemption, a drain, or the loss of
    the node is about to end the Pod.

    Args:
        pod: the Pod, as the API server returns it.
    """
    name = _name(pod)
    facts = [
        _condition("pod", name, one)
        for one in _conditions(pod)
        if one.get("type") not in _OUTDATED_WITH_POD
    ]
    metadata = pod.get("metadata") or {}
    if deleted := metadata.get("deletionTimestamp"):
        grace = metadata.get("deletionGracePeriodSeconds")
        detail = "" if grace is None else f"{grace} s of grace"
        facts.append(
            Fact(
                subject="pod",
                name=name,
                kind="deleted",
                is_bad=True,
                detail=detail,
                since_s=_seconds(deleted),
            )
        )
    return facts


def read_facts(environment: Mapping[str, str] = os.environ, api: Api | None = None) -> Look:
    """Read the facts of this pod and its node; block for some seconds at most.

    The names are in HOLDFAST_NODE_NAME (or NODE_NAME) and POD_NAME, which the pod's manifest sets
    from the downward API.

    Args:
        environment: the environment variables of this process.
        api: the API server; by default the server of KUBECONFIG or of this pod.
    """
    facts: list[Fact] = []
    unseen: list[str] = []
    try:
        api = api or connect(environment)
    except ApiError as error:
        return Look(facts=(), unseen=(str(error),))
    node = environment.get("HOLDFAST_NODE_NAME") or environment.get("NODE_NAME")
    pod = environment.get("POD_NAME")
    if node:
        _read(api, node_path(node), node_facts, facts, unseen)
    else:
        unseen.append("The node is not read: HOLDFAST_NODE_NAME is not set to spec.nodeName.")
    if pod:
        _read(api, pod_path(pod, namespace(environment)), pod_facts, facts, unseen)
    else:
        unseen.append("The pod is not read: POD_NAME is not set to metadata.name.")
    return Look(facts=tuple(facts), unseen=tuple(unseen))


def _read(api: Api, path: str, parse: Any, facts: list[Fact], unseen: list[str]) -> None:
    try:
        facts.extend(parse(api.get(path)))
    except ApiError as error:
        unseen.append(str(error))


def _name(thing: Mapping[str, Any]) -> str:
    return str((thing.get("metadata") or {}).get("name", ""))


def _conditions(thing: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = (thing.get("status") or {}).get("conditions") or []
    return [one for one in found if isinstance(one, dict)]


def _condition(subject: Literal["node", "pod"], name: str, condition: Mapping[str, Any]) -> Fact:
    kind, status = str(condition.get("type", "")), condition.get("status")
    is_bad = None
    if status in ("True", "False"):
        is_bad = (status == "True") != (kind in GOOD_IF_TRUE)
    words = [str(condition[key]) for key in ("reason", "message") if condition.get(key)]
    return Fact(
        subject=subject,
        name=name,
        kind=kind,
        is_bad=is_bad,
        detail=": ".join(words),
        since_s=_seconds(condition.get("lastTransitionTime")),
    )


def _seconds(moment: object) -> float | None:
    if not isinstance(moment, str):
        return None
    try:
        return datetime.fromisoformat(moment).timestamp()
    except ValueError:
        return None
