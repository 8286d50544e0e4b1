"""Encode a metric's values as JSON so that decoding restores exact bits, types and order.

JSON has no tuples, NaN or numpy values. Each of these is written as an object whose only key names
the kind of value. Plain lists, strings, integers and finite floats are written as they are, since
Python writes a float as the shortest text with the same bits. Values of all other types are
refused.
"""

import json
import struct
from typing import Any

_NUMPY = "numpy"


class NotExact(Exception):
    """A value has a type that decoding would not restore exactly."""


def encode(value: Any) -> bytes:
    """Encode a value as JSON.

    Raises:
        NotExact: the value, or a value in it, has a type that decoding would not restore exactly.
    """
    return json.dumps(_plain(value), separators=(",", ":"), allow_nan=False).encode()


def decode(data: bytes) -> Any:
    """Decode a value that `encode` encoded.

    Raises:
        ValueError: the data is not an encoded value.
    """
    return _value(json.loads(data))


def _plain(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        finite = value == value and value not in (float("inf"), float("-inf"))  # noqa: PLR0124  the test for NaN
        return value if finite else {"float": struct.pack("<d", value).hex()}
    if kind is list:
        return [_plain(item) for item in value]
    if kind is tuple:
        return {"tuple": [_plain(item) for item in value]}
    if kind is dict:
        return {"dict": [[_plain(key), _plain(item)] for key, item in value.items()]}
    if kind.__module__ == _NUMPY:
        return _plain_numpy(value)
    raise NotExact(
        f"{kind.__module__}.{kind.__qualname__} cannot be written as JSON and read back the same."
    )


def _plain_numpy(value: Any) -> Any:
    import numpy as np

    if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biufcU":
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return {kind: [value.dtype.str, list(value.shape), value.tobytes().hex()]}
    raise NotExact(
        f"A numpy {type(value).__name__} cannot be written as JSON and read back the same."
    )


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, inner),) = plain.items()
    match kind:
        case "float":
            return struct.unpack("<d", bytes.fromhex(inner))[0]
        case "tuple":
            return tuple(_value(item) for item in inner)
        case "dict":
            return {_value(key): _value(item) for key, item in inner}
        case "array" | "scalar":
            import numpy as np

            dtype, shape, data = inner
            array = np.frombuffer(bytes.fromhex(data), dtype=np.dtype(dtype)).reshape(shape).copy()
            return array if kind == "array" else array[()]
        case _:
            raise ValueError(f"{kind!r} is no kind of value.")
