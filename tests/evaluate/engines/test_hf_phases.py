"""Check the phases that the engine records for a profile: prefill, then decode."""

import pytest

from holdfast.core.phases import set_phase_sink
from holdfast.evaluate.engines.hf.engine import TransformersEngine
from holdfast.evaluate.types.engine import EngineSpec
from holdfast.evaluate.types.requests import Request, Sampling, pack_tokens


class Phases:
    """A sink that keeps the names of the phases in their order."""

    def __init__(self):
        self.names = []

    def span(self, phase, start_ns, end_ns):
        assert start_ns <= end_ns
        self.names.append(phase)


@pytest.fixture
def phases():
    sink = Phases()
    set_phase_sink(sink)
    yield sink
    set_phase_sink(None)


def finish(engine, requests):
    engine.submit(list(enumerate(requests)))
    found = []
    while len(found) < len(requests):
        found += engine.step()
    assert not [one.error for one in found if one.error]


SCORE = Request(
    kind="loglikelihood", prompt=pack_tokens([5, 6, 7]), continuation=pack_tokens([8, 9])
)
GENERATE = Request(
    kind="generate",
    prompt=pack_tokens([5, 6, 7]),
    sampling=Sampling(until=(), max_new_tokens=4),
)


def test_one_by_one(models, phases):
    engine = TransformersEngine(EngineSpec(device="cpu", threads=1))
    engine.load(models["llama"])

    finish(engine, [SCORE, GENERATE])

    assert phases.names[:2] == ["prefill", "prefill"]
    assert set(phases.names[2:]) == {"decode"}
    engine.close()


def test_together(models, phases):
    engine = TransformersEngine(EngineSpec(device="cpu", threads=1, mode="free", max_batch=4))
    engine.load(models["llama"])

    finish(engine, [SCORE, GENERATE, GENERATE])

    assert phases.names.count("prefill") == 3
    assert phases.names.count("decode") >= 1
    engine.close()
