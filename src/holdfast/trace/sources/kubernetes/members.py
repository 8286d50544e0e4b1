"""Convert a Kubernetes pod, or a Job whose pods were deleted, to a member of a job.

- Pods with the same value of a label in `GROUP_LABELS` make one job.
- Without such a label, pods of the same controller make one job.
- In a LeaderWorkerSet, each group of a leader with its workers is a job.
- A pod of a Deployment, StatefulSet or DaemonSet, or without a controller, is a job by itself.
- A pod of an Argo workflow is a job by itself, because the steps run one after another and each
  holds its own GPUs.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from holdfast.trace.errors import BadTrace
from holdfast.trace.sources.kubernetes.resources import Request, gpu_model_of, of_pod

GROUP_LABELS: Final = {
    "jobset.sigs.k8s.io/jobset-name": "jobset",
    # PyTorchJob, TFJob, MPIJob …: the launcher with its workers
    "training.kubeflow.org/job-name": "kubeflow",
    "ray.io/originated-from-cr-name": "ray",
    "ray.io/cluster": "ray",
    "volcano.sh/job-name": "volcano",
    "leaderworkerset.sigs.k8s.io/name": "leaderworkerset",
}
"""Labels with which operators mark the pods of one job, and the kind to use in the job's id."""
SERVICES: Final = frozenset(
    {"DaemonSet", "Node", "ReplicaSet", "ReplicationController", "StatefulSet"}
)
"""Controllers of services. Each of their pods is a replica, and counts as a job."""
_GROUP_OF_SET: Final = "leaderworkerset.sigs.k8s.io/group-index"
_STEPS_OF: Final = "workflows.argoproj.io/workflow"
"""Label that marks the pods of an Argo workflow."""
QUEUE_LABELS: Final = (
    "kueue.x-k8s.io/queue-name",
    "volcano.sh/queue-name",
    "scheduling.volcano.sh/queue-name",
)
ATTEMPT_LABEL: Final = "jobset.sigs.k8s.io/restart-attempt"
_PLACE_LABELS: Final = (
    "jobset.sigs.k8s.io/job-key",
    "training.kubeflow.org/replica-type",
    "training.kubeflow.org/replica-index",
    "batch.kubernetes.io/job-completion-index",
)

_STATE_OF_REASON: Final = {
    "OOMKilled": "OUT_OF_MEMORY",
    "DeadlineExceeded": "TIMEOUT",
    "NodeLost": "NODE_FAIL",
    "NodeShutdown": "NODE_FAIL",
    "Shutdown": "NODE_FAIL",
    # The node shut down in good order (Kubernetes documentation, Node Shutdowns).
    "Terminated": "NODE_FAIL",
    "ContainerStatusUnknown": "NODE_FAIL",
    "DeletionByTaintManager": "NODE_FAIL",
    "DeletionByPodGC": "NODE_FAIL",
    "Preempting": "PREEMPTED",
    "Preempted": "PREEMPTED",
    "PreemptionByScheduler": "PREEMPTED",
    "PreemptionByKubeScheduler": "PREEMPTED",
    "EvictionByEvictionAPI": "PREEMPTED",  # for example a drained node
}
"""The state for each reason of a failed pod, its containers or its DisruptionTarget condition.

All other reasons mean FAILED.
"""


_STATE_OF_VOLCANO: Final = {
    "Completed": "COMPLETED",
    "Failed": "FAILED",
    "Aborted": "CANCELLED",
    "Terminated": "CANCELLED",
}
"""The state for each final phase of a Volcano Job (its API, JobPhase).

A Job is `Terminated` by the user's policy or command.
"""
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(h|ms|m|s|us|µs|ns)")
_UNITS_S: Final = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_ENDED: Final = ("Succeeded", "Failed")
_CRASHES: Final = "CrashLoopBackOff"


@dataclass(kw_only=True, slots=True)
class Member:
    """A pod, or a Job that stands in for its deleted pods; times are Unix times in seconds."""

    key: str
    """Key of the pod's job: `namespace/kind/name`."""
    job_name: str
    pool: str
    is_service: bool
    attempt: int | None
    """Number of the attempt as the operator counts; None if the operator does not count."""
    place: str
    """Role of a pod in its job; '' if unknown. Pods with the same role replace each other."""
    created_s: float
    start_s: float | None
    end_s: float | None
    state: str
    reason: str | None
    exit_code: int | None
    request: Request
    gpu_model: str | None
    node: str | None


