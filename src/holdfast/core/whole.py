"""Recognize whole numbers, of any type that a training loop counts in."""

import operator
from typing import Any


def whole_number(value: Any) -> int | None:
    """Return a whole number as an int: of Python, of NumPy, or in a tensor of one element.

    Returns:
        None for anything else: floats, truth values of any type, text.
    """
    if type(value) is int:
        return value
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        return None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):  # RuntimeError: a tensor without data
        return None
