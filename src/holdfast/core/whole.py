"""Recognize whole numbers of the types in which a training loop may count steps."""

import operator
from typing import Any


def whole_number(value: Any) -> int | None:
    """Convert a whole number of Python or NumPy, or a one-element tensor, to an int.

    Returns:
        The number; None for anything else, such as floats, text, and booleans of any type.
    """
    if type(value) is int:
        return value
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        return None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):  # RuntimeError: a tensor without data
        return None
