"""Cordon and taint Nodes of Kubernetes, and remove only Holdfast's own marks.

A cordoned Node has

- `spec.unschedulable: true`, as `kubectl cordon` sets it;
- the taint `holdfast.dev/faulty=CAUSE:NoSchedule`, which shows the cause, and stays when an
  operator uncordons the Node;
- the annotation `holdfast.dev/cordon`: the run or user, the reason, and whether Holdfast set
  `unschedulable`.

Pods that run on the Node continue. `plan_cordon` and `plan_return` are pure functions that compute
the change of a Node.
"""

import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.cluster.cordons import NotMarked
from holdfast.cluster.kubernetes_api import CONFLICT, Api, ApiError, connect, node_path

TAINT = "holdfast.dev/faulty"
ANNOTATION = "holdfast.dev/cordon"
ATTEMPTS = 4
"""The most attempts at a change that fails because others change the Node at the same time."""
MAX_LABEL_LENGTH = 63
"""The most characters that the value of a taint or a label may have."""
MAX_REASON_LENGTH = 1024


def cause_of(reason: str) -> str:
    """Convert a reason to a taint's value: letters, digits and dashes, at most 63 characters."""
    words = re.sub(r"[^A-Za-z0-9]+", "-", reason)[:MAX_LABEL_LENGTH]
    return words.strip("-") or "faulty"


def plan_cordon(node: Mapping[str, Any], *, reason: str, by: str, at_s: float) -> dict[str, Any]:
    """Return the change (RFC 7386) that cordons a Node.

    A second cordon of Holdfast replaces the first one.

    Args:
        node: the Node, as the API server returns it.
        reason: one line for the operators.
        by: the run or the user that cordons the node.
        at_s: the time of the cordon, in Unix seconds.
    """
    spec = node.get("spec") or {}
    former = _annotation(node)
    is_ours = not spec.get("unschedulable") or bool(former and former.get("unschedulable"))
    kept = [taint for taint in spec.get("taints") or [] if taint.get("key") != TAINT]
    annotation = {
        "by": by,
        "reason": reason[:MAX_REASON_LENGTH],
        "at_s": round(at_s),
        "unschedulable": is_ours,
    }
    taint = {"key": TAINT, "value": cause_of(reason), "effect": "NoSchedule"}
    return {
        "metadata": {**_version(node), "annotations": {ANNOTATION: json.dumps(annotation)}},
        "spec": {"unschedulable": True, "taints": [*kept, taint]},
    }


def plan_return(node: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the change (RFC 7386) that removes Holdfast's cordon; None if the Node has none.

    A Node that was already cordoned when Holdfast cordoned it stays cordoned.

    Args:
        node: the Node, as the API server returns it.
    """
    spec = node.get("spec") or {}
    former, taints = _annotation(node), spec.get("taints") or []
    kept = [taint for taint in taints if taint.get("key") != TAINT]
    if former is None and len(kept) == len(taints):
        return None
    change: dict[str, Any] = {"metadata": {**_version(node), "annotations": {ANNOTATION: None}}}
    if len(kept) < len(taints):
        change["spec"] = {"taints": kept or None}
    if former is not None and former.get("unschedulable"):
        change.setdefault("spec", {})["unschedulable"] = None
    return change


def _annotation(node: Mapping[str, Any]) -> dict[str, Any] | None:
    text = ((node.get("metadata") or {}).get("annotations") or {}).get(ANNOTATION)
    if text is None:
        return None
    try:
        annotation = json.loads(text)
    except ValueError:  # a person has edited the text: the taint alone is certain
        return {}
    return annotation if isinstance(annotation, dict) else {}


def _version(node: Mapping[str, Any]) -> dict[str, str]:
    # The list of taints is replaced as a whole, so the server has to refuse the change if the Node
    # has changed meanwhile.
    version = (node.get("metadata") or {}).get("resourceVersion")
    return {} if version is None else {"resourceVersion": version}


class KubernetesCordons:
    """Mark the Nodes of a Kubernetes cluster; requires the permission to get and patch Nodes.

    Args:
        api: the API server; by default the server of KUBECONFIG or of this pod, connected on first
            use.
        now_s: returns the time in Unix seconds.
    """

    scheduler = "Kubernetes"

    def __init__(self, api: Api | None = None, now_s: Callable[[], float] = time.time) -> None:
        self._api = api
        self._now_s = now_s
        self._silence: ApiError | None = None
        """The error of a server that did not answer, so that no other node waits for the server."""

    def cordon(self, node: str, *, reason: str, by: str) -> None:
        """Cordon and taint a Node.

        Raises:
            NotMarked: there is no permission, no such Node, or no answer; the message has the
                kubectl commands.
        """
        by_hand = f"kubectl cordon {node} && kubectl taint node {node} {TAINT}={cause_of(reason)}:NoSchedule"

        def plan(found: Mapping[str, Any]) -> dict[str, Any]:
            return plan_cordon(found, reason=reason, by=by, at_s=self._now_s())

        self._change(node, plan, f"{node} is not cordoned in Kubernetes", by_hand)

    def uncordon(self, node: str) -> bool:
        """Remove Holdfast's cordon and taint from a Node.

        Raises:
            NotMarked: there is no permission, no such Node, or no answer; the message has the
                kubectl commands.
        """
        by_hand = f"kubectl taint node {node} {TAINT}- && kubectl uncordon {node}"
        return self._change(
            node, plan_return, f"{node} may still be cordoned in Kubernetes", by_hand
        )

    def _change(
        self,
        node: str,
        plan: Callable[[Mapping[str, Any]], dict[str, Any] | None],
        failure: str,
        by_hand: str,
    ) -> bool:
        try:
            if self._silence is not None:
                raise self._silence
            if self._api is None:
                self._api = connect()
            for attempt in range(1, ATTEMPTS + 1):
                change = plan(self._api.get(node_path(node)))
                if change is None:
                    return False
                try:
                    self._api.patch(node_path(node), change)
                except ApiError as error:
                    if error.status != CONFLICT or attempt == ATTEMPTS:
                        raise
                else:
                    break
        except ApiError as error:
            self._silence = None if error.status else error
            step = (
                "Set HOLDFAST_NODE_NAME to spec.nodeName in the pod's manifest."
                if error.status == 404
                else f"As an administrator: {by_hand}"
            )
            raise NotMarked(f"{failure}: {str(error).rstrip('.')}. {step}") from error
        return True
