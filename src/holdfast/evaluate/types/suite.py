"""Define the tasks of a suite and their options, from a TOML file or from task names.

```toml
name = "nightly"                # default: the file's name
include_paths = ["tasks"]       # folders with your own lm-eval tasks, relative to this file
confirm_unsafe_code = false     # true allows tasks to run the model's code, in the sandbox
limit = 200                     # this and the next two: defaults for all tasks
chat_template = true
options = { fewshot_random_seed = 7 }

[[tasks]]
name = "gsm8k"
num_fewshot = 5

[[tasks]]
name = "mmlu"
limit = 0.1
```

A shorter form of the tasks is `tasks = ["gsm8k", "mmlu:0.1"]`. Without a file, a suite is a list of
task names, or one string with the names separated by commas: `gsm8k`, `gsm8k:100` (with a limit),
`inspect:NAME` or `lm-eval:NAME` (with a harness).
"""

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from holdfast.core.errors import BadUse, NotFound


class TaskEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of a suite: a task, a group of tasks or a tag.

    Attributes:
        name: the harness's name of the task; for inspect, the path of a file or package followed by
            "@task", as inspect spells it.
        harness: "lm-eval", "inspect", or "module:Class" of a `Harness`.
        limit: the number of samples of each task; a limit below 1 is a share of the samples, as in
            lm-eval; None for all samples.
        num_fewshot: the number of examples in each prompt; None for the task's own number.
        chat_template: True to format prompts by the model's chat template; a string selects one of
            several templates.
        system_instruction: a text before every prompt.
        options: options that only this harness understands (for lm-eval: gen_kwargs, include_path,
            seeds; for inspect: arguments of the task).
    """

    name: str
    harness: str = "lm-eval"
    limit: float | None = None
    num_fewshot: int | None = None
    chat_template: bool | str = False
    system_instruction: str | None = None
    options: dict[str, Any] = {}


class Suite(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A named list of tasks; `include_paths` are folders with the user's own lm-eval tasks."""

    name: str
    entries: tuple[TaskEntry, ...]
    include_paths: tuple[str, ...] = ()
    confirm_unsafe_code: bool = False


def load_suite(path_or_names: str | Sequence[str]) -> Suite:
    """Read a suite from a `.toml` file, or build a suite from task names.

    The module's docstring describes both forms.

    Raises:
        NotFound: the file does not exist.
        BadUse: the file is not a suite, or a name or limit is wrong; the message names the file,
            the key, the value and the allowed values.
    """
    names = path_or_names.split(",") if isinstance(path_or_names, str) else list(path_or_names)
    names = [name.strip() for name in names if name.strip()]
    if len(names) == 1 and names[0].endswith(".toml"):
        return _read(Path(names[0]))
    if not names:
        raise BadUse(
            "A suite needs at least one task. Name tasks (gsm8k,mmlu:100) or a .toml file."
        )
    for name in names:
        if name.endswith(".toml"):
            raise BadUse(
                f"{name} is a suite file: give the file alone, or add the other tasks to it."
            )
    entries = tuple(_entry(_named(name), {}, f"the task {name!r}") for name in names)
    return Suite(
        name="+".join(entry.name for entry in entries[:3]), entries=_distinct(entries, "The suite")
    )


_DEFAULTS = ("harness", "limit", "num_fewshot", "chat_template", "system_instruction", "options")
_SUITE_KEYS = ("name", "tasks", "include_paths", "confirm_unsafe_code", *_DEFAULTS)
_NAME = re.compile(r"(?:(?P<harness>lm-eval|inspect):)?(?P<name>.+?)(?::(?P<limit>\d+(?:\.\d+)?))?")
_ALLOWED: dict[str, tuple[Any, str]] = {
    "name": (str, "a text that is not empty"),
    "harness": (str, '"lm-eval", "inspect" or "module:Class"'),
    "limit": (
        (int, float),
        "a number above 0: of samples (whole), or below 1 a share of them",
    ),
    "num_fewshot": (int, "a whole number, 0 or more"),
    "chat_template": ((bool, str), "true, false or a template's name"),
    "system_instruction": (str, "a text"),
    "options": (dict, "a table"),
    "tasks": (list, "a list of names or tables, at least one"),
    "include_paths": (list, "a list of folders that exist"),
    "confirm_unsafe_code": (bool, "true or false"),
}


