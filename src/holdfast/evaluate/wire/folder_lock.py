"""Lock an evaluation's folder while its coordinator and agents work.

Each of these processes holds a shared lock on the folder, which the kernel releases however the
process ends. The processes may outlive the command that started them. A command that resumes the
evaluation waits until they have ended, so that it can reuse their results.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.evaluate.types.errors import EvaluationError

_POLL_S = 0.1


@contextmanager
def at_work(state: Path) -> Iterator[None]:
    """Hold a shared lock on the folder of an evaluation's state inside a `with` block."""
    file = os.open(state / "at-work", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield
    finally:
        os.close(file)


def wait_for_the_others(state: Path, timeout_s: float, on_wait: Callable[[], None]) -> None:
    """Wait until no other process holds a lock on the folder.

    `on_wait` is called once if the wait is not short.

    Raises:
        EvaluationError: the lock is still held after `timeout_s`.
    """
    file = os.open(state / "at-work", os.O_RDWR | os.O_CREAT, 0o644)
    deadline_s = time.monotonic() + timeout_s
    waits = False
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise EvaluationError(
                        "Processes of an earlier command for this evaluation still run after "
                        f"{timeout_s:.0f} s. "
                        f"End the processes whose command line names {state.parent}, then try "
                        "again."
                    ) from None
                if not waits:
                    waits = True
                    on_wait()
                time.sleep(_POLL_S)
            else:
                return
    finally:
        os.close(file)
