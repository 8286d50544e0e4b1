import numpy as np
import pytest
import torch

from holdfast.core.whole import whole_number


@pytest.mark.parametrize(
    "value", [7, np.int64(7), np.uint8(7), np.array(7), torch.tensor(7), torch.tensor([7])]
)
def test_a_whole_number_of_any_type_is_an_int(value):
    assert whole_number(value) == 7
    assert type(whole_number(value)) is int


@pytest.mark.parametrize(
    "value",
    [
        *(7.0, np.float64(7), torch.tensor(7.0)),
        *(True, np.bool_(True), np.array(True), torch.tensor(True)),
        *(
            "7",
            b"7",
            None,
            [7],
            np.array([7, 8]),
            torch.tensor([7, 8]),
            torch.tensor(7, device="meta"),
        ),
    ],
)
def test_anything_else_is_none(value):
    assert whole_number(value) is None
