"""Find inspect's tasks by name.

A name is FILE.py@TASK, FILE.py for all tasks of a file, or PACKAGE/TASK.
"""

import inspect
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from inspect_ai import Task
from inspect_ai._eval.loader import load_tasks
from inspect_ai._eval.task.util import split_spec
from inspect_ai._util.decorator import parse_decorators
from inspect_ai._util.registry import registry_find, registry_info, registry_lookup

from holdfast.core.errors import BadUse, HoldfastError, NotFound
from holdfast.evaluate.harness.failure import sentence
from holdfast.evaluate.harness.inspect.options import options_of
from holdfast.evaluate.types.suite import TaskEntry, nearest

_SEED = 1234  # lm-eval's own, so that unseeded draws of a task are the same in every run


def find_tasks(entry: TaskEntry, include_paths: Sequence[str]) -> list[Task]:
    """Load the tasks of an entry with their datasets.

    Args:
        entry: an entry of the suite.
        include_paths: folders to search for files that are not in the current folder.

    Raises:
        NotFound: the task does not exist; the message suggests similar names.
        BadUse: the task cannot be loaded with these arguments, or needs a container.
    """
    arguments = options_of(entry).arguments
    name = _located(entry.name, include_paths)
    random.seed(_SEED)
    np.random.seed(_SEED)
    try:
        tasks = load_tasks([name], arguments)
    except HoldfastError:
        raise
    except Exception as error:  # tasks run foreign code
        raise BadUse(f"The task {entry.name!r} cannot be loaded: {sentence(error)}") from error
    if not tasks:
        raise NotFound(
            f"{entry.name} holds no inspect task. Name a file with a function under @task."
        )
    for task in tasks:
        _refuse_unknown(arguments, task, entry.name)
        _refuse_sandbox(task, entry.name)
    return tasks


def _located(name: str, include_paths: Sequence[str]) -> str:
    """Return the name with the file's absolute path; unchanged for a task of a package."""
    file, task = split_spec(name)
    if not file.endswith(".py"):
        if registry_lookup("task", name) is None:
            known = [
                registry_info(found).name
                for found in registry_find(lambda info: info.type == "task")
            ]
            raise NotFound(
                f"There is no inspect task {name!r}.{nearest(name, known)} "
                "Name FILE.py@TASK, or PACKAGE/TASK of an installed package."
            )
        return name
    places = [Path(), *map(Path, include_paths)]
    found = next(
        (path for place in places if (path := place / Path(file).expanduser()).is_file()), None
    )
    if found is None:
        beside = [str(path) for place in places for path in (place / file).parent.glob("*.py")]
        raise NotFound(f"There is no file {file} with inspect tasks.{nearest(file, beside)}")
    names = [name for name, _ in parse_decorators(found, "task")]
    if task is not None and task not in names:
        raise NotFound(
            f"{file} has no inspect task {task!r}.{nearest(task, names)} It has: "
            f"{', '.join(names)}."
        )
    return f"{found.absolute()}@{task}" if task else str(found.absolute())


def _refuse_unknown(arguments: Iterable[str], task: Task, name: str) -> None:
    """Raise BadUse for arguments that the task lacks, which inspect would drop with a warning."""
    made_by = registry_lookup("task", registry_info(task).name)
    assert callable(made_by)
    taken = inspect.signature(made_by).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        return
    for argument in arguments:
        if argument not in taken:
            raise BadUse(
                f"The inspect task {name!r} takes no argument "
                f"{argument!r}.{nearest(argument, taken)} "
                f"It takes: {', '.join(taken) or 'none'}."
            )


def _refuse_sandbox(task: Task, name: str) -> None:
    needed = {task.sandbox.type} if task.sandbox else set()
    needed |= {sample.sandbox.type for sample in task.dataset if sample.sandbox}
    if needed:
        raise needs_sandbox(name, " and ".join(sorted(needed)))


def needs_sandbox(name: str, kind: str) -> BadUse:
    """Return the error for a task that needs a container; `kind` is inspect's name for it."""
    return BadUse(
        f"The inspect task {name!r} needs a sandbox ({kind}) to run the model's tool calls, which "
        "Holdfast does not "
        "provide. Run it with inspect itself, or take it out of the suite."
    )