@dataclass(kw_only=True, slots=True)
class Verdict:
    """The state of a job as its Job object reports it."""

    key: str
    created_s: float
    state: str | None
    reason: str | None
    as_member: Member
    """The Job as a member, to be used if its pods were deleted."""


def duration_s(text: str) -> float:
    """Convert a duration in Go's notation, such as `2h0m5s`, to seconds.

    Raises:
        ValueError: the text is not a duration.
    """
    parts = _DURATION.findall(text)
    if "".join(number + unit for number, unit in parts) != text or not text:
        raise ValueError(f"expected a duration such as 2h0m5s where there is {text!r}")
    return sum(float(number) * _UNITS_S[unit] for number, unit in parts)


def unix_s(value: object) -> float | None:
    """Convert an RFC 3339 time to seconds since the Unix epoch; return None for an empty value.

    Raises:
        ValueError: the value is not a time.
    """
    if not value:
        return None
    try:
        at = datetime.fromisoformat(str(value))
    except ValueError:
        at = None
    if at is None or at.tzinfo is None:
        raise ValueError(f"expected a time such as 2023-03-01T00:18:22Z where there is {value!r}")
    return at.timestamp()


def pod_member(pod: Mapping[str, Any]) -> Member:
    """Convert a pod of the core/v1 API to a member of a job.

    The pod starts when the node's kubelet accepts it (`status.startTime`), because from then on it
    holds its GPUs, even while images are pulled. The pod ends with its last container.

    A pod of any phase counts as failed if it is being evicted, its node is lost, or a
    container keeps crashing (`CrashLoopBackOff`). Its end is then the end of the container's last
    run, or the last change of its condition.

    Raises:
        KeyError, ValueError: a field is missing, or does not have the form that the API defines.
    """
    meta, spec, status = pod["metadata"], pod["spec"], pod.get("status") or {}
    key, job_name, is_service = _job_of(meta, "pod")
    phase = status.get("phase")
    ended = _ended(status)
    start_s = unix_s(status.get("startTime"))
    if start_s is None:
        started = [_running_since(one) for one in _statuses(status, "containerStatuses")]
        start_s = min((at for at in started if at is not None), default=None)
    end_s = None
    crashed = [] if phase in _ENDED else _crashed(status)
    if phase in ("Running", "Pending") and (crashed or _is_thrown_out(status)):
        phase, ended = "Failed", crashed
    if phase in _ENDED:
        # An evicted pod may lack the end of its container. Its last change of state is then used as
        # its end.
        ends = [unix_s(one.get("finishedAt")) for one in ended] or [None]
        known = (
            [at for at in ends if at is not None]
            or _changes(status)
            or [unix_s(meta.get("deletionTimestamp"))]
        )
        end_s = max((at for at in known if at is not None), default=None)
    state, reason, exit_code = _outcome(phase, status, ended, started=start_s is not None)
    return Member(
        key=key,
        job_name=job_name,
        pool=_pool(meta),
        is_service=is_service,
        attempt=_attempt(meta),
        place="/".join(filter(None, (_labels(meta).get(label) for label in _PLACE_LABELS))),
        created_s=_created_s(meta),
        start_s=start_s,
        end_s=end_s,
        state=state,
        reason=reason,
        exit_code=exit_code,
        request=of_pod(spec, meta.get("annotations")),
        gpu_model=gpu_model_of(spec),
        node=spec.get("nodeName"),
    )


def job_verdict(job: Mapping[str, Any]) -> Verdict:
    """Convert a Job of the batch/v1 API.

    Raises:
        KeyError, ValueError: a field is missing, or does not have the form that the API defines.
    """
    meta, spec, status = job["metadata"], job["spec"], job.get("status") or {}
    labelled = _job_of(meta, "job")
    # A Job with an operator's labels belongs to the operator's job, even if it has another owner.
    key, job_name = (
        labelled[:2] if labelled[0].split("/")[1] in GROUP_LABELS.values() else _own(meta, "job")
    )
    verdict, reason, end_s = None, None, unix_s(status.get("completionTime"))
    for condition in status.get("conditions") or ():
        if condition.get("status") == "True" and condition.get("type") in ("Complete", "Failed"):
            verdict = "COMPLETED" if condition["type"] == "Complete" else "FAILED"
            reason = condition.get("reason") if verdict == "FAILED" else None
            end_s = end_s or unix_s(condition.get("lastTransitionTime"))
    if reason == "DeadlineExceeded":
        verdict = "TIMEOUT"
    start_s = unix_s(status.get("startTime"))
    template = spec["template"]["spec"]
    parallelism = int(spec.get("parallelism", 1))
    count = min(parallelism, int(spec.get("completions") or parallelism))
    created_s = _created_s(meta)
    as_member = Member(
        key=key,
        job_name=job_name,
        pool=_pool(meta),
        is_service=False,
        attempt=_attempt(meta),
        place="",
        created_s=created_s,
        start_s=start_s,
        end_s=end_s if verdict else None,
        state=verdict or ("PENDING" if start_s is None or spec.get("suspend") else "RUNNING"),
        reason=reason,
        exit_code=None,
        request=of_pod(template, (spec["template"].get("metadata") or {}).get("annotations")).times(
            count
        ),
        gpu_model=gpu_model_of(template),
        node=None,
    )
    return Verdict(key=key, created_s=created_s, state=verdict, reason=reason, as_member=as_member)


