"""Run tasks as processes of this machine, with a limit on how many run at the same time."""

import os
import queue
import subprocess
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.cluster.leash import release, release_all, start_on_leash
from holdfast.cluster.tasks import Finished, Task, check_tasks, log_of, settle, skip_finished


def core_count() -> int:
    """Return the number of CPU cores that this process may use.

    In a container or under a scheduler, this can be less than the number of the machine's cores.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class LocalWorkers:
    """Run up to `limit` tasks at the same time as processes of this machine.

    Each task has its own session.
    """

    limit: int

    def run(self, tasks: Sequence[Task], *, folder: Path) -> Generator[Finished, None, None]:
        """See `Workers.run`."""
        check_tasks(tasks)
        folder.mkdir(parents=True, exist_ok=True)
        return self._run(tasks, folder)

    def _run(self, tasks: Sequence[Task], folder: Path) -> Generator[Finished, None, None]:
        skipped, waiting = skip_finished(tasks, folder)
        waiting.reverse()
        running: dict[str, tuple[Task, subprocess.Popen[bytes]]] = {}
        ended: queue.SimpleQueue[str] = queue.SimpleQueue()

        def start_next() -> None:
            task = waiting.pop()
            leashed = start_on_leash(task.command, log_of(task, folder))
            running[task.name] = (task, leashed)
            threading.Thread(
                target=_announce, args=(task.name, leashed, ended), daemon=True
            ).start()

        try:
            while waiting and len(running) < self.limit:
                start_next()
            yield from skipped
            while running:
                task, leashed = running.pop(ended.get())
                finished = settle(task, release(leashed), folder)
                if waiting:
                    start_next()  # before the yield, so that the caller's work leaves no core idle
                yield finished
        finally:
            release_all(leashed for _, leashed in running.values())


def _announce(name: str, leashed: subprocess.Popen[bytes], ended: queue.SimpleQueue[str]) -> None:
    leashed.wait()
    ended.put(name)
