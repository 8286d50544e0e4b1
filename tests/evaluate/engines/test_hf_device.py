"""Check the choice of the engine hf's device."""

import pytest
import torch

from holdfast.core.errors import BadUse
from holdfast.evaluate.engines.hf.engine import TransformersEngine
from holdfast.evaluate.types.engine import EngineSpec


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("cuda:99", "The device is cuda:99, and there is"),
        ("cuda", "there is no CUDA device"),
        ("gpu", "There is no device 'gpu'"),
        ("meta", "runs on cpu and cuda, not on meta"),
    ],
)
def test_a_device_that_is_not_there_is_wrong_use_before_anything_is_loaded(device, says):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("it is there")
    with pytest.raises(BadUse, match=says):
        TransformersEngine(EngineSpec(device=device))
