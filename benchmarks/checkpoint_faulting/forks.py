"""Run a function in a forked process, so that torch is imported only once."""

import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Final

PATIENCE_S: Final = 120.0
"""A process that has not ended by then hangs."""


_gates: set[int] = set()


class Failed(Exception):
    """The function raised an error, or its process ended without an answer or hangs."""


class Fork:
    """A process that runs `work(*arguments)` and returns its answer."""

    def __init__(self, work: Callable[..., Any], *arguments: Any, held: bool = False) -> None:
        """Fork; with `held`, the work begins only at `release`."""
        self._reader, writer = os.pipe()
        gate, self._gate = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            for fd in (
                self._reader,
                self._gate,
                *_gates,
            ):  # one that is held must not be held by others too
                os.close(fd)
            _answer(work, arguments, writer, gate)
        os.close(writer)
        os.close(gate)
        _gates.add(self._gate)
        if not held:
            self.release()

    def release(self) -> None:
        """Let the work begin."""
        _gates.discard(self._gate)
        os.close(self._gate)

    def answer(self, patience_s: float = PATIENCE_S) -> Any:
        """Return the result of the function.

        Raises:
            Failed: there is no answer; the process has been killed.
        """
        content = self.words(patience_s)
        if not content:
            raise Failed("its process ended without an answer")
        answer, error = pickle.loads(content)
        if error:
            raise Failed(error)
        return answer

    def words(self, patience_s: float = PATIENCE_S) -> bytes:
        """Return all bytes that the process sends until its end; empty if it is killed before.

        Raises:
            Failed: the process hangs; the process has been killed.
        """
        until_s, content = time.monotonic() + patience_s, b""
        with os.fdopen(self._reader, "rb", buffering=0) as reader:
            while True:
                if not select.select([reader], [], [], max(0.0, until_s - time.monotonic()))[0]:
                    self.kill()
                    raise Failed(f"it was not over after {patience_s:g} s")
                chunk = reader.read(1 << 16)
                if not chunk:
                    break
                content += chunk
        self.reap()
        return content

    def kill(self) -> None:
        """Kill the process."""
        os.kill(self.pid, signal.SIGKILL)
        self.reap()

    def reap(self) -> None:
        """Wait for its end."""
        try:
            os.waitpid(self.pid, 0)
        except ChildProcessError:  # whoever traced it has
            return

    def end(self) -> None:
        """Kill the process if it still runs, and release it."""
        try:
            self.kill()
        except ProcessLookupError:
            return


def _answer(work: Callable[..., Any], arguments: tuple[Any, ...], writer: int, gate: int) -> None:
    status = 1
    try:
        os.read(gate, 1)
        try:
            said = work(*arguments), ""
        except BaseException:
            said = None, traceback.format_exc()
        os.write(writer, pickle.dumps(said))
        status = 0
    finally:
        os._exit(status)
