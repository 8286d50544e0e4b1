"""Read Slurm's accounting as JSON: the output of `sacct --json`.

    sacct --allusers --duplicates --json --starttime 2023-03-01 > jobs.json

The format has changed between Slurm's versions (data parser v0.0.37 of 21.08 to v0.0.42 of 24.11).
All of these versions are read:

- A state is a word, and in later versions a list of words.
- A number is a number, and in later versions an object `{set, infinite, number}`.
- The signal of an exit code is named `signal_id`, and in later versions `id`.

Times are Unix times. In Slurm 22.05, `sacct --json` includes the steps of every job, and its output
is many times larger than the text, which `holdfast.trace.sources.slurm.sacct` reads faster.
"""

from collections.abc import Iterator
from datetime import tzinfo
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from holdfast.trace.errors import BadTrace
from holdfast.trace.sources.findings import Findings
from holdfast.trace.sources.json_stream import json_objects
from holdfast.trace.sources.plain_text import cluster_name
from holdfast.trace.sources.reading import Reading, drops_bad_rows, head
from holdfast.trace.sources.rows import read_rows
from holdfast.trace.sources.slurm.rows import FIELDS, READERS, write_jobs

if TYPE_CHECKING:
    import duckdb

NEXT_STEP: Final = "Export again with `sacct --json`, or as text with `sacct --parsable2`."
_NO_VALUE: Final = 0xFFFFFFFE
"""Slurm's NO_VAL. Older versions print it, or INFINITE (one more), for a missing number."""


def read_sacct_json(
    connection: "duckdb.DuckDBPyConnection", path: Path, table: str, *, zone: tzinfo | None = None
) -> Reading:
    """Read the output of `sacct --json`, one job at a time.

    Args:
        connection: the database.
        path: the file.
        table: name of the new table.
        zone: time zone of the cluster, used only for the hour of the day, since all times are Unix
            times; None means UTC.

    Raises:
        BadTrace: a record cannot be read; the message has the line, the field and the expected
            form.
    """
    findings = Findings()
    raw = f"{table}_records"
    read_rows(
        connection,
        raw,
        dict.fromkeys(FIELDS, "VARCHAR"),
        _records(path, findings, drop=drops_bad_rows(connection)),
    )
    try:
        return write_jobs(
            connection,
            path,
            table,
            raw,
            present=frozenset(FIELDS) - {"allocated_gres", "requested_gres", "node_count"},
            zone=zone,
            findings=findings,
            faults=lambda: _faults(path),
        )
    finally:
        connection.execute(f"DROP TABLE IF EXISTS {raw}")


def is_sacct_json(path: Path) -> bool:
    """Return True if a file begins like the output of `sacct --json`.

    Such a file is an object with `jobs` and with fields of Slurm.
    """
    start = head(path)
    if not start.lstrip("\ufeff \t\r\n").startswith("{") or '"jobs"' not in start:
        return False
    if (
        '"job_state"' in start
    ):  # squeue --json and scontrol --json print only the jobs of one moment.
        return False
    return any(
        f'"{name}"' in start for name in ("association", "allocation_nodes", "Slurm", "slurm")
    )


def _records(path: Path, findings: Findings, *, drop: bool) -> Iterator[tuple[str, ...]]:
    for line, job in _jobs(path):
        try:
            texts = _texts(job, path, findings)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            fault = _bad(path, line, job, error)
            if not drop:
                raise fault from None
            findings.add("unreadable-row", str(fault))
            continue
        if steps := job.get("steps"):
            findings.add("slurm-steps", texts[2], rows=len(steps))
        yield texts


