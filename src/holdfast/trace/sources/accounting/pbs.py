"""Read the accounting files of PBS Professional, OpenPBS and Torque.

    cat $PBS_HOME/server_priv/accounting/2024* > pbs.txt

Each line is a record, `TIME;TYPE;ID;NAME=VALUE …`. The types that matter are Q (queued), S
(started), E (ended) and D (deleted):

- Each E record is one attempt, and contains all values of the job.
- A job without an E record is running if it has an S record, and cancelled if it has a D record.
- A job that has only a Q record is waiting.

Times inside E and S records are Unix times. The times at the start of lines are local times; they
are read as UTC, and used only if there are no others. The GPUs of a job are `Resource_List.ngpus`.
Without this value, they are the sum over the chunks of `select`, or of Torque's `nodes`, each times
its GPUs.

Formats and exit codes are documented in PBS Professional, Administrator's Guide, "Accounting Log"
and "Job Exit Status Codes", and in Torque, "Job Accounting".
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from holdfast.trace.clusters import Cluster
from holdfast.trace.errors import BadTrace
from holdfast.trace.schema import JOB_COLUMNS
from holdfast.trace.sources.findings import Findings
from holdfast.trace.sources.mig import is_slice, mig_share
from holdfast.trace.sources.plain_text import cluster_name, opened_text
from holdfast.trace.sources.reading import Reading, Source, drops_bad_rows, head, read_rows

if TYPE_CHECKING:
    import duckdb

NEXT_STEP: Final = "Give whole accounting files, of $PBS_HOME/server_priv/accounting."
COLUMNS: Final = (
    "cluster", "job_id", "attempt", "name", "username", "pool", "state", "reason", "exit_code", "submit_at", "start_at",
    "end_at", "run_s", "queue_s", "gpu_num", "node_num", "cpu_num", "nodes", "zone_offset",
)  # fmt: skip
_RECORD: Final = re.compile(r"(\d\d/\d\d/\d{4} \d\d:\d\d:\d\d);([A-Z]);([^;]+);(.*)")
_PAIR: Final = re.compile(r'(?:^| )([^ =]+)=("[^"]*"|[^ ]*)')
_TASK: Final = re.compile(r"\[\d+\]")
_CHUNK: Final = re.compile(r"(?:(\d+):)?(.*)")
_HOST: Final = re.compile(r"([^/+]+)/")
_GPU_NAMES: Final = ("ngpus", "gpus", "naccelerators")
_SENTENCES: Final = {"unreadable-row": ("dropped", "Records that could not be read are left out.")}
_SIGNALS_FROM: Final = 256
"""Exit statuses above this number mean that a signal ended the job."""
_TERM: Final = 15
_STATES: Final = {-29: "TIMEOUT", -28: "TIMEOUT", -27: "OUT_OF_MEMORY", -26: "OUT_OF_MEMORY"}
"""States for PBS' own exit codes.

The codes mean that a job was killed for its wall time, CPU time, memory or virtual memory.
"""


@dataclass
class _Job:
    ended: list[dict[str, str]] = field(default_factory=list)
    started: dict[str, str] = field(default_factory=dict)
    deleted_s: float | None = None
    queued_s: float | None = None
    queue: str = ""


def read_pbs(connection: "duckdb.DuckDBPyConnection", path: Path, table: str) -> Reading:
    """Read PBS accounting records; the module's docstring has the command and the rules.

    Raises:
        BadTrace: a record cannot be read; the message has the line and the expected text.
    """
    findings = Findings()
    jobs = _jobs(path, findings, drop=drops_bad_rows(connection))
    rows = (row for job_id, job in jobs.items() for row in _rows(cluster_name(path), job_id, job))
    if not read_rows(connection, table, {name: JOB_COLUMNS[name] for name in COLUMNS}, rows):
        raise BadTrace(path, "The file holds no job.", next_step=NEXT_STEP)
    cluster = Cluster(name=cluster_name(path), source=SOURCE.name)
    return Reading.of(connection, table, cluster, notes=findings.notes(cluster.name, _SENTENCES))


def recognises(path: Path) -> bool:
    """Return True if a file's first line is a PBS record."""
    return _RECORD.match(head(path, 4096).lstrip("\ufeff\r\n")) is not None


