"""Stage 9: write jobs to files, in AcmeTrace's own form or in a simulator's form."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np
import numpy.typing as npt

from holdfast.core.atomic import replacing
from holdfast.core.errors import BadUse
from holdfast.trace.twin.model import CPU, Column, TwinJobs

SYNTHETIC: Final = "SYNTHETIC"
_ROWS = 50_000
_FILE_TYPES = {"Evaluation": "Eval"}
"""AcmeTrace's names for types that have a different name here."""


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """Open a text file for writing that appears at `path` when the `with` block ends.

    If the block raises an error, `path` is unchanged.
    """
    with replacing(path) as temporary, temporary.open("x", encoding="utf-8", newline="") as file:
        yield file


def write_rows(path: Path, header: str, columns: Sequence[Column], separator: str = ",") -> None:
    """Write text columns as a file with a header, atomically.

    The fields must not need quotes.

    Raises:
        OSError: the file cannot be written.
    """
    with whole_file(path) as file:
        file.write(header + "\n")
        for first in range(0, len(columns[0]), _ROWS):
            part = [_texts(column[first : first + _ROWS]) for column in columns]
            file.write("\n".join(map(separator.join, zip(*part, strict=True))) + "\n")


def _texts(column: npt.NDArray[Any]) -> list[str]:
    values: list[Any] = column.tolist()
    return values if column.dtype.kind == "U" else list(map(str, values))


def time_texts(unix_s: npt.NDArray[np.number], zone: str) -> npt.NDArray[np.str_]:
    """Format Unix times, such as `2023-03-01 00:18:22+08:00`.

    `zone` is the UTC offset to use; if it is empty, times are in UTC and have no offset.
    """
    offset = datetime.fromisoformat(f"2023-01-01T00:00:00{zone or '+00:00'}").utcoffset()
    assert offset is not None
    seconds = np.asarray(unix_s).astype(np.int64) + int(offset.total_seconds())
    texts = np.datetime_as_string(seconds.astype("datetime64[s]"), unit="s").astype("U19")
    texts.view("U1").reshape(-1, 19)[:, 10] = " "
    return np.char.add(texts, zone) if zone else texts


def write_jobs(jobs: TwinJobs, path: Path | str) -> None:
    """Write a synthetic trace as CSV, in AcmeTrace's form for its cluster.

    A cluster whose durations count from the start has Seren's form. Kalos' form also has memory and
    two more times, and its `duration` and `gpu_time` count from submission. An additional last
    column `synthetic` marks the rows, so that they are not taken for real ones.

    Raises:
        OSError: the file cannot be written; no partial file is left.
    """
    types = jobs.type.astype(object)
    for ours, theirs in _FILE_TYPES.items():
        types[jobs.type == ours] = theirs
    ends = time_texts(jobs.end_s, jobs.zone)
    ends[jobs.state == "RUNNING"] = ""
    head = {
        "job_id": jobs.job_id, "user": jobs.user, "node_num": jobs.node_num, "gpu_num": jobs.gpu_num,
        "cpu_num": jobs.cpu_num,
    }  # fmt: skip
    what = {"type": types.astype("U"), "state": jobs.state}
    times = {
        "submit_time": time_texts(jobs.submit_s, jobs.zone), "start_time": time_texts(jobs.start_s, jobs.zone),
        "end_time": ends,
    }  # fmt: skip
    tail: dict[str, Any] = {
        "duration": jobs.duration_s,
        "queue": jobs.queue_s,
        "gpu_time": jobs.gpu_time_s.astype(float),
    }
    if jobs.counts_queue:
        head |= _kalos_memory(jobs)
        times["fail_time"] = np.where(
            np.isin(jobs.state, ["FAILED", "NODE_FAIL", "TIMEOUT"]), ends, ""
        )
        times["stop_time"] = np.where(jobs.state == "CANCELLED", ends, "")
        tail["queue"] = jobs.queue_s.astype(float)
    columns = head | what | times | tail | {"synthetic": np.full(len(jobs.job_id), SYNTHETIC)}
    write_rows(Path(path), ",".join(columns), list(columns.values()))


def write_mark(folder: Path, like: str, *, seed: int) -> None:
    """Write SYNTHETIC.txt beside the files of a twin, which states that no row is real.

    Raises:
        OSError: the file cannot be written.
    """
    with whole_file(folder / f"{SYNTHETIC}.txt") as file:
        file.write(
            f"{SYNTHETIC}. Drawn by `holdfast trace twin` from the counts of {like}, seed {seed}: jobs, reasons and "
            "telemetry.\nNo row is of a real job. docs/trace.md lists what a twin does not reproduce.\n"
        )


