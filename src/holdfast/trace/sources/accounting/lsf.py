"""Read `lsb.acct`, the accounting file of IBM Spectrum LSF, with its records of ended jobs.

    cat $LSB_SHAREDIR/CLUSTER/logdir/lsb.acct* > lsf.txt

Fields are separated by spaces. Texts are in quotes, and a quote inside a text is doubled. A list is
preceded by its length. A job with start 0 never had an allocation.

The GPUs of a job are taken from its effective resource requirement: `ngpus_physical` of each host
(or of each task, with `/task`), times the number of hosts. Without a requirement, they are the GPUs
of `-gpu num=`.

Fields, states and reasons are documented in IBM, "lsb.acct", JOB_FINISH, version 10.1, and in
`lsbatch.h`, TERM_*.
"""

import csv
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

NEXT_STEP: Final = "Give whole files lsb.acct, of $LSB_SHAREDIR/CLUSTER/logdir."
COLUMNS: Final = (
    "cluster", "job_id", "name", "username", "pool", "state", "reason", "exit_code", "submit_at", "start_at", "end_at",
    "run_s", "queue_s", "gpu_num", "node_num", "cpu_num", "nodes", "zone_offset",
)  # fmt: skip
_FINISH: Final = "JOB_FINISH"
_RECORD: Final = re.compile(r'"[A-Z_]+" "\d+(\.\d+)*" \d{9,10} ')
_DONE: Final = 64
_GPUS: Final = re.compile(r"ngpus_(?:physical|shared|excl_p|excl_t)\s*=\s*(\d+(?:\.\d+)?)(/task)?")
_ASKED: Final = re.compile(r"\bnum=(\d+)(/task)?")
_ENDED_BY: Final = {
    1: "PREEMPTED", 5: "TIMEOUT", 6: "TIMEOUT", 12: "TIMEOUT", 8: "CANCELLED", 9: "CANCELLED", 14: "CANCELLED",
    15: "CANCELLED", 10: "PREEMPTED", 11: "PREEMPTED", 16: "OUT_OF_MEMORY", 20: "OUT_OF_MEMORY",
}  # fmt: skip
"""The state for each TERM_* number.

The numbers stand for preemption, run time, deadline and CPU limits, kills by the owner or an
administrator, requeues, and the memory limit.
"""
_SENTENCES: Final = {
    "unreadable-row": ("dropped", "Records that could not be read are left out."),
    "lsf-other-records": ("dropped", "Records of other things than a job's end were left out."),
}


def read_lsf(connection: "duckdb.DuckDBPyConnection", path: Path, table: str) -> Reading:
    """Read LSF's accounting records; the module's docstring has the command and the rules.

    Raises:
        BadTrace: a record cannot be read; the message has the line and the expected text.
    """
    findings = Findings()
    rows = _rows(path, findings, drop=drops_bad_rows(connection))
    if not read_rows(connection, table, {name: JOB_COLUMNS[name] for name in COLUMNS}, rows):
        raise BadTrace(path, "The file holds no job that ended.", next_step=NEXT_STEP)
    cluster = Cluster(name=cluster_name(path), source=SOURCE.name)
    return Reading.of(connection, table, cluster, notes=findings.notes(cluster.name, _SENTENCES))


def recognises(path: Path) -> bool:
    """Return True if a file begins with an LSF record."""
    return _RECORD.match(head(path, 4096).lstrip("\ufeff\r\n#")) is not None


def _rows(path: Path, findings: Findings, *, drop: bool) -> Iterator[tuple[Any, ...]]:
    with opened_text(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip() or line.startswith("#"):
                continue
            if not line.startswith(f'"{_FINISH}"'):
                findings.add("lsf-other-records", line.partition(" ")[0].strip('"'))
                continue
            try:
                yield _row(cluster_name(path), line)
            except (ValueError, IndexError, csv.Error) as error:
                problem = f"expected the fields of a JOB_FINISH record of LSF: {error}."
                fault = BadTrace(path, problem, line=number, next_step=NEXT_STEP)
                if not drop:
                    raise fault from None
                findings.add("unreadable-row", str(fault))


def _row(cluster: str, line: str) -> tuple[Any, ...]:
    fields = next(csv.reader([line], delimiter=" ", skipinitialspace=True))
    job_id, slots, submit_s, start_s = (int(fields[place]) for place in (3, 6, 7, 10))
    end_s = int(fields[2])
    requested_hosts = int(fields[22])
    place = 23 + requested_hosts
    hosts = fields[place + 1 : place + 1 + int(fields[place])]
    rest = fields[place + 1 + len(hosts) :]
    status, name = int(rest[0]), rest[2]
    exit_status = int(rest[25])
    index, ended_by = int(rest[29]), int(rest[38])
    state = "COMPLETED" if status == _DONE else _ENDED_BY.get(ended_by, "FAILED")
    signal, code = exit_status & 0x7F, exit_status >> 8
    # A host may follow a count, such as 8*n001.
    nodes = list(dict.fromkeys(host.rpartition("*")[2] for host in hosts))
    started = start_s > 0
    return (
        cluster, f"{job_id}[{index}]" if index else str(job_id), name, fields[11], fields[12], state, None,
        128 + signal if signal else code, submit_s, start_s if started else None, end_s,
        end_s - start_s if started else None, start_s - submit_s if started else None,
        _gpus([fields[13], *rest[39:]], hosts=len(nodes) or 1, tasks=slots), len(nodes) or None,
        float(slots), nodes or None, "",
    )  # fmt: skip


def _gpus(fields: list[str], *, hosts: int, tasks: int) -> float:
    # Search only the fields that hold requirements: a command may hold `num=100` with another
    # meaning.
    for form, texts in ((_GPUS, reversed(fields)), (_ASKED, reversed(fields))):
        for text in texts:
            if match := form.search(text):
                return float(match[1]) * (tasks if match[2] else hosts)
    return 0.0


SOURCE: Final = Source(
    name="lsf",
    title="LSF, its accounting file lsb.acct",
    recognises=recognises,
    read=read_lsf,
)
