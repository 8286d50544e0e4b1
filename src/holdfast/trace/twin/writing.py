"""Stage 8: files. The jobs in the form in which AcmeTrace publishes that cluster's."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from holdfast.core.atomic import replacing
from holdfast.trace.twin.model import CPU, Column, TwinJobs

_ROWS = 50_000
_FILE_TYPES = {"Evaluation": "Eval"}
"""AcmeTrace's own word, where it is not the house's."""


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """A text file that appears at `path` when the block ends well; on an error `path` is as before."""
    with replacing(path) as temporary, temporary.open("x", encoding="utf-8", newline="") as file:
        yield file


def write_rows(path: Path, header: str, columns: Sequence[Column], separator: str = ",") -> None:
    """Text columns as a file with a header, whole or absent; fields must need no quotes.

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
    """`2023-03-01 00:18:22+08:00` for Unix times; `zone` is the offset to write them in, empty for UTC without one."""
    offset = datetime.fromisoformat(f"2023-01-01T00:00:00{zone or '+00:00'}").utcoffset()
    assert offset is not None
    seconds = np.asarray(unix_s).astype(np.int64) + int(offset.total_seconds())
    texts = np.datetime_as_string(seconds.astype("datetime64[s]"), unit="s").astype("U19")
    texts.view("U1").reshape(-1, 19)[:, 10] = " "
    return np.char.add(texts, zone) if zone else texts


def write_jobs(jobs: TwinJobs, path: Path | str) -> None:
    """Write the trace as AcmeTrace's CSV of its cluster.

    Seren's form is that of every cluster whose durations begin at the start; Kalos' has memory and two more times, and
    its `duration` and `gpu_time` count from submission.

    Raises:
        OSError: the file cannot be written; nothing is left of it.
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
    columns = head | what | times | tail
    write_rows(Path(path), ",".join(columns), list(columns.values()))


def _kalos_memory(jobs: TwinJobs) -> dict[str, Any]:
    """Memory as the released rows have it: 1000 GB a node with 100 shared, an evaluation 32 GB a GPU and none."""
    small = (jobs.type == "Evaluation") | (jobs.type == CPU)
    per_node = np.minimum(jobs.gpu_num, 8)
    memory = np.where(small, np.maximum(32 * per_node, 16), 1000)
    return {"mem_per_pod_GB": memory, "shared_mem_per_pod": np.where(small, "", "100.0")}
