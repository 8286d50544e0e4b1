"""Lock an evaluation's folder while its coordinator and agents work.

Each of them holds a shared lock on the folder, which the kernel releases at any kind of end. They
may outlive their command. A command that resumes the evaluation waits for them, since their results
need not be computed again.
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
    """Hold a shared lock on the folder of an evaluation's state."""
    file = os.open(state / "at-work", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield
    finally:
        os.close(file)


def wait_for_the_others(state: Path, timeout_s: float, on_wait: Callable[[], None]) -> None:
    """Wait until the folder is unlocked; `on_wait` is called once if this takes a while.

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
                        "What an earlier command started for this evaluation still runs after "
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
