"""The far end of `places_slurm`: what each node runs, as `python -m holdfast.cluster.slurm_place SUBMISSION COMMAND…`.

It runs the command on a leash and keeps a record of it, SUBMISSION/places/INDEX. A command that did not end with 0 may
be wanted again: for a while the far end then waits for a file that asks for it (`request_of`), and starts it once more
when that comes.
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
    """What a far end says of its command.

    Attributes:
        node: as Slurm calls it.
        starts: how often the command was started.
        exit_code: of the last of them, None while it runs.
        over: the far end is gone; nothing will be started there again.
    """

    node: str
    starts: int
    exit_code: int | None = None
    over: bool = False

    def write(self, submission: Path, index: int) -> None:
        """Write it, whole or not at all."""
        write_atomic(record_of(submission, index), msgspec.json.encode(self))


def record_of(submission: Path, index: int) -> Path:
    """Where a place's record is."""
    return submission / "places" / str(index)


def request_of(submission: Path, index: int, starts: int) -> Path:
    """The file that asks for one start more than `starts`."""
    return submission / "places" / f"{index}.{starts}"


def read_record(submission: Path, index: int) -> PlaceRecord | None:
    """The record of a place, None if it left none yet."""
    try:
        return msgspec.json.decode(record_of(submission, index).read_bytes(), type=PlaceRecord)
    except FileNotFoundError:
        return None


def run_place(submission: Path, command: Sequence[str]) -> int:
    """Run the command, again where that is asked for; its last exit code."""
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
