"""Find the class of an `EngineSpec`'s engine, and check its options.

The module of a kind of engine is imported only when the kind is used.
"""

import importlib
from collections.abc import Mapping

from holdfast.core.errors import BadUse
from holdfast.evaluate.types.engine import Engine, EngineSpec
from holdfast.evaluate.types.requests import Scalar
from holdfast.evaluate.types.suite import nearest

_HERE = "holdfast.evaluate.engines."
KINDS = {
    "hf": _HERE + "hf.engine:TransformersEngine",
    "vllm": _HERE + "vllm:VllmEngine",
    "openai": _HERE + "openai:OpenAIEngine",
    "simulated": _HERE + "simulated:SimulatedEngine",
}
_CALLS = ("api_key_env", "patience_s", "timeout_s")
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "hf": (),
    "vllm": (*_CALLS, "arguments", "command", "start_limit_s"),
    "openai": (*_CALLS, "tokenizer"),
}
"""The names allowed in `EngineSpec.options` for each kind; names of times end with `_s` (seconds).

Other kinds of engine check their own options.
"""


def make_engine(spec: EngineSpec) -> Engine:
    """Create an engine of the kind that `spec` names; the engine has no weights yet.

    Raises:
        BadUse: there is no such kind, its class cannot be imported, or the kind refuses the spec.
    """
    check_options(spec)
    place = KINDS.get(spec.kind, spec.kind)
    module, separator, name = place.partition(":")
    if not separator or not module or not name:
        known = ", ".join(KINDS)
        raise BadUse(
            f"There is no engine kind {spec.kind!r}. Give one of {known}, or module:Class of your "
            "own."
        )
    try:
        make = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise BadUse(
            f"The engine {spec.kind!r} needs a package: {error}. Install it on the nodes."
        ) from error
    except AttributeError as error:
        raise BadUse(
            f"The module {module} has no {name}. Give module:Class of an engine."
        ) from error
    engine: Engine = make(spec)
    return engine


def check_options(spec: EngineSpec) -> None:
    """Check the options of an engine.

    Raises:
        BadUse: an option does not exist, or has a wrong value.
    """
    if spec.kind not in OPTIONS:
        return
    known = OPTIONS[spec.kind]
    for name, value in spec.options.items():
        if name not in known:
            there = (
                f"It has {', '.join(known)}."
                if known
                else "The engine has no options: leave it out, or name another engine."
            )
            raise BadUse(
                f"The engine {spec.kind} has no option {name!r}.{nearest(name, known)} {there}"
            )
        if name.endswith("_s") and not _is_positive(value):
            raise BadUse(
                f"The engine's option {name} is {value!r}. Give a number of seconds above 0."
            )


def _is_positive(value: Scalar) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
    )
