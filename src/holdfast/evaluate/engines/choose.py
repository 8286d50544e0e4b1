"""Which class answers for an `EngineSpec`; each kind is imported only when it is asked for."""

import importlib

from holdfast.core.errors import BadUse
from holdfast.evaluate.engines.engine import Engine, EngineSpec

_HERE = "holdfast.evaluate.engines."
KINDS = {
    "hf": _HERE + "transformers:TransformersEngine",
    "vllm": _HERE + "vllm:VllmEngine",
    "openai": _HERE + "openai:OpenAIEngine",
    "simulated": _HERE + "simulated:SimulatedEngine",
}


def make_engine(spec: EngineSpec) -> Engine:
    """An engine of the kind that `spec` names, not loaded yet.

    Raises:
        BadUse: there is no such kind, the class named cannot be imported, or the kind refuses the spec.
    """
    place = KINDS.get(spec.kind, spec.kind)
    module, separator, name = place.partition(":")
    if not separator or not module or not name:
        known = ", ".join(KINDS)
        raise BadUse(f"There is no engine kind {spec.kind!r}. Give one of {known}, or module:Class of your own.")
    try:
        make = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise BadUse(f"The engine {spec.kind!r} needs a package: {error}. Install it on the nodes.") from error
    except AttributeError as error:
        raise BadUse(f"The module {module} has no {name}. Give module:Class of an engine.") from error
    engine: Engine = make(spec)
    return engine
