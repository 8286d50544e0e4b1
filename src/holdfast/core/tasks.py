"""Run background tasks on an event loop."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Tasks:
    """Own a set of background tasks."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        """Store `failed`, which is called with the error of each task that fails."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed = failed

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task, and keep a reference to it until it ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def cancel(self) -> list[asyncio.Task[None]]:
        """Cancel all tasks, and return them."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        return tasks

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failed(error)
