"""Make objects as the API of Kubernetes shows them, and read them as a source."""

import json

from normalised_rows import read_file, unix_s

from holdfast.trace.sources.kubernetes import kueue
from holdfast.trace.sources.kubernetes.jobs import SOURCE


def at(second: int) -> str:
    return f"2024-05-01T{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}Z"


ZERO_S = 1714521600.0  # 2024-05-01T00:00:00Z


def asks(gpus=0, **other):
    limits = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    return {
        "name": "main",
        "resources": {"limits": limits | other, "requests": {"cpu": "500m", "memory": "2Gi"}},
    }


def terminated(start, end, code=0, reason=None):
    ended = {"exitCode": code, "startedAt": at(start), "finishedAt": at(end), "containerID": "x"}
    ended["reason"] = reason or ("Completed" if code == 0 else "Error")
    return {"name": "main", "state": {"terminated": ended}, "restartCount": 0}


def pod(
    name,
    created,
    start=None,
    end=None,
    *,
    phase=None,
    code=0,
    reason=None,
    gpus=8,
    node="n1",
    owner=None,
    **other,
):
    """Make a pod as the API shows it; `owner` is (kind, name)."""
    phase = phase or (
        "Pending"
        if start is None
        else "Running"
        if end is None
        else "Failed"
        if code
        else "Succeeded"
    )
    status = {"phase": phase}
    if start is not None:
        status["startTime"] = at(start)
        running = {"name": "main", "state": {"running": {"startedAt": at(start)}}}
        status["containerStatuses"] = [
            running if end is None else terminated(start, end, code, reason)
        ]
    owners = (
        [{"apiVersion": "x/v1", "kind": owner[0], "name": owner[1], "uid": "u", "controller": True}]
        if owner
        else []
    )
    meta = {
        "name": name,
        "namespace": "lab",
        "uid": name,
        "creationTimestamp": at(created),
        "ownerReferences": owners,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": meta
        | {"labels": other.pop("labels", {}), "annotations": other.pop("annotations", {})},
        "spec": {"containers": [asks(gpus)], "nodeName": node if start is not None else None}
        | other.pop("spec", {}),
        "status": status | other.pop("status", {}),
    }


def job(
    name,
    created,
    start=None,
    end=None,
    *,
    condition=None,
    reason="",
    parallelism=1,
    completions=1,
    **other,
):
    status = {"startTime": at(start)} if start is not None else {}
    if condition:
        status["conditions"] = [
            {"type": "Suspended", "status": "False", "lastTransitionTime": at(0)},
            {"type": condition, "status": "True", "reason": reason, "lastTransitionTime": at(end)},
        ]
        if condition == "Complete":
            status["completionTime"] = at(end)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": "lab", "creationTimestamp": at(created)} | other.pop("metadata", {}),
        "spec": {
            "parallelism": parallelism,
            "completions": completions,
            "template": {"spec": {"containers": [asks(4)]}},
        } | other.pop("spec", {}),
        "status": status,
    }  # fmt: skip


def read_objects(folder, *items, form="list", **variables):
    path = folder / "prod.json"
    if form == "list":
        path.write_text(
            json.dumps(
                {"apiVersion": "v1", "items": items, "kind": "List", "metadata": {}}, indent=4
            )
        )
    else:
        path.write_text("".join(json.dumps(item) + "\n" for item in items))
    assert SOURCE.recognises(path)
    assert not kueue.SOURCE.recognises(path)
    return read_file(SOURCE, path, **variables)


def seconds(row):
    times = (unix_s(row[name]) for name in ("submit_at", "start_at", "end_at"))
    return tuple(None if time is None else time - ZERO_S for time in times)