def volcano_verdict(job: Mapping[str, Any]) -> Verdict:
    """Convert a Job of Volcano's batch.volcano.sh API. Its start is when it first runs.

    Raises:
        KeyError, ValueError: a field is missing, or does not have the form that the API defines.
    """
    meta, spec, status = job["metadata"], job["spec"], job.get("status") or {}
    name, phase = meta["name"], (status.get("state") or {}).get("phase", "Pending")
    ended_s = unix_s((status.get("state") or {}).get("lastTransitionTime"))
    since = {
        one.get("status"): unix_s(one.get("lastTransitionTime"))
        for one in reversed(
            _statuses(status, "conditions")
        )  # Reversed, so that the first condition of each status is kept.
    }
    verdict = _STATE_OF_VOLCANO.get(phase)
    start_s = since.get("Running")
    if start_s is None and verdict and ended_s and (lasted := status.get("runningDuration")):
        start_s = ended_s - duration_s(lasted)
    request, models = Request(), set[str]()
    for task in spec["tasks"]:
        template = task["template"]
        annotations = (template.get("metadata") or {}).get("annotations")
        request += of_pod(template["spec"], annotations).times(int(task.get("replicas", 1)))
        models |= {gpu_model_of(template["spec"]) or ""} - {""}
    namespace = meta.get("namespace", "default")
    key, queue = f"{namespace}/volcano/{name}", spec.get("queue")
    created_s = _created_s(meta)
    waits = phase in ("Pending", "Inqueue", "Restarting") and start_s is None
    as_member = Member(
        key=key, job_name=name, pool=f"{namespace}/{queue}" if queue else _pool(meta), is_service=False,
        attempt=int(status.get("retryCount") or 0), place="", created_s=created_s, start_s=start_s,
        end_s=ended_s if verdict else None, state=verdict or ("PENDING" if waits else "RUNNING"),
        reason=(status.get("state") or {}).get("reason") if verdict == "FAILED" else None, exit_code=None,
        request=request, gpu_model="+".join(sorted(models)) or None, node=None,
    )  # fmt: skip
    return Verdict(
        key=key,
        created_s=created_s,
        state=verdict,
        reason=as_member.reason,
        as_member=as_member,
    )


def owner_key(meta: Mapping[str, Any], kind: str) -> tuple[str, str]:
    """Return the id and the name of the job that an object belongs to.

    These come from the object's labels, else from its controller, else from its own name.
    """
    return _job_of(meta, kind)[:2]


def bad_object(
    path: Path, line: int | None, item: Mapping[str, Any], error: Exception, *, next_step: str
) -> BadTrace:
    """Return the error message for an object with a missing or invalid field."""
    meta = item.get("metadata")
    name = meta.get("name", "without a name") if isinstance(meta, dict) else "without metadata"
    problem = f"has no {error}" if isinstance(error, KeyError) else str(error)
    return BadTrace(
        path, f"{item.get('kind', 'object')} {name}: {problem}.", line=line, next_step=next_step
    )


def _job_of(meta: Mapping[str, Any], kind: str) -> tuple[str, str, bool]:
    """Return the key and the name of the job that an object belongs to.

    The third value is True if the object is a replica of a service.
    """
    namespace, labels = meta.get("namespace", "default"), _labels(meta)
    for label, kind_of_label in GROUP_LABELS.items():
        if name := labels.get(label):
            name = "-".join(filter(None, (name, labels.get(_GROUP_OF_SET))))
            return f"{namespace}/{kind_of_label}/{name}", name, False
    if workflow := labels.get(_STEPS_OF):
        return f"{namespace}/workflow/{workflow}/{meta['name']}", workflow, False
    owners = meta.get("ownerReferences") or ()
    owner = next((one for one in owners if one.get("controller")), owners[0] if owners else None)
    if owner is None or owner["kind"] in SERVICES:
        return (*_own(meta, kind), owner is not None)
    return f"{namespace}/{owner['kind'].lower()}/{owner['name']}", owner["name"], False


