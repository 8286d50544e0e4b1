"""Read the Standard Workload Format (SWF).

The Parallel Workloads Archive and `holdfast trace export --to swf` write such files. A job is a
line of eighteen numbers, where -1 means unknown. The comments before the jobs define the numbers
(Feitelson, "The Standard Workload Format", version 2.2).

- Times are seconds since `UnixStartTime`. The start is submission plus wait, and the end is start
  plus run time.
- A cancelled job without a run time never started.
- Partial executions (status 2) are skipped, because the last record of the job has its total time.
- SWF counts processors. If the comments state that these are GPUs, as in Holdfast's own export,
  they are read as GPUs. Otherwise they are CPU cores, and the trace has no GPUs.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from holdfast.trace.clusters import Cluster
from holdfast.trace.errors import BadTrace
from holdfast.trace.schema import JOB_COLUMNS
from holdfast.trace.sources.findings import Findings
from holdfast.trace.sources.plain_text import cluster_name, opened_text
from holdfast.trace.sources.reading import Reading, Source, drops_bad_rows, head, read_rows

if TYPE_CHECKING:
    import duckdb

NEXT_STEP: Final = "Give a file of the Standard Workload Format, with eighteen numbers a line."
GPU_NOTE: Final = "a processor is a GPU"
COLUMNS: Final = (
    "cluster", "job_id", "username", "pool", "state", "submit_at", "start_at", "end_at", "run_s", "queue_s", "gpu_num",
    "cpu_num", "zone_offset",
)  # fmt: skip
_FIELDS: Final = 18
_LINE: Final = re.compile(r"\s*-?\d+(\.\d+)?(\s+-?\d+(\.\d+)?){17}\s*$")
_HEADER: Final = re.compile(r";\s*([A-Za-z]+):\s*(.*)")
_QUEUE: Final = re.compile(r"(\d+)\s+(.+)")
_STATES: Final = {0: "FAILED", 1: "COMPLETED", 3: "COMPLETED", 4: "FAILED", 5: "CANCELLED"}
_PARTIAL: Final = 2
_SENTENCES: Final = {
    "unreadable-row": ("dropped", "Lines that could not be read are left out."),
    "swf-partial": ("dropped", "Parts of jobs that went on later were not counted as jobs."),
    "swf-processors": (
        "kept",
        (
            "Its processors were read as CPU cores. Where they are GPUs, begin it with `; Note: "
            f"{GPU_NOTE}`."
        ),
    ),
    "swf-no-start-time": (
        "kept",
        "The file has no UnixStartTime: its times are seconds since 1970.",
    ),
}


def read_swf(connection: "duckdb.DuckDBPyConnection", path: Path, table: str) -> Reading:
    """Read a file of the Standard Workload Format; the module's docstring has the rules.

    Raises:
        BadTrace: a line cannot be read; the message has the line and the expected text.
    """
    comments, queues = _comments(path)
    has_gpus = GPU_NOTE in " ".join(comments.get("Note", []))
    start_s = float(next(iter(comments.get("UnixStartTime", [])), "").split(" ")[0] or 0)
    name = next(iter(comments.get("Computer", [])), "") if has_gpus else ""
    cluster = Cluster(name=name or cluster_name(path), source=SOURCE.name)
    findings = Findings()
    rows = _rows(path, cluster.name, start_s, queues, findings, drop=drops_bad_rows(connection))
    columns = {name: JOB_COLUMNS[name] for name in COLUMNS}
    if not read_rows(connection, table, columns, rows):
        raise BadTrace(path, "The file holds no job.", next_step=NEXT_STEP)
    # All processors of a file are of one kind.
    other = "cpu_num" if has_gpus else "gpu_num"
    connection.execute(f"ALTER TABLE {table} DROP COLUMN {other}")
    if not has_gpus:
        findings.add("swf-processors", path.name)
    if not start_s:
        findings.add("swf-no-start-time", path.name)
    return Reading.of(connection, table, cluster, notes=findings.notes(cluster.name, _SENTENCES))


def recognises(path: Path) -> bool:
    """Return True if a file's first line after the comments has eighteen numbers."""
    for line in head(path, 65536).splitlines():
        if line.strip() and not line.startswith(";"):
            return _LINE.match(line) is not None
    return False


def _comments(path: Path) -> tuple[dict[str, list[str]], dict[int, str]]:
    comments: dict[str, list[str]] = {}
    with opened_text(path) as file:
        for line in file:
            if line.strip() and not line.startswith(";"):
                break
            if match := _HEADER.match(line):
                comments.setdefault(match[1], []).append(match[2].strip())
    queues = {
        int(match[1]): match[2]
        for text in comments.get("Queue", [])
        if (match := _QUEUE.match(text))
    }
    return comments, queues


def _rows(
    path: Path,
    cluster: str,
    start_s: float,
    queues: dict[int, str],
    findings: Findings,
    *,
    drop: bool,
) -> Iterator[tuple[Any, ...]]:
    with opened_text(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip() or line.startswith(";"):
                continue
            if not _LINE.match(line):
                fault = BadTrace(
                    path, f"expected {_FIELDS} numbers, not {line.strip()[:80]!r}.", line=number, next_step=NEXT_STEP
                )  # fmt: skip
                if not drop:
                    raise fault
                findings.add("unreadable-row", str(fault))
                continue
            fields = [float(field) for field in line.split()]
            job, submit, wait, run, held, status = *fields[:5], int(fields[10])
            if status == _PARTIAL:
                findings.add("swf-partial", f"{job:.0f}")
                continue
            state = _STATES.get(status, "UNKNOWN")
            started = wait >= 0 and not (state == "CANCELLED" and run <= 0)
            submit_s = start_s + submit
            begun_s = submit_s + wait if started else None
            run_s = run if started and run >= 0 else None
            processors = held if held >= 0 else max(fields[7], 0.0)
            queue = int(fields[14])
            yield (
                cluster, f"{job:.0f}", None if fields[11] < 0 else f"{fields[11]:.0f}",
                None if queue < 0 else queues.get(queue, str(queue)), state, submit_s, begun_s,
                None if begun_s is None or run_s is None else begun_s + run_s, run_s, wait if started else None,
                processors, processors, "",
            )  # fmt: skip


SOURCE: Final = Source(
    name="swf",
    title="the Standard Workload Format (SWF)",
    recognises=recognises,
    read=read_swf,
)
