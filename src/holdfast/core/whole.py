"""Recognize whole numbers of any type that a training loop may count in."""

import operator
from typing import Any


def whole_number(value: Any) -> int | None:
    """Convert a whole number of Python, NumPy or a one-element tensor to an int.

    Returns:
        The number; None for anything else: floats, booleans of any type, text.
    """
    if type(value) is int:
        return value
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        return None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):  # RuntimeError: a tensor without data
        return None
