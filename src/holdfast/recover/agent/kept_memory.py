"""Release at the end of a run the memory that dead ranks have left for the next attempt."""

import os

from holdfast.checkpoint import ENV_SUPERVISOR_PID, WRITER_MODULE

_TIMEOUT_S = 5.0


def end_kept_memory() -> None:
    """End the processes that hold this memory, and wait for their ends.

    The processes are found by their environment variables, since any process may have become their
    parent. Without this call, they would end shortly after this process.
    """
    import psutil

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
