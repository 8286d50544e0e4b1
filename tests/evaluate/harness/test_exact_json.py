import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.evaluate.harness.exact_json import NotExact, decode, encode

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters())
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.text(), st.text()), inner)
    ),
)


def same(one, other) -> bool:
    """Return True if equal in type, order and every bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    return one == other


@given(values)
def test_values_come_back_as_they_were(value):
    assert same(decode(encode(value)), value)


@pytest.mark.parametrize(
    "value",
    [
        np.float64(0.1),
        np.float32(0.1),
        np.float64("nan"),
        np.int64(-3),
        np.bool_(True),
        np.array([[1.5, math.inf], [0.0, -0.0]]),
        np.array([], dtype=np.int32),
        np.array(["a", "bcd"]),
        np.str_("x"),
    ],
)
def test_numpy_comes_back_as_it_was(value):
    back = decode(encode(value))
    assert type(back) is type(value)
    assert back.dtype == value.dtype
    assert np.asarray(back).tobytes() == np.asarray(value).tobytes()
    assert back.shape == value.shape


class Own(float):
    pass


@pytest.mark.parametrize(
    "value", [{1, 2}, b"x", Own(1), object(), np.array([object()]), [{"a": (set(),)}]]
)
def test_what_would_not_come_back_is_refused(value):
    with pytest.raises(NotExact):
        encode(value)
