"""Define a task and its outcome; a task succeeds if its result file exists.

The exit code of the task's command is not enough for success.
"""

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from holdfast.core.errors import BadUse

# A file name with ".log" stays under 255 bytes.
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,199}")


@dataclass(frozen=True, kw_only=True)
class Task:
    """A command to run once.

    Attributes:
        name: a name that is unique among the tasks of a run and safe as a file name.
        command: the command; workers run it with this process's environment and working folder.
        result: the file that the command writes, whole or not at all, on a file system that all
            workers share.
    """

    name: str
    command: tuple[str, ...]
    result: Path


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The outcome of a task.

    Attributes:
        task: the task.
        exit_code: 0 if the result exists. Otherwise the command's exit code, negative for a signal;
            1 if the code is unknown, or if the command ended with 0 but without a result.
        log: the file with the command's output; a skipped task may have no such file.
        skipped: True if the result existed before, so that nothing was run.
    """

    task: Task
    exit_code: int
    log: Path
    skipped: bool


class Workers(Protocol):
    """Run several tasks at the same time."""

    def run(self, tasks: Sequence[Task], *, folder: Path) -> Generator[Finished, None, None]:
        """Run the tasks; yield the outcome of each when it ends, in any order.

        If the generator is closed early (by leaving the loop, an exception, or Ctrl-C), all running
        tasks are ended. A caller that keeps the generator in a variable needs `contextlib.closing`
        for this.

        Args:
            tasks: the tasks.
            folder: the folder for the logs, created if absent. Use a folder for one run at a time.
                Each run writes a new NAME.log for each task. All workers must share the file system
                of the folder and the results.

        Raises:
            BadUse: a name is not unique or not safe, or a command is empty; raised before any task
                starts.
        """
        ...


def check_tasks(tasks: Sequence[Task]) -> None:
    """Check that all tasks can be run, and that their names and results are distinct.

    Raises:
        BadUse: a name is not unique or not safe as a file name, a result is not unique, or a
            command is empty.
    """
    seen: dict[str, Task] = {}
    results: dict[Path, Task] = {}
    for task in tasks:
        if not _SAFE_NAME.fullmatch(task.name):
            raise BadUse(
                f"The task name {task.name!r} is not a file name. Use letters, digits and any of . _ = + -."
            )
        if not task.command:
            raise BadUse(f"Task {task.name} has no command. Give its argv.")
        if task.name in seen:
            raise BadUse(f"Two tasks are named {task.name}. Give each a name of its own.")
        if task.result in results:
            raise BadUse(
                f"Tasks {results[task.result].name} and {task.name} both write {task.result}. Give each its own."
            )
        seen[task.name] = results[task.result] = task


def log_of(task: Task, folder: Path) -> Path:
    """Return the path of a task's log."""
    return folder / f"{task.name}.log"


def skip_finished(tasks: Sequence[Task], folder: Path) -> tuple[list[Finished], list[Task]]:
    """Separate the tasks whose result already exists from the others.

    Returns:
        The outcomes of the tasks that have a result, and the tasks that must run.
    """
    skipped: list[Finished] = []
    pending: list[Task] = []
    for task in tasks:
        if task.result.exists():
            skipped.append(Finished(task=task, exit_code=0, log=log_of(task, folder), skipped=True))
        else:
            pending.append(task)
    return skipped, pending


def settle(task: Task, exit_code: int, folder: Path, *, why: str | None = None) -> Finished:
    """Return the outcome of a task that ran.

    The outcome depends on the result file, so that this run and a later one agree.

    Args:
        task: the task.
        exit_code: the exit code of the command, as far as known.
        folder: the folder of the logs.
        why: a reason to append to the log of a task without a result, if the command cannot have
            printed the reason itself.
    """
    log = log_of(task, folder)
    if task.result.exists():
        exit_code = 0
    else:
        if exit_code == 0:
            exit_code = 1
            why = why or f"the command ended with 0, but {task.result} is not there"
        if why:
            with log.open("a") as file:
                file.write(f"holdfast: {why}\n")
    return Finished(task=task, exit_code=exit_code, log=log, skipped=False)
