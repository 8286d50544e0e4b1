"""Capture and restore one process's random generators: Python, NumPy, torch on CPU and CUDA."""

import json
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from holdfast.core.errors import BadUse


def capture() -> dict[str, Any]:
    """Return the states of the generators as plain values and CPU tensors.

    NumPy's global legacy generator is included if NumPy is imported. The current CUDA device's
    generator is included if this process has used CUDA.
    """
    # Reading the generator of an unused CUDA device would create a context on the device.
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        import numpy as np

        state = np.random.get_state(legacy=False)
        if state["bit_generator"] != "MT19937":
            states["numpy"] = json.dumps(state, default=lambda array: array.tolist())
        else:  # the format from before other generators were supported
            inner = state["state"]
            keys, gauss = inner["key"].tolist(), float(state["gauss"])
            states["numpy"] = ("MT19937", keys, int(inner["pos"]), int(state["has_gauss"]), gauss)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def put_back(states: dict[str, Any]) -> None:
    """Set the generators to the states that `capture` returned.

    States of generators that this process lacks are skipped.
    """
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states and "numpy" in sys.modules:
        import numpy as np

        if isinstance(states["numpy"], str):
            np.random.set_state(json.loads(states["numpy"], object_hook=_with_arrays))
        else:
            name, keys, position, has_gauss, cached = states["numpy"]
            np.random.set_state(
                (name, np.array(keys, dtype=np.uint32), position, has_gauss, cached)
            )
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def check(skeleton: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
    """Check, before any generator is changed, that the saved states can be restored.

    Args:
        skeleton: the skeleton of the states from `capture`.
        loaded: the plain values, by flat name.

    Raises:
        BadUse: the type of NumPy's generator was changed with `numpy.random.set_bit_generator`.
    """
    if "numpy" not in skeleton or "numpy" not in sys.modules:
        return
    import numpy as np

    saved = loaded[skeleton["numpy"]]
    was = json.loads(saved)["bit_generator"] if isinstance(saved, str) else saved[0]
    now = np.random.get_state(legacy=False)["bit_generator"]
    if was != now:
        raise BadUse(
            f"NumPy's global generator was a {was} when this was saved, and is a {now}. Call "
            "numpy.random.set_bit_generator before restore()."
        )


def _with_arrays(item: dict[str, Any]) -> dict[str, Any]:
    """Convert JSON lists in a NumPy state to arrays: 32-bit for MT19937, 64-bit for all others."""
    import numpy as np

    return {
        key: np.array(each, dtype=np.uint64) if isinstance(each, list) else each
        for key, each in item.items()
    }
