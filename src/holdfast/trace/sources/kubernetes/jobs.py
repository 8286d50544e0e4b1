"""Read Kubernetes pods and Jobs, as `kubectl get pods,jobs -A -o json` prints them.

    kubectl get pods,jobs --all-namespaces --output json > cluster.json

The file is a `List`, or one object after another (`jq -c '.items[]'`), or YAML. Volcano's Jobs are
read with or without their pods. The API keeps no history, so deleted pods and Jobs are missing.
Exporting regularly, or exporting Kueue's workloads (`holdfast.trace.sources.kubernetes.kueue`),
gives a more complete trace.

`members` groups pods into jobs, and `job_rows` makes the rows. If pods were created after all
earlier pods of the job had ended, they are the next attempt of the job. The values of an attempt
are:

* submit: when its first pod was created
* start: when its last pod started, if all pods ran together at some time (a gang), else when the
  first pod started
* end: when its last pod ended; missing while a pod runs or waits
* GPUs: the most that its pods held at the same time
* state: RUNNING or PENDING while a pod runs or waits, else the state of its Job object, else the
  state of the first pod that failed and was not replaced

Fields and reasons are documented in the Kubernetes API reference, core/v1 Pod and batch/v1 Job,
versions 1.26 to 1.33.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from holdfast.trace.clusters import Cluster
from holdfast.trace.errors import BadTrace
from holdfast.trace.schema import JOB_COLUMNS
from holdfast.trace.sources.findings import Findings
from holdfast.trace.sources.kubernetes.members import (
    Member,
    Verdict,
    bad_object,
    job_verdict,
    pod_member,
    volcano_verdict,
)
from holdfast.trace.sources.kubernetes.objects import kubernetes_objects, names_a_kind
from holdfast.trace.sources.plain_text import cluster_name
from holdfast.trace.sources.reading import Reading, Source, drops_bad_rows
from holdfast.trace.sources.rows import read_rows

if TYPE_CHECKING:
    import duckdb

NEXT_STEP: Final = "Export again with `kubectl get pods,jobs -A -o json`."
COLUMNS: Final = (
    "cluster", "job_id", "attempt", "name", "pool", "state", "reason", "exit_code", "submit_at", "start_at", "end_at",
    "run_s", "queue_s", "gpu_num", "node_num", "cpu_num", "mem_gb", "gpu_model", "nodes", "zone_offset",
)  # fmt: skip
_KINDS: Final = "Pod|Job|PodList|JobList"
_SENTENCES: Final = {
    "unreadable-row": ("dropped", "Objects that could not be read are left out."),
    "kubernetes-services": ("dropped", "Pods of services that request no GPU are not jobs."),
    "kubernetes-reservations": (
        "dropped",
        "Pods that reserve a GPU for the fractions of others are not jobs; the fractions were counted.",
    ),
    "kubernetes-other-kinds": ("dropped", "Objects that are neither pods nor Jobs were left out."),
    "kubernetes-no-pods": (
        "kept",
        (
            "Jobs whose pods were deleted: they start when the Job was first processed, and their nodes "
            "are unknown."
        ),
    ),
    "kubernetes-gpu-shares": (
        "kept",
        (
            "Pods request accelerators whose number per GPU is not recorded, so they count "
            "as no GPU."
        ),
    ),
}
_RESERVING: Final = frozenset({"kai-resource-reservation", "runai-reservation"})
"""Namespaces in which Run:ai and its KAI scheduler reserve whole GPUs.

