"""Parse the options of an entry for inspect: the task's arguments, and a few settings."""

from typing import Any

import msgspec

from holdfast.core.errors import BadUse
from holdfast.evaluate.types.suite import TaskEntry

_OWN = ("generate", "epochs", "judge")


class InspectOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the parsed options of an entry.

    Attributes:
        arguments: the arguments of the task: every option that is none of the following.
        generate: fields of inspect's `GenerateConfig`, used as defaults for the task.
        epochs: how often each sample is run; None for the task's own number.
        judge: the name of the grader's model in the API of the judge.
    """

    arguments: dict[str, Any]
    generate: dict[str, Any] = {}
    epochs: int | None = None
    judge: str = "judge"


def options_of(entry: TaskEntry) -> InspectOptions:
    """Parse and check the options of an entry.

    Raises:
        BadUse: an option has a wrong value, or the entry has a field that inspect's tasks lack.
    """
    if entry.num_fewshot is not None:
        raise BadUse(
            f"The task {entry.name!r} is inspect's, whose tasks take few-shot examples as an "
            "argument of their own, if "
            "any. Leave num_fewshot out and set that argument in options."
        )
    own = {name: value for name, value in entry.options.items() if name in _OWN}
    arguments = {name: value for name, value in entry.options.items() if name not in _OWN}
    try:
        return msgspec.convert({**own, "arguments": arguments}, InspectOptions)
    except msgspec.ValidationError as error:
        raise BadUse(
            f"The options of the task {entry.name!r}: {error}. generate is a table, epochs a "
            "number, judge a text."
        ) from None
