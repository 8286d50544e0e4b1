"""What a task is, and when it is done: its result file decides, never an exit code alone."""

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from holdfast.core.errors import BadUse

_SAFE_NAME = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,199}"
)  # a file name with ".log" stays under 255 bytes


@dataclass(frozen=True, kw_only=True)
class Task:
    """One command to run once.

    Attributes:
        name: unique among the tasks of a run, and safe as a file name.
        command: argv; runs with this process's environment and working folder, on whichever worker.
        result: written by the command whole or not at all, on a file system that all workers share.
    """

    name: str
    command: tuple[str, ...]
    result: Path


@dataclass(frozen=True, kw_only=True)
class Finished:
    """How a task ended.

    Attributes:
        task: the task.
        exit_code: 0 when the result exists. Else the command's, negative for a signal; 1 when it is not known, or
            was 0 and no result came of it: the log then says so.
        log: what the command printed; a skipped task may have none.
        skipped: the result existed before, and nothing was run.
    """

    task: Task
    exit_code: int
    log: Path
    skipped: bool


class Workers(Protocol):
    """Runs tasks, several at a time."""

    def run(self, tasks: Sequence[Task], *, folder: Path) -> Generator[Finished, None, None]:
        """Run the tasks, yielding each as it finishes, in any order; failed ones too, for the caller to judge.

        Closing the generator early (leaving the loop over it, an exception, Ctrl-C) ends whatever still runs. A caller
        that keeps it in a variable does so with `contextlib.closing`.

        Args:
            tasks: what to run.
            folder: made if absent; holds a log a task, NAME.log, begun anew by each run. Of one run at a time, and,
                like the results, on a file system that all workers share.

        Raises:
            BadUse: at once, for names that are not unique or not safe, or an empty command.
        """
        ...


def check_tasks(tasks: Sequence[Task]) -> None:
    """Refuse tasks that could not be told apart, or not be run.

    Raises:
        BadUse: a name is not unique or not safe as a file name, a result is not unique, or a command is empty.
    """
    seen: dict[str, Task] = {}
    results: dict[Path, Task] = {}
    for task in tasks:
        if not _SAFE_NAME.fullmatch(task.name):
            raise BadUse(
                f"The task name {task.name!r} is no file name. Use letters, digits and any of . _ = + -."
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
    """Where the task's log is."""
    return folder / f"{task.name}.log"


def skip_finished(tasks: Sequence[Task], folder: Path) -> tuple[list[Finished], list[Task]]:
    """The tasks whose result exists, as finished, and the rest."""
    skipped: list[Finished] = []
    pending: list[Task] = []
    for task in tasks:
        if task.result.exists():
            skipped.append(Finished(task=task, exit_code=0, log=log_of(task, folder), skipped=True))
        else:
            pending.append(task)
    return skipped, pending


def settle(task: Task, exit_code: int, folder: Path, *, why: str | None = None) -> Finished:
    """The end of a task that ran: its result decides, so that this run and a later one judge it alike.

    Args:
        task: the task.
        exit_code: what is known of the command's end.
        folder: of the logs.
        why: appended to the log of a task without a result, where the command itself could not say it.
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