The reservations are for pods that request fractions of a GPU.
"""
_OPEN: Final = frozenset({"RUNNING", "PENDING"})
_GOOD: Final = frozenset({"COMPLETED", *_OPEN})


def read_kubernetes(connection: "duckdb.DuckDBPyConnection", path: Path, table: str) -> Reading:
    """Read pods and Jobs; the module's docstring has the command and the rules.

    Objects are read one at a time, and each takes about 1 kB of memory.

    Raises:
        BadTrace: an object cannot be read; the message has the line, the object and the expected
            value.
    """
    findings = Findings()
    drop = drops_bad_rows(connection)
    members: dict[str, list[Member]] = {}
    verdicts: dict[str, list[Verdict]] = {}
    for line, item in kubernetes_objects(path, next_step=NEXT_STEP):
        try:
            read = _read(path, line, item)
        except BadTrace as fault:
            if not drop:
                raise
            findings.add("unreadable-row", str(fault).removesuffix(" " + NEXT_STEP))
            continue
        if isinstance(read, Verdict):
            verdicts.setdefault(read.key, []).append(read)
        elif read is None:
            if not _kind(item).endswith("List"):
                findings.add("kubernetes-other-kinds", _kind(item))
        elif check := _no_job(read):
            findings.add(check, read.key)
        else:
            members.setdefault(read.key, []).append(read)
            if uncounted := sorted(read.request.uncounted):
                findings.add("kubernetes-gpu-shares", f"{read.key}: {', '.join(uncounted)}")
    for key, job_verdicts in verdicts.items():
        if key not in members:
            findings.add("kubernetes-no-pods", key)
            members[key] = [verdict.as_member for verdict in job_verdicts]
    rows = (
        row
        for key, of_job in members.items()
        for row in job_rows(cluster_name(path), key, of_job, verdicts.get(key, ()))
    )
    count = read_rows(connection, table, {name: JOB_COLUMNS[name] for name in COLUMNS}, rows)
    if not count:
        raise BadTrace(path, "The file holds no job.", next_step=NEXT_STEP)
    cluster = Cluster(name=cluster_name(path), source=SOURCE.name)
    return Reading.of(connection, table, cluster, notes=findings.notes(cluster.name, _SENTENCES))


def _no_job(pod: Member) -> str | None:
    """Return the name of the check that leaves this pod out; None if the pod belongs to a job."""
    if pod.key.partition("/")[0] in _RESERVING:
        return "kubernetes-reservations"
    asks = pod.request.gpu_num or pod.request.uncounted
    return "kubernetes-services" if pod.is_service and not asks else None


def recognises(path: Path) -> bool:
    """Return True if a file begins with pods or Jobs."""
    return names_a_kind(path, _KINDS) and not names_a_kind(path, "Workload|WorkloadList")


def job_rows(
    cluster: str, key: str, members: Sequence[Member], verdicts: Sequence[Verdict]
) -> Iterator[tuple[Any, ...]]:
    """Yield a row for each attempt of a job, with the columns `COLUMNS`.

    Args:
        cluster: name of the cluster.
        key: id of the job.
        members: pods of the job, in any order.
        verdicts: Job objects of the job, if they were exported.
    """
    attempts = _attempts(members)
    last = max(attempts)
    for number, pods in attempts.items():
        started = [pod for pod in pods if pod.start_s is not None]
        start_s, end_s = _start_s(started), _end_s(pods)
        state, reason, exit_code = _outcome(pods)
        submit_s = min(pod.created_s for pod in pods)
        if number == min(attempts):
            submit_s = min([submit_s, *(verdict.created_s for verdict in verdicts)])
        reasons = {verdict.state: verdict.reason for verdict in verdicts}
        if number == last and None not in reasons and reasons:
            # The job is complete only if all its Jobs are.
            verdict = next((one for one in reasons if one != "COMPLETED"), "COMPLETED")
            if verdict == "COMPLETED":
                state, reason, exit_code = "COMPLETED", None, 0
            elif state in _GOOD or verdict == "TIMEOUT":
                state, reason = str(verdict), reason or reasons[verdict]
        nodes = sorted({pod.node for pod in pods if pod.node})
        # A pod with an unknown end held its GPUs for an unknown time, so it is left out if other
        # pods have a known end.
        held = [pod for pod in started if pod.end_s is not None or pod.state in _OPEN]
        held = held or started or list(pods)
        yield (
            cluster, key, number, pods[0].job_name, pods[0].pool, state, reason, exit_code, submit_s, start_s, end_s,
            None if start_s is None or end_s is None else end_s - start_s,
            None if start_s is None else start_s - submit_s,
            _most(held, lambda pod: pod.request.gpu_num), len(nodes) or None,
            _most(held, lambda pod: pod.request.cpu_num), _most(held, lambda pod: pod.request.mem_gb),
            "+".join(sorted({pod.gpu_model for pod in pods if pod.gpu_model})) or None, nodes or None, "+00:00",
        )  # fmt: skip


def _attempts(members: Sequence[Member]) -> dict[int, list[Member]]:
    """Group the pods of a job by attempt.

    The attempt is the operator's count if there is one. Otherwise, a new attempt starts with a pod
    that was created after all earlier pods had ended.
    """
    attempts: dict[int, list[Member]] = {}
    number, last_end_s = 0, None
    for member in sorted(members, key=lambda member: member.created_s):
        if member.attempt is not None:
            attempts.setdefault(member.attempt, []).append(member)
            continue
        if last_end_s is not None and member.created_s >= last_end_s:
            number, last_end_s = number + 1, None
        attempts.setdefault(number, []).append(member)
        last_end_s = _end_s(attempts[number])
    return dict(sorted(attempts.items()))


def _start_s(started: Sequence[Member]) -> float | None:
    starts = [pod.start_s for pod in started if pod.start_s is not None]
    if not starts:
        return None
    first_end_s = min((pod.end_s for pod in started if pod.end_s is not None), default=None)
    gang = first_end_s is None or max(starts) < first_end_s
    return max(starts) if gang else min(starts)


def _end_s(pods: Sequence[Member]) -> float | None:
    if any(pod.state in _OPEN for pod in pods):
        return None
    return max((pod.end_s for pod in pods if pod.end_s is not None), default=None)


def _outcome(pods: Sequence[Member]) -> tuple[str, str | None, int | None]:
    if any(pod.state in _OPEN for pod in pods):
        return "RUNNING" if any(pod.start_s is not None for pod in pods) else "PENDING", None, None
    latest = {pod.place: pod for pod in sorted(pods, key=lambda pod: pod.created_s) if pod.place}
    standing = [pod for pod in pods if not pod.place or latest[pod.place] is pod]
    ended_badly = [pod for pod in standing if pod.state != "COMPLETED"]
    if not ended_badly:
        return "COMPLETED", None, 0
    first = min(ended_badly, key=lambda pod: float("inf") if pod.end_s is None else pod.end_s)
    return first.state, first.reason, first.exit_code


def _most(pods: Sequence[Member], amount: Callable[[Member], float]) -> float:
    """Return the most that the pods held at the same time, or the sum if no pod has started."""
    changes = []
    for pod in pods:
        changes.append((float("-inf") if pod.start_s is None else pod.start_s, 1, amount(pod)))
        if pod.start_s is not None and pod.end_s is not None:
            changes.append(
                (pod.end_s, 0, -amount(pod))
            )  # 0 sorts first: an ending pod makes room for one that starts at the same time.
    held = most = 0.0
    for _, _, change in sorted(changes):
        held += change
        most = max(most, held)
    return most


def _kind(item: dict[str, Any]) -> str:
    """Return the kind of an object.

    Items of the API's own lists have no kind, so it is derived from their fields.
    """
    if "kind" in item:
        return str(item["kind"])
    spec = item.get("spec") or {}
    return "Pod" if "containers" in spec else "Job" if "template" in spec else "unknown"


def _read(path: Path, line: int | None, item: dict[str, Any]) -> Member | Verdict | None:
    """Parse a pod, or a Job of the batch API or of Volcano; return None for any other kind."""
    kind, api = _kind(item), str(item.get("apiVersion", "batch/v1")).partition("/")[0]
    try:
        if kind == "Pod":
            return pod_member(item)
        if kind == "Job":
            read = {"batch": job_verdict, "batch.volcano.sh": volcano_verdict}.get(api)
            return read(item) if read else None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise bad_object(path, line, item, error, next_step=NEXT_STEP) from None
    return None


SOURCE: Final = Source(
    name="kubernetes",
    title="Kubernetes, the JSON or YAML of kubectl get pods,jobs",
    recognises=recognises,
    read=read_kubernetes,
)
