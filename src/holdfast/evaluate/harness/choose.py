"""Find a harness by its name."""

import importlib
import inspect
from collections.abc import Sequence

from holdfast.core.errors import BadUse
from holdfast.evaluate.types.harness import Harness
from holdfast.evaluate.types.suite import nearest

_KINDS = {
    "lm-eval": "holdfast.evaluate.harness.lm_eval.harness:LmEval",
    "inspect": "holdfast.evaluate.harness.inspect:Inspect",
}


def harness(
    name: str, *, include_paths: Sequence[str] = (), confirm_unsafe_code: bool = False
) -> Harness:
    """Create the harness named "lm-eval", "inspect" or "module:Class".

    Args:
        name: the name.
        include_paths: the suite's folders with the user's tasks; passed to the constructor if it
            has a parameter of this name.
        confirm_unsafe_code: the suite's permission to run the model's code; passed in the same way.

    Raises:
        BadUse: the harness does not exist, or its packages are not installed.
    """
    module_name, colon, class_name = _KINDS.get(name, name).partition(":")
    if not colon:
        raise BadUse(
            f'There is no harness {name!r}.{nearest(name, _KINDS)} Choose "lm-eval", "inspect" or "module:Class".'
        )
    given = {"include_paths": include_paths, "confirm_unsafe_code": confirm_unsafe_code}
    try:
        kind = getattr(importlib.import_module(module_name), class_name)
        known = inspect.signature(kind).parameters
        made: Harness = kind(**{key: value for key, value in given.items() if key in known})
    except ModuleNotFoundError as error:
        extra = "holdfast[inspect]" if name == "inspect" else "holdfast[eval]"
        remedy = (
            f"Install it with: pip install '{extra}'"
            if name in _KINDS
            else "Correct the name, or install it."
        )
        raise BadUse(
            f"The harness {name!r} needs {error.name}, which is not installed. {remedy}"
        ) from None
    except AttributeError as error:
        if error.name != class_name:
            raise
        raise BadUse(
            f"The module {module_name} has no class {class_name}. Correct harness = {name!r}."
        ) from None
    return made