def _kalos_memory(jobs: TwinJobs) -> dict[str, Any]:
    """Return the memory of Kalos' jobs, as in the released rows.

    A node has 1000 GB, and 100 GB of shared memory. An evaluation has 32 GB per GPU, and no shared
    memory.
    """
    small = (jobs.type == "Evaluation") | (jobs.type == CPU)
    per_node = np.minimum(jobs.gpu_num, 8)
    memory = np.where(small, np.maximum(32 * per_node, 16), 1000)
    return {"mem_per_pod_GB": memory, "shared_mem_per_pod": np.where(small, "", "100.0")}


Columns = Mapping[str, npt.NDArray[Any]]

NEEDED: Final = ("submit_s", "queue_s", "duration_s", "gpu_num")
_STATUS: Final = {"COMPLETED": 1, "CANCELLED": 5}
"""Status of a final state in SWF: 1 is completed, 5 cancelled, and 0 (all other states) failed."""


def export(
    jobs: Columns,
    path: Path | str,
    format: str,  # noqa: A002
    *,
    name: str = "twin",
    zone: str = "+00:00",
) -> int:
    """Write jobs for a simulator atomically, and return the number of written jobs.

    | format | form |
    |---|---|
    | `sia` | Sia's Philly CSV |
    | `helios` | Helios' own CSV |
    | `tiresias`, `tethys` | AcmeTrace's converted form |
    | `swf` | Standard Workload Format 2.2, in which processors are GPUs |

    Only `helios` includes CPU jobs. `sia`, `tiresias` and `tethys` leave out jobs without a run
    time, because their simulators would never end such a job. Every format leaves out jobs in which
    a number that it needs is unknown (NaN), such as jobs that still wait.

    Args:
        jobs: `submit_s` (Unix time), `queue_s`, `duration_s` (from the start), `gpu_num`, and
            optionally `node_num`, `cpu_num`, `type`, `state`, `user`, `job_id`. The file is sorted
            by submission time.
        path: the path of the file.
        format: a format of the table.
        name: the name of the cluster.
        zone: the UTC offset of the times in `sia` and `helios`, which are written without an
            offset.

    Raises:
        BadUse: there is no such format, a column is missing, or no job has all values that are
            needed.
        OSError: the file cannot be written.
    """
    if format not in FORMATS:
        message = f"There is no format {format!r}. Choose one of {', '.join(FORMATS)}."
        raise BadUse(message)
    missing = [column for column in NEEDED if column not in jobs]
    if missing:
        message = f"The jobs have no column {missing[0]!r}, and {format} needs it. Give it, or export another trace."
        raise BadUse(message)
    known = np.all(
        [np.isfinite(np.asarray(jobs[column], dtype=float)) for column in NEEDED], axis=0
    )
    if len(known) and not known.any():
        message = (
            f"None of {len(known):,} jobs has all of {', '.join(NEEDED)}. Export another trace."
        )
        raise BadUse(message)
    jobs = {column: np.asarray(values)[known] for column, values in jobs.items()}
    order = np.argsort(jobs["submit_s"], kind="stable")
    keep = order
    if format != "helios":
        keep = keep[jobs["gpu_num"][keep] > 0]
    if format in {"sia", "tiresias", "tethys"}:
        keep = keep[jobs["duration_s"][keep] > 0]
    count = len(order)
    gpus = np.asarray(jobs["gpu_num"])
    defaults: dict[str, npt.NDArray[Any]] = {
        "node_num": np.maximum(np.ceil(gpus / 8), 1).astype(np.int64),
        "cpu_num": np.maximum(gpus * 8, 1).astype(np.int64),
        "type": np.full(count, "Other"),
        "state": np.full(count, "COMPLETED"),
        "user": np.full(count, "u0000"),
        "job_id": np.arange(count),
    }
    chosen = {
        column: np.asarray(values)[keep] for column, values in (defaults | dict(jobs)).items()
    }
    header, columns, separator = FORMATS[format](chosen, name, zone)
    write_rows(Path(path), header, columns, separator)
    return len(keep)


def _local(seconds: npt.NDArray[Any], zone: str) -> npt.NDArray[np.str_]:
    texts = time_texts(seconds, zone)
    return texts.astype("U19")  # without the offset


def _text(column: npt.NDArray[Any]) -> npt.NDArray[np.str_]:
    return (
        np.array([str(value) for value in column.tolist()], dtype="U")
        if column.dtype.kind == "O"
        else column
    )


def _first_s(jobs: Columns) -> int:
    return int(jobs["submit_s"].min()) if len(jobs["submit_s"]) else 0


Form = tuple[str, list[npt.NDArray[Any]], str]


def _sia(jobs: Columns, _: str, zone: str) -> Form:
    seconds = jobs["duration_s"].astype(float)
    gpus = np.ceil(jobs["gpu_num"]).astype(np.int64)
    columns = [_local(jobs["submit_s"], zone), seconds, gpus, seconds * gpus, _text(jobs["type"])]
    return "timestamp,duration,num_gpus,gpu_time,cluster", columns, ","


