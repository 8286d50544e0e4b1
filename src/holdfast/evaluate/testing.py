"""Re-export the types that stand-ins for an engine, a harness or a client implement or use."""

from holdfast.evaluate.engines.simulated import SimulatedEngine
from holdfast.evaluate.types.engine import Engine, EngineSpec, Finished
from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.types.harness import (
    AnsweredSample,
    EngineClient,
    Harness,
    ModelFacts,
    SampleRequests,
    TaskResult,
)
from holdfast.evaluate.types.requests import (
    Answer,
    Request,
    Sampling,
    encode_answer,
    keyed,
    pack_tokens,
)
from holdfast.evaluate.types.suite import TaskEntry

__all__ = [
    "Answer",
    "AnsweredSample",
    "Engine",
    "EngineClient",
    "EngineSpec",
    "EvaluationError",
    "Finished",
    "Harness",
    "ModelFacts",
    "Request",
    "SampleRequests",
    "Sampling",
    "SimulatedEngine",
    "TaskEntry",
    "TaskResult",
    "encode_answer",
    "keyed",
    "pack_tokens",
]