def _jobs(path: Path, findings: Findings, *, drop: bool) -> dict[str, _Job]:
    jobs: dict[str, _Job] = {}
    with opened_text(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                _add(jobs, line.rstrip("\r\n"))
            except ValueError as error:
                fault = BadTrace(path, f"{error}.", line=number, next_step=NEXT_STEP)
                if not drop:
                    raise fault from None
                findings.add("unreadable-row", str(fault))
    # An array that has begun has its own records, and so has each of its tasks. Only the tasks are
    # jobs.
    begun = {
        _TASK.sub("[]", job_id)
        for job_id, job in jobs.items()
        if "[" in job_id and ("[]" not in job_id or job.started or job.ended)
    }
    return {job_id: job for job_id, job in jobs.items() if job_id not in begun}


def _add(jobs: dict[str, _Job], line: str) -> None:
    """Add an accounting record to its job.

    Raises:
        ValueError: the line is not a record, or a number of the job cannot be read.
    """
    match = _RECORD.match(line)
    if match is None:
        raise ValueError(f"expected TIME;TYPE;ID;NAME=VALUE …, not {line[:80]!r}")
    at = datetime.strptime(match[1], "%m/%d/%Y %H:%M:%S").replace(tzinfo=UTC).timestamp()
    kind, job_id = match[2], match[3]
    if kind not in "EQSDR" or ("." not in job_id and not job_id[0].isdigit()):
        return  # Reservations, licences and the server's own records are no jobs.
    job = jobs.setdefault(job_id, _Job())
    if kind == "Q":
        job.queued_s, job.queue = at, match[4].removeprefix("queue=")
    elif kind == "D":
        job.deleted_s = at
    elif kind in "SE":
        values = dict(_pairs(match[4]))
        gpus_of(values)
        for name in ("ctime", "start", "end"):
            float(values.get(name, 0))
        if kind == "S":
            job.started = values
        else:
            job.ended.append(values)
            job.started = {}


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for match in _PAIR.finditer(text):
        yield match[1], match[2].strip('"')


def gpus_of(values: Mapping[str, str]) -> float:
    """Return the number of GPUs of a job, from its resources.

    Raises:
        ValueError: a number of GPUs cannot be read.
    """
    for name in _GPU_NAMES:
        if total := values.get(f"Resource_List.{name}"):
            return float(total)
    chunks = values.get("Resource_List.select") or values.get("Resource_List.nodes") or ""
    return sum(_of_chunk(chunk) for chunk in chunks.split("+"))


def _of_chunk(chunk: str) -> float:
    match = _CHUNK.match(chunk)
    assert match is not None, "everything matches"
    gpus, model = 0.0, ""
    for part in match[2].split(":"):
        name, _, value = part.partition("=")
        if name in _GPU_NAMES:
            gpus = float(value)
        elif is_slice(value):
            model = value
    return int(match[1] or 1) * gpus * (mig_share(model) if model else 1.0)


def _rows(cluster: str, job_id: str, job: _Job) -> Iterator[tuple[Any, ...]]:
    for number, values in enumerate(job.ended):
        state, reason, code = _outcome(
            int(values["Exit_status"]) if "Exit_status" in values else None
        )
        yield _row(cluster, job_id, number, values, state, reason, code)
    if job.started:
        yield _row(cluster, job_id, len(job.ended), job.started, "RUNNING", None, None)
    elif not job.ended:
        deleted = job.deleted_s is not None
        values = {"queue": job.queue, "ctime": str(job.queued_s or job.deleted_s or 0)}
        if deleted:
            values["end"] = str(job.deleted_s)
        state = "CANCELLED" if deleted else "PENDING"
        yield _row(cluster, job_id, 0, values, state, None, None)


def _row(
    cluster: str, job_id: str, attempt: int, values: Mapping[str, str], state: str, reason: str | None, code: int | None
) -> tuple[Any, ...]:  # fmt: skip
    submit_s, start_s, end_s = (
        float(values[name]) if float(values.get(name, 0)) > 0 else None
        for name in ("ctime", "start", "end")
    )
    nodes = list(dict.fromkeys(_HOST.findall(values.get("exec_host", ""))))
    cpus = values.get("Resource_List.ncpus")
    return (
        cluster, job_id, attempt, values.get("jobname"), values.get("user"), values.get("queue"), state, reason, code,
        submit_s, start_s, end_s, None if start_s is None or end_s is None else end_s - start_s,
        None if start_s is None or submit_s is None else start_s - submit_s, gpus_of(values), len(nodes) or None,
        float(cpus) if cpus else None, nodes or None, "",
    )  # fmt: skip


def _outcome(status: int | None) -> tuple[str, str | None, int | None]:
    """Return the state, the reason and the exit code for PBS' exit status."""
    if status is None:
        return "UNKNOWN", None, None
    if status in _STATES:
        return _STATES[status], None, None
    if status < 0:
        return "FAILED", f"PBS exit status {status}", None
    signal = (
        status - _SIGNALS_FROM if status > _SIGNALS_FROM else status - 128 if status > 128 else 0
    )
    if status > _SIGNALS_FROM and signal == _TERM:
        return "CANCELLED", None, 128 + signal  # qdel sends SIGTERM.
    code = 128 + signal if status > _SIGNALS_FROM else status
    return ("FAILED" if code else "COMPLETED"), None, code


SOURCE: Final = Source(
    name="pbs",
    title="PBS and Torque, their accounting files",
    recognises=recognises,
    read=read_pbs,
)
