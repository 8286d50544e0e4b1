"""Go back to an earlier checkpoint because a person asks for this, in a file of the run's folder.

The file has a number, so that each request is carried out once. The supervisor ends the ranks, has
the newer checkpoints abandoned, records `rolled_back`, deletes the file, and starts the ranks
again. A supervisor that is killed before the record leaves the file, and the next one carries the
request out.
"""

import json
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast.checkpoint import scan
from holdfast.core.atomic import write_atomic
from holdfast.core.errors import BadUse, HoldfastError
from holdfast.core.ledger import Ledger
from holdfast.core.paths import RunPaths
from holdfast.recover.run_lock import POLL_S, is_alive

ASKED, DONE, NOT_DONE = "rollback_asked", "rolled_back", "not_rolled_back"
"""The kinds of the events of a request; `DONE` also records a rollback after a broken loss."""
NUMBERS = 1_000_000_000
READ_BYTES = 1024


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """A person's request to go back."""

    number: int
    to_step: int
    by: str

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def requested(path: Path) -> Rollback | None:
    """Return the request in a file; None if there is no file, or none with a request."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(READ_BYTES))
        return Rollback(
            number=int(found["number"]), to_step=int(found["to_step"]), by=str(found["by"])
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None


def healthy_steps(run_id: str, ledger: Ledger) -> list[int]:
    """Return the steps of the healthy checkpoints that a run can go back to, newest first.

    A run that saves into several folders can go back to the steps that are healthy in each.
    """
    folders = {Path(one.path).parent for one in ledger.checkpoints(run_id) if "://" not in one.path}
    found = [
        {
            info.step
            for info in scan(folder)
            if info.marks.healthy is not None
            and info.state in ("written", "verified")
            and not info.abandoned
        }
        for folder in folders
        if folder.is_dir()
    ]
    if len(found) < len(folders) or not found:
        return []
    return sorted(set.intersection(*found), reverse=True)


def roll_back_run(
    run_id: str, ledger: Ledger, home: Path, *, to_step: int, by: str, timeout_s: float
) -> str:
    """Make a run's supervisor go back to a healthy checkpoint, and return the result.

    Raises:
        BadUse: the run is not going, the step is no healthy checkpoint, or this node does not have
            the run's folder.
        HoldfastError: the supervisor did not go back, or not in time.
    """
    run, paths = ledger.run(run_id), RunPaths(home, run_id)

    def is_going() -> bool:
        is_here = run.host == socket.gethostname()
        return is_alive(paths.lock) if is_here else ledger.run(run_id).state == "running"

    if not is_going():
        raise BadUse(f"Run {run_id} has ended. `holdfast explain {run_id}` shows how it ended.")
    if not paths.root.is_dir():
        raise BadUse(
            f"Run {run_id} is supervised on {run.host}, in another folder; roll it back there."
        )
    if to_step not in healthy_steps(run_id, ledger):
        raise BadUse(
            f"Run {run_id} has no healthy checkpoint of step {to_step} any more. Choose another step."
        )
    asked = Rollback(number=secrets.randbelow(NUMBERS), to_step=to_step, by=by)
    write_atomic(paths.rollback_request, json.dumps(asked.to_json()).encode())
    deadline_s = time.monotonic() + timeout_s
    while True:
        is_late = time.monotonic() > deadline_s or not is_going()
        if is_late and requested(paths.rollback_request) == asked:
            paths.rollback_request.unlink(missing_ok=True)
        for event in ledger.events(run_id, kinds=(DONE, NOT_DONE)):
            if event.data.get("number") == asked.number:
                if event.kind == NOT_DONE:
                    raise HoldfastError(str(event.data["why"]))
                return f"The training goes on from step {event.data['to_step']}."
        if is_late:
            raise HoldfastError(
                f"Run {run_id} did not go back within {timeout_s:g} s, and the request was withdrawn. Check "
                f"whether its ranks make steps: holdfast runs show {run_id}"
            )
        time.sleep(POLL_S)
