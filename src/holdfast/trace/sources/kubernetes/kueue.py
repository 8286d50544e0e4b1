"""Read Kueue's workloads, as `kubectl get workloads -A -o json` prints them.

    kubectl get workloads.kueue.x-k8s.io --all-namespaces --output json > workloads.json

A workload is read as a job. It is submitted when the workload was created, starts when it was
admitted (from then on it holds its quota), and ends when it finished. Kueue keeps only the last
change of each condition, so the times of runs before an eviction are lost. `attempt` has the number
of these runs. Fields and reasons are documented in the Kueue API, kueue.x-k8s.io v1beta1 and
v1beta2.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from holdfast.trace.clusters import Cluster
from holdfast.trace.errors import BadTrace
from holdfast.trace.schema import JOB_COLUMNS
from holdfast.trace.sources.findings import Findings
from holdfast.trace.sources.kubernetes.members import bad_object, owner_key, unix_s
from holdfast.trace.sources.kubernetes.objects import kubernetes_objects, names_a_kind
from holdfast.trace.sources.kubernetes.resources import Request, gpu_model_of, of_pod, of_resources
from holdfast.trace.sources.plain_text import cluster_name, head
from holdfast.trace.sources.reading import Reading, Source, drops_bad_rows
from holdfast.trace.sources.rows import read_rows

if TYPE_CHECKING:
    import duckdb

NEXT_STEP: Final = "Export again with `kubectl get workloads.kueue.x-k8s.io -A -o json`."
COLUMNS: Final = (
    "cluster", "job_id", "attempt", "name", "pool", "state", "reason", "submit_at", "start_at", "end_at", "run_s",
    "queue_s", "gpu_num", "cpu_num", "mem_gb", "gpu_model", "zone_offset",
)  # fmt: skip
_SENTENCES: Final = {
    "unreadable-row": ("dropped", "Workloads that could not be read are left out."),
    "kueue-evicted": (
        "kept",
        (
            "Workloads were evicted before; the times of their earlier runs are not in the records, "
            "and not counted."
        ),
    ),
    "kueue-other-kinds": ("dropped", "Objects that are not workloads were left out."),
    "kueue-gpu-shares": (
        "kept",
        (
            "Workloads request accelerators whose number per GPU is not recorded, so they "
            "count as no GPU."
        ),
    ),
}


def read_kueue(connection: "duckdb.DuckDBPyConnection", path: Path, table: str) -> Reading:
    """Read Kueue's workloads, one at a time.

    Raises:
        BadTrace: a workload cannot be read; the message has the line, the workload and the
            expected value.
    """
    findings = Findings()
    count = read_rows(
        connection,
        table,
        {name: JOB_COLUMNS[name] for name in COLUMNS},
        _rows(path, findings, drop=drops_bad_rows(connection)),
    )
    if not count:
        raise BadTrace(path, "The file holds no job.", next_step=NEXT_STEP)
    cluster = Cluster(name=cluster_name(path), source=SOURCE.name)
    return Reading.of(connection, table, cluster, notes=findings.notes(cluster.name, _SENTENCES))


def recognises(path: Path) -> bool:
    """Return True if a file begins with Kueue's workloads."""
    return "kueue.x-k8s.io" in head(path) and names_a_kind(path, "Workload|WorkloadList")


def _rows(path: Path, findings: Findings, *, drop: bool) -> Iterator[tuple[Any, ...]]:
    for line, item in kubernetes_objects(path, next_step=NEXT_STEP):
        if "podSets" not in (item.get("spec") or {}):
            if not str(item.get("kind", "")).endswith("List"):
                findings.add("kueue-other-kinds", str(item.get("kind")))
            continue
        try:
            row = _row(cluster_name(path), item, findings)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            fault = bad_object(path, line, item, error, next_step=NEXT_STEP)
            if not drop:
                raise fault from None
            findings.add("unreadable-row", str(fault).removesuffix(" " + NEXT_STEP))
        else:
            yield row


