"""Parse the options of a suite's entry that only lm-eval understands."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.errors import BadUse
from holdfast.evaluate.types.suite import TaskEntry, nearest

MODEL_ARGS = (
    "add_bos_token",
    "chat_template_args",
    "enable_thinking",
    "prefix_token_id",
    "think_end_token",
    "truncation",
    "use_fast_tokenizer",
)
"""Values of lm-eval's `--model_args` that affect requests and replies.

Values that affect the weights belong to the engine's settings.
"""


@dataclass(frozen=True, kw_only=True)
class LmEvalOptions:
    """Hold options of lm-eval's command line, with lm-eval's defaults.

    The defaults are from lm_eval/defaults.py of lm-eval 0.4.13.

    Attributes:
        include_path: folders with tasks, besides the suite's folders.
        model_args: values for the names in `MODEL_ARGS`.
        metadata: values passed to tasks that make their own data.
        predict_only: True to log samples and compute no metrics.
        samples: the indices of the documents to use in each task; None for all documents.
    """

    gen_kwargs: Mapping[str, Any] | str | None = None
    include_path: str | list[str] = ()  # type: ignore[assignment]
    fewshot_as_multiturn: bool = True
    bootstrap_iters: int = 100_000
    random_seed: int | None = 0
    numpy_random_seed: int | None = 1234
    torch_random_seed: int | None = 1234
    fewshot_random_seed: int | None = 1234
    model_args: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    predict_only: bool = False
    samples: list[int] | None = None

    @property
    def include_paths(self) -> list[str]:
        """`include_path` as a list of folders."""
        return (
            [self.include_path] if isinstance(self.include_path, str) else list(self.include_path)
        )


_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "gen_kwargs": ((dict, str), 'a table, or a text "temperature=0.7,top_p=0.9"'),
    "include_path": ((str, list), "a folder or a list of them"),
    "fewshot_as_multiturn": ((bool,), "true or false"),
    "bootstrap_iters": ((int,), "a whole number"),
    "random_seed": ((int, type(None)), "a whole number"),
    "numpy_random_seed": ((int, type(None)), "a whole number"),
    "torch_random_seed": ((int, type(None)), "a whole number"),
    "fewshot_random_seed": ((int, type(None)), "a whole number"),
    "model_args": ((dict,), f"a table of {', '.join(MODEL_ARGS)}"),
    "metadata": ((dict,), "a table"),
    "predict_only": ((bool,), "true or false"),
    "samples": ((list,), "a list of the documents' numbers"),
}


def options_of(entry: TaskEntry) -> LmEvalOptions:
    """Parse and check an entry's options.

    Raises:
        BadUse: an option is unknown or has a value of the wrong type.
    """
    where = f"The task {entry.name!r}"
    for key, value in entry.options.items():
        if key not in _KINDS:
            raise BadUse(
                f"{where} has the option {key!r}.{nearest(key, _KINDS)} lm-eval's are "
                f"{', '.join(_KINDS)}."
            )
        kinds, allowed = _KINDS[key]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise BadUse(f"{where} has {key} = {value!r}: it must be {allowed}.")
    for key in entry.options.get("model_args", {}):
        if key not in MODEL_ARGS:
            raise BadUse(
                f"{where} has the model argument {key!r}.{nearest(key, MODEL_ARGS)} Those that "
                "shape requests are "
                f"{', '.join(MODEL_ARGS)}; weights and device are options of the engine."
            )
    samples = entry.options.get("samples")
    if samples is not None and entry.limit is not None:
        raise BadUse(f"{where} has both a limit and chosen samples. Give one of them.")
    if samples is not None and not all(type(one) is int and one >= 0 for one in samples):
        raise BadUse(f"{where} has samples = {samples!r}: they must be the documents' numbers.")
    return LmEvalOptions(**entry.options)
