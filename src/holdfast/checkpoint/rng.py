"""The states of the random generators of one process: Python, NumPy, torch on the CPU and on CUDA."""

import random
import sys
from typing import Any

import torch

from holdfast.core.errors import BadUse


def capture() -> dict[str, Any]:
    """Take the states, as plain values and CPU tensors.

    NumPy's is that of its global legacy generator, if NumPy is in use; CUDA's that of the current device, if
    this process has used CUDA (asking would otherwise create a context there).
    """
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        import numpy as np

        state = np.random.get_state(legacy=False)
        if state["bit_generator"] != "MT19937":
            states["numpy"] = _as_lists(state)
        else:  # as it was before there were others
            inner = state["state"]
            keys, gauss = inner["key"].tolist(), float(state["gauss"])
            states["numpy"] = ("MT19937", keys, int(inner["pos"]), int(state["has_gauss"]), gauss)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def put_back(states: dict[str, Any]) -> None:
    """Set the generators to what `capture` took; those that this process lacks are left out."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states and "numpy" in sys.modules:
        import numpy as np

        if isinstance(states["numpy"], dict):
            _put_back_numpy(states["numpy"])
        else:
            name, keys, position, has_gauss, cached = states["numpy"]
            np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _as_lists(value: Any) -> Any:
    """Plain values; NumPy's arrays as lists."""
    if isinstance(value, dict):
        return {key: _as_lists(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def _put_back_numpy(state: dict[str, Any]) -> None:
    """Of a global generator that `numpy.random.set_bit_generator` has set.

    Raises:
        BadUse: it is another one now.
    """
    import numpy as np

    now = np.random.get_state(legacy=False)
    if now["bit_generator"] != state["bit_generator"]:
        raise BadUse(
            f"NumPy's global generator was a {state['bit_generator']} when this was saved, and is a "
            f"{now['bit_generator']}. Call numpy.random.set_bit_generator before restore()."
        )
    inner = {
        key: np.array(item, dtype=now["state"][key].dtype) if isinstance(item, list) else item
        for key, item in state["state"].items()
    }
    np.random.set_state({**state, "state": inner})
