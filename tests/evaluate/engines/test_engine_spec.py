"""Check the number of engines on a node."""

import pytest

from holdfast.evaluate.types.engine import EngineSpec, engines_on


@pytest.mark.parametrize(
    ("gpus", "spec", "wanted", "engines"),
    [
        (8, EngineSpec(kind="vllm", tensor_parallel=2), 0, 4),
        (8, EngineSpec(kind="vllm", tensor_parallel=2), 3, 3),
        (0, EngineSpec(), 0, 1),
        (8, EngineSpec(device="cpu"), 0, 1),
        (8, EngineSpec(kind="openai", url="http://there/v1"), 0, 1),
        (8, EngineSpec(kind="simulated"), 0, 1),
    ],
)
def test_a_node_has_as_many_engines_as_its_gpus_have_room_for(gpus, spec, wanted, engines):
    assert engines_on(gpus, spec, wanted) == engines