def _jobs(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, job in json_objects(path, frozenset({"jobs"}), next_step=NEXT_STEP):
        if "job_state" in job:
            problem = (
                "this is what `squeue --json` or `scontrol --json` prints, which has no history."
            )
            raise BadTrace(path, problem, line=line, next_step="Export with `sacct --json`.")
        if "job_id" in job:
            yield line, job
        elif not job.keys() & {
            "meta",
            "errors",
            "warnings",
        }:  # Output without any job has these keys.
            raise BadTrace(path, "expected a job with a `job_id`.", line=line, next_step=NEXT_STEP)


def _faults(path: Path) -> Iterator[BadTrace]:
    for line, job in _jobs(path):
        try:
            texts = dict(zip(FIELDS, _texts(job, path, Findings()), strict=True))
            for what, read in READERS.items():
                read(texts[what])
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            yield _bad(path, line, job, error)


def _bad(path: Path, line: int, job: dict[str, Any], error: Exception) -> BadTrace:
    problem = f"job {job['job_id']}: expected the fields of `sacct --json`: {error}."
    return BadTrace(path, problem, line=line, next_step=NEXT_STEP)


def _texts(job: dict[str, Any], path: Path, findings: Findings) -> tuple[str, ...]:
    """Return the texts `FIELDS` of a job."""
    time, state, tres = job.get("time") or {}, job.get("state") or {}, job.get("tres") or {}
    association = job.get("association") or {}
    current = state.get("current") or ""
    shown_id = _shown_id(job)
    start_s, end_s = _number(time.get("start")), _number(time.get("end"))
    elapsed_s, suspended_s = _number(time.get("elapsed")), _number(time.get("suspended")) or 0.0
    if (
        end_s
        and elapsed_s
        and start_s == _number(time.get("eligible"))
        and start_s != end_s - elapsed_s - suspended_s
    ):
        start_s = end_s - elapsed_s - suspended_s
        findings.add("slurm-eligible-as-start", shown_id)
    exit_code = _exit_code(job.get("exit_code"))
    if exit_code == "0:0" and "FAILED" in current:  # `current` is a string or a list
        findings.add("slurm-exit-code-lost", shown_id)
        exit_code = ""
    return (
        job.get("cluster") or association.get("cluster") or cluster_name(path),
        str(job["job_id"]),
        shown_id,
        _digits(_number(job.get("restart_cnt"))),
        job.get("name") or "",
        job.get("user") or association.get("user") or "",
        job.get("partition") or job.get("account") or "",
        current if isinstance(current, str) else ",".join(current),
        state.get("reason") or "",
        exit_code,
        _digits(_number(time.get("submission"))),
        _digits(start_s),
        _digits(end_s),
        _digits(elapsed_s),
        _tres(tres.get("allocated")),
        _tres(tres.get("requested")),
        job.get("nodes") or "",
        "",
        "",
        "",
    )


def _shown_id(record: dict[str, Any]) -> str:
    job_id = str(record["job_id"])
    array, het = record.get("array") or {}, record.get("het") or {}
    if _number(array.get("job_id")):
        task = _number(array.get("task_id"))
        if task is not None:
            return f"{array['job_id']}_{task:.0f}"
        if array.get("task"):
            return f"{array['job_id']}_[{array['task']}]"
    if _number(het.get("job_id")):
        return f"{het['job_id']}+{_number(het.get('job_offset')) or 0:.0f}"
    return job_id


def _number(value: Any) -> float | None:
    """Parse a number in the form of any version.

    Return None if the number is not set or infinite, or is Slurm's value for a missing number.
    """
    if isinstance(value, dict):
        value = value.get("number") if value.get("set") and not value.get("infinite") else None
    if value is None or value == "":
        return None
    number = float(value)
    return (
        None
        if number >= _NO_VALUE and number in (_NO_VALUE, _NO_VALUE + 1, 2**64 - 2, 2**64 - 1)
        else number
    )


def _digits(number: float | None) -> str:
    return "" if number is None else f"{number:.0f}"


def _exit_code(value: Any) -> str:
    """Return the exit code as `CODE:SIGNAL`; empty if the job has none yet."""
    if not isinstance(value, dict):
        return "" if value is None else f"{int(value)}:0"
    signal = value.get("signal") or {}
    number, code = (
        _number(signal.get("id", signal.get("signal_id"))),
        _number(value.get("return_code")),
    )
    return "" if number is None and code is None else f"{code or 0:.0f}:{number or 0:.0f}"


def _tres(items: Any) -> str:
    """Return resources in the form of sacct's text output."""
    amounts = []
    for item in items or ():
        count = _number(item.get("count"))
        if count is not None:
            name = f"{item['type']}/{item['name']}" if item.get("name") else item["type"]
            amounts.append(
                f"{name}={count:.0f}{'M' if name == 'mem' else ''}"
            )  # Slurm counts memory in MiB.
    return ",".join(amounts)
