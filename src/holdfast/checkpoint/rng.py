"""The states of the random generators of one process: Python, NumPy, torch on the CPU and on CUDA."""

import random
import sys
from typing import Any

import torch


def capture() -> dict[str, Any]:
    """Take the states, as plain values and CPU tensors.

    NumPy's is that of its global legacy generator, if NumPy is in use; CUDA's that of the current device, if
    this process has used CUDA (asking would otherwise create a context there).
    """
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        import numpy as np

        name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        states["numpy"] = (
            str(name),
            np.asarray(keys).tolist(),
            int(position),
            int(has_gauss),
            float(cached),
        )
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def put_back(states: dict[str, Any]) -> None:
    """Set the generators to what `capture` took; those that this process lacks are left out."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states and "numpy" in sys.modules:
        import numpy as np

        name, keys, position, has_gauss, cached = states["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