def _own(meta: Mapping[str, Any], kind: str) -> tuple[str, str]:
    return f"{meta.get('namespace', 'default')}/{kind}/{meta['name']}", meta["name"]


def _labels(meta: Mapping[str, Any]) -> Mapping[str, str]:
    return meta.get("labels") or {}


def _pool(meta: Mapping[str, Any]) -> str:
    namespace = str(meta.get("namespace", "default"))
    marks = {**(meta.get("annotations") or {}), **_labels(meta)}
    queue = next((marks[label] for label in QUEUE_LABELS if label in marks), None)
    return f"{namespace}/{queue}" if queue else namespace


def _attempt(meta: Mapping[str, Any]) -> int | None:
    attempt = _labels(meta).get(ATTEMPT_LABEL)
    return int(attempt) if attempt is not None else None


def _created_s(meta: Mapping[str, Any]) -> float:
    created_s = unix_s(meta["creationTimestamp"])
    if created_s is None:
        raise ValueError("expected a creationTimestamp")
    return created_s


def _statuses(status: Mapping[str, Any], name: str) -> Sequence[Mapping[str, Any]]:
    return status.get(name) or ()


def _running_since(container: Mapping[str, Any]) -> float | None:
    state = container.get("state") or {}
    return unix_s((state.get("running") or state.get("terminated") or {}).get("startedAt"))


def _ended(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the ends of a pod's containers and of its failed init containers."""
    ended = []
    for name in ("initContainerStatuses", "containerStatuses"):
        for container in _statuses(status, name):
            terminated = (container.get("state") or {}).get("terminated")
            if terminated and (name == "containerStatuses" or terminated.get("exitCode")):
                ended.append(terminated)
    return ended


def _crashed(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the last end of each container that keeps crashing, with the crash as its reason."""
    crashed: list[Mapping[str, Any]] = []
    for name in ("initContainerStatuses", "containerStatuses"):
        for container in _statuses(status, name):
            waiting = (container.get("state") or {}).get("waiting") or {}
            if waiting.get("reason") == _CRASHES:
                last = (container.get("lastState") or {}).get("terminated") or {}
                why = last.get("reason")
                telling = why if why in _STATE_OF_REASON else _CRASHES
                crashed.append({"exitCode": 1, **last, "reason": telling})
    return crashed


def _is_thrown_out(status: Mapping[str, Any]) -> bool:
    """Return True if a pod is being evicted or its node is lost, regardless of its phase."""
    disrupted = any(
        one.get("type") == "DisruptionTarget" and one.get("status") == "True"
        for one in _statuses(status, "conditions")
    )
    return disrupted or status.get("reason") in {"Evicted", *_STATE_OF_REASON}


def _changes(status: Mapping[str, Any]) -> list[float | None]:
    kinds = ("DisruptionTarget", "Ready", "ContainersReady")
    conditions = [one for one in _statuses(status, "conditions") if one.get("type") in kinds]
    return [unix_s(one.get("lastTransitionTime")) for one in conditions]


def _outcome(
    phase: str | None,
    status: Mapping[str, Any],
    ended: Sequence[Mapping[str, Any]],
    *,
    started: bool,
) -> tuple[str, str | None, int | None]:
    if phase == "Succeeded":
        return "COMPLETED", None, 0
    if phase in ("Running", "Pending"):
        return "RUNNING" if started else "PENDING", None, None
    if phase != "Failed":
        return "UNKNOWN", None, None
    failed = [one for one in ended if one.get("exitCode")]
    # The container that failed first brought the others down.
    first = min(failed, key=lambda one: str(one.get("finishedAt") or "~"), default={})
    disruption = [
        one.get("reason")
        for one in _statuses(status, "conditions")
        if one.get("type") == "DisruptionTarget" and one.get("status") == "True"
    ]
    stated_reasons = [status.get("reason"), *disruption, first.get("reason")]
    reasons = [reason for reason in stated_reasons if reason and reason != "Error"]
    telling = [reason for reason in reasons if reason in _STATE_OF_REASON]
    exit_code = first.get("exitCode")
    return (
        _STATE_OF_REASON[telling[0]] if telling else "FAILED",
        next(iter(telling or reasons), None),
        int(exit_code) if exit_code is not None else None,
    )
