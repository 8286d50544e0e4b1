"""Save the state of a run and stop the run before the time limit of its Slurm job."""

import asyncio
import os
import re
import subprocess
from collections.abc import Awaitable, Callable

from holdfast.core.clock import Clock, SystemClock
from holdfast.core.ledger.records import BY_TIME_LIMIT

POLL_S = 15.0
LOOK_S = 300.0
"""The seconds between two look-ups of the time limit, which an administrator may change."""
SPARE_S = 30.0
"""A margin in seconds, for the offset of Slurm's clock and for the end of all processes."""
SQUEUE_TIMEOUT_S = 60.0
_LEFT = re.compile(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)")
"""Matches the output of `squeue` for %L: [[DAYS-]HOURS:]MINUTES:SECONDS."""


class NotSeen(Exception):
    """The time limit of a job cannot be looked up; the message states the reason."""


def seconds(left: str) -> float | None:
    """Convert a time that `squeue` prints to seconds; return None if the job has no limit."""
    found = _LEFT.fullmatch(left.strip())
    if found is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)


def time_left_s(job_id: str) -> float | None:
    """Return the seconds until a Slurm job's time limit; None for a job without a limit.

    Raises:
        NotSeen: Slurm does not answer.
    """
    try:
        answer = subprocess.run(
            ["squeue", "--noheader", "--job", job_id, "--format", "%A %L"],
            capture_output=True,
            text=True,
            errors="replace",
            check=True,
            stdin=subprocess.DEVNULL,
            timeout=SQUEUE_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NotSeen(str(error)) from error
    # The output for a job array or a heterogeneous job has several lines.
    lines = [line.split() for line in answer.stdout.splitlines()]
    own = [words[1] for words in lines if words[:1] == [job_id] and len(words) == 2]
    if not own:
        raise NotSeen(f"squeue shows no job {job_id}")
    return seconds(own[0])


async def stop_in_time(
    job_id: str,
    grace_s: float,
    stop: Callable[[str], None],
    *,
    leads: Callable[[], bool],
    complain: Callable[[str], None],
    look: Callable[[str], float | None] = time_left_s,
    clock: Clock | None = None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Wait until the time limit of a Slurm job requires its run to stop, and then stop the run.

    Args:
        job_id: the number of the Slurm job.
        grace_s: the seconds that the stop may take.
        stop: a function that stops the run; called with the source of the request.
        leads: a function that returns True if this node leads the run. Only the leading node looks
            up the limit.
        complain: a function that is called once with a sentence if the limit cannot be looked up.
        look: a function that returns the seconds until the limit of a job, or raises NotSeen;
            called in a thread.
        clock: the clock of this host.
        sleep: a function that waits for a number of seconds.
    """
    clock = clock or SystemClock()
    # Newer versions of Slurm set this variable to the end time. A limit that was looked up replaces
    # it.
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    ends_at_s = clock.monotonic_s() + float(end) - clock.now_s() if end.isdigit() else None
    looked_at_s, has_complained = None, False
    while True:
        now_s = clock.monotonic_s()
        if leads() and (looked_at_s is None or now_s - looked_at_s >= LOOK_S):
            try:
                left_s = await asyncio.to_thread(look, job_id)
            except (NotSeen, RuntimeError) as error:  # RuntimeError: no thread can be started
                if not has_complained and ends_at_s is None:
                    has_complained = True
                    complain(f"The time limit of Slurm job {job_id} cannot be read: {error}.")
            else:
                looked_at_s = now_s
                ends_at_s = None if left_s is None else clock.monotonic_s() + left_s
        if leads() and ends_at_s is not None:
            due_s = ends_at_s - clock.monotonic_s() - grace_s - SPARE_S
            if due_s <= 0:
                stop(f"{BY_TIME_LIMIT} of Slurm job {job_id}")
                return
            await sleep(min(POLL_S, due_s))
        else:
            await sleep(POLL_S)
