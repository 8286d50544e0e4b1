"""Stop a run with its state saved before the time limit of its Slurm job ends everything."""

import asyncio
import re
import subprocess
from collections.abc import Awaitable, Callable

LOOK_S = 300.0
"""The limit is looked up so often, since an administrator may move the limit."""
SPARE_S = 30.0
"""So much earlier than the stop needs it: Slurm's clock, and the end of all processes."""
SQUEUE_TIMEOUT_S = 60.0
_LEFT = re.compile(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)")
"""`squeue`'s %L: [[DAYS-]HOURS:]MINUTES:SECONDS."""


def seconds(left: str) -> float | None:
    """Return the seconds of a time as `squeue` prints it; None for a job without a limit."""
    found = _LEFT.fullmatch(left.strip())
    if found is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)


def time_left_s(job_id: str) -> float | None:
    """Return the seconds until a Slurm job's time limit; None without a limit, or where Slurm does not answer."""
    try:
        answer = subprocess.run(
            ["squeue", "--noheader", "--job", job_id, "--format", "%L"],
            capture_output=True,
            text=True,
            check=True,
            stdin=subprocess.DEVNULL,
            timeout=SQUEUE_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return seconds(answer.stdout)


async def stop_in_time(
    job_id: str,
    grace_s: float,
    stop: Callable[[str], None],
    *,
    leads: Callable[[], bool],
    look: Callable[[str], float | None] = time_left_s,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Wait until a run must begin to stop for its Slurm job's time limit, then stop the run.

    Args:
        job_id: of the Slurm job.
        grace_s: how long the stop may take.
        stop: stops the run, in the name of who has asked for that.
        leads: whether this node leads the run; one node is enough to look.
        look: returns the seconds until the limit of a job; called in a thread.
        sleep: waits for some seconds.
    """
    while True:
        left_s = await asyncio.to_thread(look, job_id) if leads() else None
        due_s = LOOK_S if left_s is None else left_s - grace_s - SPARE_S
        if due_s <= 0:
            stop(f"the time limit of Slurm job {job_id}")
            return
        await sleep(min(LOOK_S, due_s))