def _helios(jobs: Columns, name: str, zone: str) -> Form:
    start_s = jobs["submit_s"] + jobs["queue_s"]
    columns = [
        jobs["job_id"], np.full(len(start_s), name), _text(jobs["user"]), _text(jobs["type"]), jobs["gpu_num"],
        jobs["cpu_num"], jobs["node_num"], _text(jobs["state"]), _local(jobs["submit_s"], zone), _local(start_s, zone),
        _local(start_s + jobs["duration_s"], zone), jobs["duration_s"], jobs["queue_s"],
    ]  # fmt: skip
    header = "job_id,cluster,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue"
    return header, columns, ","


def _tiresias(jobs: Columns, _: str, __: str) -> Form:
    count = len(jobs["submit_s"])
    since = jobs["submit_s"] - _first_s(jobs)
    columns = [
        np.arange(1, count + 1), np.ceil(jobs["gpu_num"]).astype(np.int64), since, jobs["duration_s"],
        np.full(count, "resnet50"), jobs["duration_s"], np.full(count, 1),
    ]  # fmt: skip
    return "job_id,num_gpu,submit_time,iterations,model_name,duration,interval", columns, ","


def _tethys(jobs: Columns, _: str, __: str) -> Form:
    """Return the rows of Tethys' form, with iterations of 0.5 s.

    Pretraining jobs get the larger network (1000), and the longer communication time per iteration.
    """
    count = len(jobs["submit_s"])
    pretrain = jobs["type"] == "Pretrain"
    nodes = jobs["node_num"].astype(np.int64)
    since = (jobs["submit_s"] - _first_s(jobs)).astype(float)
    per_node = jobs["gpu_num"] / nodes
    columns = [
        np.arange(count), since, (2 * jobs["duration_s"]).astype(np.int64), np.full(count, 0.5),
        np.where(pretrain, 0.75, 0.25), nodes, np.zeros(count, dtype=np.int64), per_node,
        jobs["cpu_num"] / np.maximum(jobs["gpu_num"], 1), jobs["cpu_num"] / np.maximum(jobs["gpu_num"], 1),
        np.full(count, 10.0), np.where(pretrain, 1000, 500),
    ]  # fmt: skip
    header = (
        "job_id,arrival_time,num_iteration,iteration_computing_time,iteration_networking_time,gpu_workers,ps,"
        "gpu_per_worker,cpu_per_gpu_worker,cpu_per_ps_worker,tensorsizes,profiled_network"
    )
    return header, columns, ","


def _swf(jobs: Columns, name: str, _: str) -> Form:
    """Return the lines of Standard Workload Format 2.2 (Feitelson): 18 fields, -1 if unknown."""
    count = len(jobs["submit_s"])
    first_s = _first_s(jobs)
    unknown = np.full(count, -1)
    gpus = np.ceil(jobs["gpu_num"]).astype(np.int64)
    types, type_numbers = np.unique(_text(jobs["type"]), return_inverse=True)
    users, user_numbers = np.unique(_text(jobs["user"]), return_inverse=True)
    states = np.array(
        [_STATUS.get(state, 0) for state in _text(jobs["state"]).tolist()], dtype=np.int64
    )
    whole = {
        column: np.rint(jobs[column]).astype(np.int64)
        for column in ("submit_s", "queue_s", "duration_s")
    }
    columns = [
        np.arange(1, count + 1), whole["submit_s"] - first_s, whole["queue_s"], whole["duration_s"], gpus, unknown,
        unknown, gpus, unknown, unknown, states, user_numbers + 1, unknown, type_numbers + 1, type_numbers + 1, unknown,
        unknown, unknown,
    ]  # fmt: skip
    began = datetime.fromtimestamp(first_s, UTC)
    lines = [
        "; Version: 2.2", f"; Computer: {name}", f"; MaxJobs: {count}", f"; MaxRecords: {count}",
        f"; UnixStartTime: {first_s}", "; TimeZoneString: UTC", f"; StartTime: {began:%a %b %d %H:%M:%S UTC %Y}",
        f"; MaxProcs: {int(gpus.max(initial=0))}", "; Note: a processor is a GPU; jobs without GPUs are left out",
        f"; MaxQueues: {len(types)}", *(f"; Queue: {number} {kind}" for number, kind in enumerate(types.tolist(), 1)),
        f"; Note: {len(users)} users",
    ]  # fmt: skip
    return "\n".join(lines), columns, " "


FORMATS: Final[Mapping[str, Callable[[Columns, str, str], Form]]] = {
    "sia": _sia,
    "helios": _helios,
    "tiresias": _tiresias,
    "tethys": _tethys,
    "swf": _swf,
}
