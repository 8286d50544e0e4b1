"""What an entry may say to inspect alone: the arguments of its task, and a few things beside them."""

from typing import Any

import msgspec

from holdfast.core.errors import BadUse
from holdfast.evaluate.types.suite import TaskEntry

_OWN = ("generate", "epochs", "judge")


class InspectOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of an entry.

    Attributes:
        arguments: of the task: every option but the following.
        generate: fields of inspect's `GenerateConfig` that hold where the task does not say otherwise.
        epochs: how often each sample is run; None for the task's own.
        judge: the grader's model, as the judge's API knows it.
    """

    arguments: dict[str, Any]
    generate: dict[str, Any] = {}
    epochs: int | None = None
    judge: str = "judge"


def options_of(entry: TaskEntry) -> InspectOptions:
    """The options of an entry, checked.

    Raises:
        BadUse: one is not what it must be, or the entry says what inspect's tasks do not know.
    """
    if entry.num_fewshot is not None:
        raise BadUse(
            f"The task {entry.name!r} is inspect's, whose tasks take few-shot examples as an argument of their own, if "
            "any. Leave num_fewshot out and set that argument in options."
        )
    own = {name: value for name, value in entry.options.items() if name in _OWN}
    arguments = {name: value for name, value in entry.options.items() if name not in _OWN}
    try:
        return msgspec.convert({**own, "arguments": arguments}, InspectOptions)
    except msgspec.ValidationError as error:
        raise BadUse(
            f"The options of the task {entry.name!r}: {error}. generate is a table, epochs a number, judge a text."
        ) from None
