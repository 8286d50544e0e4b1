"""Run a placed command on one node of a Slurm allocation, for `places_slurm`.

Each node runs `python -m holdfast.cluster.slurm_place SUBMISSION COMMAND…`. That process runs the
command on a leash, and records its state in SUBMISSION/places/INDEX. After an exit code other than
0, the process waits two minutes for a file that requests another start (`request_of`). If the file
appears, the command is started again.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from holdfast.cluster.leash import run_on_leash
from holdfast.cluster.placement import ENV_PLACE, log_of_place
from holdfast.core.atomic import write_atomic
from holdfast.core.processes import exit_as

_LINGER_S = 120.0  # a network file system may hide a new file for up to a minute (nfs(5), acdirmax)
_LOOK_S = 0.5


class PlaceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a placed command, as its node records it.

    Attributes:
        node: the name of the node in Slurm.
        starts: the number of starts so far.
        exit_code: the exit code of the last start; None while the command runs.
        over: True if no further start can follow, because the process on the node is ending.
    """

    node: str
    starts: int
    exit_code: int | None = None
    over: bool = False

    def write(self, submission: Path, index: int) -> None:
        """Write the record to its file, whole or not at all."""
        write_atomic(record_of(submission, index), msgspec.json.encode(self))


def record_of(submission: Path, index: int) -> Path:
    """Return the path of a place's record file."""
    return submission / "places" / str(index)


def request_of(submission: Path, index: int, starts: int) -> Path:
    """Return the path of the file that requests another start, after `starts` starts."""
    return submission / "places" / f"{index}.{starts}"


def read_record(submission: Path, index: int) -> PlaceRecord | None:
    """Return the record of a place; None if there is none yet."""
    try:
        return msgspec.json.decode(record_of(submission, index).read_bytes(), type=PlaceRecord)
    except FileNotFoundError:
        return None


def run_place(submission: Path, command: Sequence[str]) -> int:
    """Run the command, and run it again at each request; return the last exit code."""
    index, node = int(os.environ["SLURM_PROCID"]), os.environ["SLURMD_NODENAME"]
    environment, log = {**os.environ, ENV_PLACE: str(index)}, log_of_place(index, submission.parent)
    starts = 0
    while True:
        starts += 1
        PlaceRecord(node=node, starts=starts).write(submission, index)
        exit_code = run_on_leash(command, log, append=starts > 1, environment=environment)
        ended = PlaceRecord(node=node, starts=starts, exit_code=exit_code, over=exit_code == 0)
        ended.write(submission, index)
        if ended.over:
            return exit_code
        if not _is_wanted_again(request_of(submission, index, starts)):
            msgspec.structs.replace(ended, over=True).write(submission, index)
            return exit_code


def _is_wanted_again(request: Path) -> bool:
    deadline_s = time.monotonic() + _LINGER_S
    while not request.exists():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_LOOK_S)
    return True


if __name__ == "__main__":
    exit_as(run_place(Path(sys.argv[1]), sys.argv[2:]))