def _read(path: Path) -> Suite:
    try:
        table = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise NotFound(
            f"There is no suite {path}. Name a .toml file, or tasks (gsm8k,mmlu:100)."
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadUse(
            f"{path} cannot be read as TOML: {error}. docs/evaluation.md shows the form of a suite."
        ) from None
    checked = _checked(table, _SUITE_KEYS, str(path))
    defaults = {key: value for key, value in checked.items() if key in _DEFAULTS}
    tasks = checked.get("tasks")
    if not tasks:
        raise BadUse(f"{path}: it has no tasks. Add [[tasks]] tables, each with a name.")
    entries = []
    for number, task in enumerate(tasks):
        where = f"{path}: tasks[{number}]"
        if not isinstance(task, str | dict):
            raise BadUse(f"{where} is {task!r}: it must be a name or a table with a name.")
        entries.append(_entry(_named(task) if isinstance(task, str) else task, defaults, where))
    folders = [
        path.parent / Path(folder).expanduser() for folder in checked.get("include_paths", ())
    ]
    return Suite(
        name=checked.get("name", path.stem),
        entries=_distinct(entries, str(path)),
        include_paths=tuple(str(folder.absolute()) for folder in folders),
        confirm_unsafe_code=checked.get("confirm_unsafe_code", False),
    )


def _named(text: str) -> dict[str, Any]:
    match = _NAME.fullmatch(text)
    assert match, text  # a name is never empty
    given: dict[str, Any] = {
        key: value for key, value in match.groupdict().items() if value is not None
    }
    if "limit" in given:
        given["limit"] = float(given["limit"])
    return given


def _entry(table: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> TaskEntry:
    checked = _checked(table, ("name", *_DEFAULTS), where)
    if "name" not in checked:
        raise BadUse(f"{where}: it has no name. Add name = TASK, as the harness calls it.")
    options = {**defaults.get("options", {}), **checked.get("options", {})}
    return TaskEntry(**{**defaults, **checked, "options": options})


def _checked(table: Mapping[str, Any], known: Sequence[str], where: str) -> dict[str, Any]:
    checked = {}
    for key, value in table.items():
        if key not in known:
            raise BadUse(
                f"{where}: there is no key {key!r}.{nearest(key, known)} Known are: "
                f"{', '.join(known)}."
            )
        kind, allowed = _ALLOWED[key]
        takes_bool = bool in (kind if isinstance(kind, tuple) else (kind,))
        right_type = isinstance(value, kind) and (takes_bool or not isinstance(value, bool))
        if not right_type or not _is_in_range(key, value, where):
            raise BadUse(f"{where}: {key} is {value!r}: it must be {allowed}.")
        checked[key] = float(value) if key == "limit" else value
    return checked


def _is_in_range(key: str, value: Any, where: str) -> bool:
    match key:
        case "name" | "harness":
            return bool(value)
        case "limit":
            return bool(0 < value < 1 or (value >= 1 and float(value).is_integer()))
        case "num_fewshot":
            return bool(value >= 0)
        case "include_paths":
            here = Path(where).parent  # only files have this key
            return all(
                isinstance(folder, str) and (here / Path(folder).expanduser()).is_dir()
                for folder in value
            )
        case _:
            return True


def _distinct(entries: Sequence[TaskEntry], where: str) -> tuple[TaskEntry, ...]:
    seen: list[TaskEntry] = []
    for entry in entries:
        if entry in seen:
            raise BadUse(
                f"{where}: the task {entry.name!r} is listed twice. Remove one, or set them apart."
            )
        seen.append(entry)
    return tuple(seen)


def nearest(name: str, known: Iterable[str], count: int = 1) -> str:
    """Suggest known names that are similar to `name`.

    Returns:
        A space and the sentence "Did you mean …?" with at most `count` names; "" if no name is
        similar.
    """
    close = difflib.get_close_matches(name, list(known), n=count, cutoff=0.6)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
