"""Release, at the end of a run, the memory that dead ranks left for the next attempt."""

import os

import psutil

from holdfast.checkpoint import ENV_SUPERVISOR_PID, WRITER_MODULE

_TIMEOUT_S = 5.0


def end_kept_memory() -> None:
    """End the processes that hold the memory, and wait for their end.

    These processes would end shortly after this process in any case. They are found by their
    environment variables, since any process may have become their parent.
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
