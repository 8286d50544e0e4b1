"""Which tasks to run, and how much of each: a TOML file, or task names."""

from typing import Any

import msgspec


class TaskEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of a suite: a task, a group of tasks or a tag, as the harness names it.

    Attributes:
        name: the harness's name; for inspect a file or package path and "@task" as inspect writes it.
        harness: "lm-eval", "inspect", or "module:Class" of a `Harness`.
        limit: how many samples of each task; None for all; below 1 a share, as lm-eval has it.
        num_fewshot: None for the task's own.
        chat_template: whether prompts go through the model's chat template.
        system_instruction: before every prompt.
        options: of the harness alone (lm-eval: gen_kwargs, include_path, seeds; inspect: task arguments).
    """

    name: str
    harness: str = "lm-eval"
    limit: float | None = None
    num_fewshot: int | None = None
    chat_template: bool = False
    system_instruction: str | None = None
    options: dict[str, Any] = {}


class Suite(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A named list of tasks. `include_paths` are folders with lm-eval tasks of one's own."""

    name: str
    entries: tuple[TaskEntry, ...]
    include_paths: tuple[str, ...] = ()
    confirm_unsafe_code: bool = False
