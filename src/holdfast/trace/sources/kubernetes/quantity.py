"""Parse a quantity of the Kubernetes API (resource.Quantity)."""

import re
from typing import Final

_QUANTITY = re.compile(r"([+-]?\d*\.?\d+)(?:([eE][+-]?\d+)|([numkMGTPE]|[KMGTPE]i))?$")
_SUFFIXES: Final = {
    "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    **{f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTPE", start=1)},
}  # fmt: skip


def quantity(value: object) -> float:
    """Convert a quantity to a number: `500m` is 0.5, `64Gi` is 64 * 2**30.

    Raises:
        ValueError: the value is not a quantity.
    """
    match = _QUANTITY.match(str(value).strip())
    if match is None:
        raise ValueError(f"expected a quantity such as 500m or 64Gi where there is {value!r}")
    number = float(match[1] + (match[2] or ""))
    return number * _SUFFIXES[match[3]] if match[3] else number