def _row(cluster: str, item: Mapping[str, Any], findings: Findings) -> tuple[Any, ...]:
    meta, spec, status = item["metadata"], item["spec"], item.get("status") or {}
    key, name = owner_key(meta, "workload")
    conditions = {one["type"]: one for one in status.get("conditions") or ()}
    request = _request(spec, status)
    evictions = _evictions(status, conditions)
    if evictions:
        findings.add("kueue-evicted", key)
    if uncounted := sorted(request.uncounted):
        findings.add("kueue-gpu-shares", f"{key}: {', '.join(uncounted)}")
    submit_s = unix_s(meta["creationTimestamp"])
    start_s = _since(conditions, "Admitted")
    state, reason, end_s = _outcome(spec, conditions, admitted=start_s is not None)
    models = {gpu_model_of(pods["template"]["spec"]) for pods in spec["podSets"]} - {None}
    return (
        cluster, key, evictions, name, f"{meta.get('namespace', 'default')}/{spec.get('queueName', '')}", state, reason,
        submit_s, start_s, end_s, None if start_s is None or end_s is None else end_s - start_s,
        None if start_s is None or submit_s is None else start_s - submit_s, request.gpu_num, request.cpu_num,
        request.mem_gb, "+".join(sorted(str(model) for model in models)) or None, "+00:00",
    )  # fmt: skip


def _request(spec: Mapping[str, Any], status: Mapping[str, Any]) -> Request:
    """Return the resources that are reserved for all pods of a workload.

    For pods without a reservation, these are the resources that they request.
    """
    assigned = {
        one["name"]: one for one in (status.get("admission") or {}).get("podSetAssignments") or ()
    }
    request = Request()
    for pods in spec["podSets"]:
        given = assigned.get(pods.get("name", "main"), {})
        template = pods["template"]
        annotations = (template.get("metadata") or {}).get("annotations")
        requested = of_pod(template["spec"], annotations).times(
            int(given.get("count", pods.get("count", 1)))
        )
        # The reservation includes a LimitRange's defaults, but a queue's quota may omit resources.
        usage = of_resources(given.get("resourceUsage") or {})
        request += usage if usage.gpu_num else requested
    return request


def _evictions(status: Mapping[str, Any], conditions: Mapping[str, Any]) -> int:
    counted = (status.get("schedulingStats") or {}).get("evictions") or ()
    requeued = (status.get("requeueState") or {}).get("count") or 0
    return max(
        sum(int(one.get("count", 0)) for one in counted),
        int(requeued),
        int("Evicted" in conditions),
    )


def _since(conditions: Mapping[str, Any], kind: str) -> float | None:
    condition = conditions.get(kind)
    return (
        unix_s(condition["lastTransitionTime"])
        if condition and condition.get("status") == "True"
        else None
    )


def _outcome(
    spec: Mapping[str, Any], conditions: Mapping[str, Any], *, admitted: bool
) -> tuple[str, str | None, float | None]:
    """Return the state, the reason and the end time of a workload."""
    finished_s = _since(conditions, "Finished")
    if finished_s is not None:
        condition = conditions["Finished"]
        reason, message = (
            str(condition.get("reason", "")),
            str(condition.get("message", "")).lower(),
        )
        # Before Kueue 0.7, the reason is JobFinished for both success and failure, and only the
        # message differs.
        if reason == "Succeeded" or (reason == "JobFinished" and "success" in message):
            return "COMPLETED", None, finished_s
        if reason in ("Failed", "AdmissionChecksRejected", "FailedToStart") or "fail" in message:
            return "FAILED", reason, finished_s
        if reason in ("OwnerNotFound", "OutOfSync"):
            return "CANCELLED", reason, finished_s
        return "UNKNOWN", reason or None, finished_s
    if spec.get("active") is False:
        evicted = conditions.get("Evicted") or {}
        why = str(evicted.get("reason", "Deactivated"))
        state = (
            "TIMEOUT"
            if "MaximumExecutionTime" in why
            else "FAILED"
            if "Limit" in why
            else "CANCELLED"
        )
        return state, why, _since(conditions, "Evicted")
    return ("RUNNING" if admitted else "PENDING"), None, None


SOURCE: Final = Source(
    name="kueue",
    title="Kueue, the JSON or YAML of kubectl get workloads",
    recognises=recognises,
    read=read_kueue,
)
