"""The memory that dead ranks left for the next attempt, at the end of a run: nobody will ask for it any more."""

import os

import psutil

from holdfast.checkpoint import ENV_SUPERVISOR_PID, WRITER_MODULE

_TIMEOUT_S = 5.0


def end_kept_memory() -> None:
    """End the processes that hold it, and wait until they are gone.

    They would end with this process by themselves, a moment later. Their parent is whoever adopts orphans, so they are
    known by their environment.
    """
    found = []
    for process in psutil.process_iter():
        try:
            if WRITER_MODULE in process.cmdline() and process.environ().get(
                ENV_SUPERVISOR_PID
            ) == str(os.getpid()):
                process.kill()
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    psutil.wait_procs(found, timeout=_TIMEOUT_S)
